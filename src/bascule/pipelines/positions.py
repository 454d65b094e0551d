"""Taking positions over: each driver run writes its name into the positions it works from, and its predecessor's tasks stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from bascule.core import crash
from bascule.kafka.admin import Topics
from bascule.kafka.guards import RECORD_BYTES, Role, guard
from bascule.kafka.history import TopicHistory, committed_offset
from bascule.kafka.positions import POSITION_PARTITIONS, Position, PositionLost, PositionReader, position_key
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines.carry import Claim
from bascule.pipelines.registry import DivertPlan, journal_position, offset_of, plan_diverts
from bascule.pipelines.spec import Divert, Pipelines, Start

log = structlog.get_logger()

COMMON = "diverts"
APART = "divert:"
BEGUN = "begun:"
JOURNAL_PARTITION = 0
_UNLIMITED = {"retention.ms": "-1", "retention.bytes": "-1"}
#: As large as a journal record may be; the cluster's own limit still holds.
_RECORD_BYTES_MAX = str(RECORD_BYTES)
_COMPACTED = {
    "cleanup.policy": "compact",
    # A reader begins with the whole partition: it is kept small. Kafka cleans closed segments only, and 1 MiB is the smallest.
    "segment.bytes": str(1 << 20),
    "min.cleanable.dirty.ratio": "0.01",
}


class Positions:
    """The positions of one bridge, as one driver run (``owner``) takes them over."""

    def __init__(self, pipelines: Pipelines, owner: str) -> None:
        self.pipelines = pipelines
        self.owner = owner
        self.topics = Topics(pipelines.kafka)

    def prepare_topics(self) -> None:
        """Creates Bascule's own topics that the pipelines write. Raises UnsafeTopic when the positions, for one, would not be kept."""
        pipelines = self.pipelines
        wanted = {
            pipelines.positions_topic: (POSITION_PARTITIONS, _COMPACTED),
            pipelines.ingress_topic: (1, {**_UNLIMITED, "max.message.bytes": _RECORD_BYTES_MAX}),
            pipelines.dead_letter_topic: (1, {"max.message.bytes": _RECORD_BYTES_MAX}),
        }
        there = self.topics.partitions()
        for topic, (partitions, config) in wanted.items():
            if topic not in there:
                settings = {**config, "min.insync.replicas": str(pipelines.min_insync_replicas)}
                self.topics.create(topic, partitions, settings, replication_factor=pipelines.replication_factor)
        self.topics.await_visible(wanted)
        roles: dict[str, tuple[Role, int | None]] = {
            pipelines.journal_topic: (Role.OTHERS_LOG, 1),
            pipelines.positions_topic: (Role.TABLE, POSITION_PARTITIONS),
            pipelines.ingress_topic: (Role.LOG, 1),
            pipelines.dead_letter_topic: (Role.OUTPUT, None),
        }
        for finding in guard(pipelines.kafka, roles):
            log.warning("a topic is not as it should be", finding=str(finding))

    def known_keys(self) -> set[str]:
        """Every key that holds a position, perhaps one of an open transaction."""
        reader = PositionReader(self.pipelines.kafka, self.pipelines.positions_topic, range(POSITION_PARTITIONS), committed=False)
        try:
            return set(reader.read())
        finally:
            reader.close()

    def writer(self, key: str) -> TransactionalWriter:
        """A writer of a position; taking it ends whatever an earlier one had open."""
        return TransactionalWriter(self.pipelines.kafka, self.pipelines.transactional_id(key), self.pipelines.positions_topic, key)

    def group(self, pipeline: str) -> str:
        """The consumer group that shows a pipeline's lag."""
        return f"{self.pipelines.prefix}.{self.pipelines.bridge_id}.{pipeline}"

    def claim(self, key: str, position: Position) -> Claim:
        """What a task must find to work."""
        return Claim(key, position.topic, position.topic_id, position.partition, position.owner, position.members)

    def take_diverts(self, diverts: tuple[Divert, ...], topic_id: str) -> DivertPlan | None:
        """Registers new diverts, parks disabled ones, forgets removed ones, and takes all that stand somewhere over.

        One transaction under the common transactional id writes it all, after every writer of an earlier run was fenced.
        Raises PositionLost.
        """
        topic = self.pipelines.journal_topic
        history = TopicHistory(self.pipelines.kafka, topic, JOURNAL_PARTITION)
        keys = self.known_keys()
        kept, begun = (
            {key.partition("/")[0].removeprefix(prefix): key for key in keys if key.startswith(prefix)} for prefix in (APART, BEGUN)
        )
        common_writer = self.writer(self.common_key)
        writers = {name: self.writer(key) for name, key in kept.items()}
        try:
            common = common_writer.current()
            own = {name: found for name, writer in writers.items() if (found := writer.current()) is not None}
            self._check(COMMON, topic, JOURNAL_PARTITION, topic_id, [found for found in (common, *own.values()) if found], history)

            def start_of(divert: Divert) -> Position:
                if divert.name in begun:
                    raise PositionLost(f"divert {divert.name!r} has run before and has no position any more: restore the positions")
                return journal_position(topic, topic_id, JOURNAL_PARTITION, offset_of(divert.start, history), history)

            plan = plan_diverts(diverts, common, own, start_of)
            if plan is None:
                return None
            plan = DivertPlan(
                replace(plan.common, owner=self.owner),
                {name: replace(position, owner=self.owner) for name, position in plan.apart.items()},
                {name: replace(position, owner="") for name, position in plan.parked.items()},
                plan.new,
            )
            configured = {divert.name for divert in diverts}
            others: dict[str, Position | None] = dict.fromkeys(kept.values())
            others |= dict.fromkeys(key for name, key in begun.items() if name not in configured)
            others |= {self.begun_key(name): position for name, position in plan.new.items()}
            others |= {self.own_key(name): position for name, position in (plan.apart | plan.parked).items()}
            crash.point("driver.take.before")
            common_writer.write([], common, plan.common, others)
            crash.point("driver.take.after")
            return plan
        finally:
            for writer in (common_writer, *writers.values()):
                writer.close()

    def take_partition(self, pipeline: str, topic: str, partition: int, topic_id: str, start: Start) -> Position:
        """Takes one source partition over; a new one begins at ``start``. Raises PositionLost."""
        key = position_key(pipeline, topic, partition)
        history = TopicHistory(self.pipelines.kafka, topic, partition)
        writer = self.writer(key)
        try:
            found = writer.current()
            self._check(pipeline, topic, partition, topic_id, [found] if found else [], history)
            position = found or Position(topic, topic_id, partition, offset_of(start, history))
            position = replace(position, owner=self.owner)
            writer.write([], found, position)
            crash.point("driver.source.after")
            return position
        finally:
            writer.close()

    def move(self, key: str, change: Callable[[Position], Position], others: Mapping[str, Position | None]) -> Position:
        """Changes a position of this run, and others with it, in one transaction."""
        writer = self.writer(key)
        try:
            found = writer.current()
            if found is None:
                raise PositionLost(f"the position {key!r} is missing")
            after = change(found)
            writer.write([], found, after, others)
            return after
        finally:
            writer.close()

    def stored(self) -> dict[str, Position]:
        """All positions as they stand, without taking any."""
        reader = PositionReader(self.pipelines.kafka, self.pipelines.positions_topic, range(POSITION_PARTITIONS))
        try:
            return reader.read()
        finally:
            reader.close()

    def read(self, key: str) -> Position:
        """A position as it stands now, after its writers were fenced. Raises PositionLost."""
        return self.move(key, lambda found: found, {})

    @property
    def common_key(self) -> str:
        """The key of the position that the diverts share."""
        return position_key(COMMON, self.pipelines.journal_topic, JOURNAL_PARTITION)

    def own_key(self, divert: str) -> str:
        """The key of a divert's position while it stands apart."""
        return position_key(f"{APART}{divert}", self.pipelines.journal_topic, JOURNAL_PARTITION)

    def begun_key(self, divert: str) -> str:
        """The key of the position at which a divert once began."""
        return position_key(f"{BEGUN}{divert}", self.pipelines.journal_topic, JOURNAL_PARTITION)

    def _check(self, pipeline: str, topic: str, partition: int, topic_id: str, found: list[Position], history: TopicHistory) -> None:
        if not found:
            seen = committed_offset(self.pipelines.kafka, self.group(pipeline), topic, partition)
            if seen >= 0:
                raise PositionLost(
                    f"pipeline {pipeline!r} has no position for {topic}-{partition}, yet its consumer group {self.group(pipeline)!r}"
                    f" has come to offset {seen}: the positions were lost. Restore {self.pipelines.positions_topic!r}, or delete"
                    " the group to begin anew"
                )
            return
        first = history.earliest()
        for position in found:
            if position.topic_id != topic_id:
                raise PositionLost(f"topic {topic!r} was deleted and created again since pipeline {pipeline!r} last ran")
            if position.offset < first:
                raise PositionLost(
                    f"pipeline {pipeline!r} stands at offset {position.offset} of {topic}-{partition}, whose records begin at {first}:"
                    " those between were deleted before they were taken"
                )
