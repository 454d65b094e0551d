"""Takeover of positions: each run of a driver writes a new owner into the positions that it uses, which stops the tasks of earlier runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from bascule.core import crash
from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import TableReader
from bascule.kafka.guards import Finding, TopicRole, guard_transactions
from bascule.kafka.history import TopicHistory, committed_offset, known_offset
from bascule.kafka.lineage import PartitionLineage
from bascule.kafka.positions import PositionReaders
from bascule.kafka.transactional import TransactionalWriter, end_open_transactions
from bascule.pipelines.losses import LEAVE_OUT, loss_of
from bascule.pipelines.registry import DivertPlan, KnownPositions, offset_of
from bascule.pipelines.spec import DivertSpec, PipelinesSpec, StartPosition
from bascule.pipelines.takeover import Beginnings, JournalAtStart, StoredKeys, plan_takeover
from bascule.writer.carried import NOTHING_CARRIED
from bascule.writer.claims import Claim, Claims
from bascule.writer.errors import PositionMoved
from bascule.writer.position import (
    BEGUN,
    COMMON,
    DEFINED,
    DIVERT,
    EARLIEST,
    GROUP,
    INGRESS,
    POSITION_PARTITIONS,
    Position,
    PositionLost,
    PositionTaken,
    defined_mark,
    group_pipeline,
    lag_group,
    position_key,
    position_partition,
    with_counts_kept,
)
from bascule.writer.reading import READ_TIMEOUT_S
from bascule.writer.redrive import POSITION_KEY
from bascule.writer.transactional import WRITE_DEADLINE_S

log = get_log(__name__)

#: Topic and partition.
Source = tuple[str, int]

TAKEN_AT_ONCE = 8
#: Timeout for reads of a running driver, in seconds: it does not wait longer for an open transaction of another writer.
IDLE_TIMEOUT_S = 5.0
#: The driver spends at most this time, in seconds, on idle sources. The others wait for the next round.
PASSED_WITHIN_S = 5.0


class Positions:
    """The positions of one bridge, as one driver run (``owner``) takes them over.

    ``bascule.writer.claims`` has the rules. The leader is the common position, or the position of an ingress.
    """

    def __init__(self, pipelines: PipelinesSpec, owner: str) -> None:
        self.pipelines = pipelines
        self.owner = owner
        self.topics = Topics(pipelines.kafka)
        self._claims = Claims(owner)
        self._readers = PositionReaders(pipelines.kafka, pipelines.topics.positions)
        self.shared = self._readers.shared
        self._key_reader: TableReader | None = None  # a start reads the keys several times, each time from where it was
        self._keys: set[str] = set()

    def prepare_topics(self) -> None:
        """Create the topics of Bascule that the pipelines write. Raises UnsafeTopic if a topic could lose records, such as positions."""
        pipelines = self.pipelines
        wanted = {
            pipelines.topics.positions: own_topics.POSITIONS,
            pipelines.topics.ingress: own_topics.INGRESS,
            pipelines.topics.dead_letters: own_topics.DEAD_LETTERS,
            pipelines.topics.control: own_topics.CONTROL,
            pipelines.topics.reports: own_topics.CONTROL,
            pipelines.topics.redrive: own_topics.REDRIVE,
        }
        found = own_topics.ensure(
            pipelines.kafka,
            wanted,
            {pipelines.topics.journal: TopicRole.OTHERS_LOG},
            replication_factor=pipelines.replication_factor,
            min_insync_replicas=pipelines.min_insync_replicas,
            topics=self.topics,
        )
        _tell(found)

    def end_transactions(self) -> None:
        """Abort the open transactions of an earlier driver's writers, including pipelines that this driver does not run.

        Otherwise readers of the topics, including the positions topic, wait until Kafka aborts the transactions, which may take minutes.
        """
        prefixes = f"{COMMON}/", GROUP, DIVERT, INGRESS, POSITION_KEY
        keys = (key for key in self._seen_keys() if key.startswith(prefixes))  # not the sinks of users' jobs
        end_open_transactions(self.pipelines.kafka, map(self.pipelines.transactional_id, keys))

    def look_at_transactions(self) -> None:
        """Check the settings of Kafka's transactions. Call this after a position was taken, because Kafka creates its topic then.

        Raises UnsafeTopic.
        """
        _tell(guard_transactions(self.pipelines.kafka))

    def know_diverts(self) -> bool:
        """Return True if diverts have ever run in this bridge, configured now or not."""
        return self.common_key in self._seen_keys()

    def writer(self, key: str, deadline_s: float = WRITE_DEADLINE_S) -> TransactionalWriter:
        """Return a writer of a position. Taking it aborts the open transaction of an earlier writer."""
        pipelines = self.pipelines
        return TransactionalWriter(
            pipelines.kafka, pipelines.transactional_id(key), pipelines.topics.positions, key, deadline_s=deadline_s, readers=self._readers
        )

    def group(self, pipeline: str) -> str:
        """Return the consumer group that shows the lag of a pipeline."""
        return lag_group(self.pipelines.topics.prefix, self.pipelines.bridge_id, pipeline)

    def claim(self, key: str, position: Position) -> Claim:
        """Return the claim that a task must find in the position before it works."""
        return Claim(key, position.topic, position.topic_id, position.partition, position.owner, position.members)

    def take_diverts(self, diverts: tuple[DivertSpec, ...], topic_id: str) -> DivertPlan | None:
        """Register new diverts, park disabled ones, forget removed ones, move those of another group, and take over all positions.

        One transaction under the common transactional id writes all positions. It compares only the common position: this run has already
        written owners that nobody else knows into the others, after the common one, so a driver that starts meanwhile makes the transaction
        fail. The positions of groups are taken before those of single diverts: the join of an earlier driver compares the position of a
        group, so the join is complete before this run reads the divert's own position, or it fails. Before that, the earlier driver may
        give a member a position of its own, so this run then reads the keys again.

        Returns None if there is nothing to do: no divert is configured, and earlier ones have left nothing. Raises PositionLost if the
        common position is missing, and PositionMoved.
        """
        topic, partition = self.pipelines.topics.journal, self.pipelines.topics.partition
        history, lineage = self._looks(topic, partition)
        # Read the end first: if a broker starts during this takeover, all messages that it accepts are after this offset.
        end = run_blocking(lineage.end())
        with closing(self.writer(self.common_key)) as common_writer:
            common = self._take(common_writer, self.common_key)
            stored = self._stored_keys(diverts)
            groups = self._taken_all(stored.groups)
            if groups:
                stored = self._stored_keys(diverts)
            own = self._taken_all(stored.own)
            common_lost = self._loss_of_common(common, topic_id, history, lineage)
            if common is not None and not common.vacant and common_lost is None and end.offset < common.offset:
                raise Unavailable(f"stale end offset {end.offset} of journal {topic!r}: the Kafka node is cut off from the cluster")
            journal = JournalAtStart(topic, partition, topic_id, history, lineage, history.earliest(), *end)
            beginnings = Beginnings(
                lambda name: name in stored.begun and self.current(stored.begun[name]) is not None, self.pipelines.topics.positions
            )
            known = KnownPositions(common, own, groups=groups)
            if common_lost is not None and (left := journal.left_common(common, diverts, common_lost)) is not None:
                known, common_lost = replace(known, common=left[0], own=left[1] | own), None
            plan = plan_takeover(diverts, known, beginnings, journal, common_lost)
            if plan is None:
                if groups or known.common is not common:  # nobody continues there, and the broker would keep the journal for them
                    common_writer.write([], common, known.common, dict.fromkeys([*stored.groups.values(), *stored.begun.values()]))
                return None
            plan = plan.owned_by(partial(self._claims.name, self.common_key))
            configured = {divert.name for divert in diverts}
            others: dict[str, Position | None] = dict.fromkeys([*stored.groups.values(), *stored.own.values()])
            others |= dict.fromkeys(key for name, key in stored.begun.items() if name not in configured)
            others |= {self.begun_key(name): position for name, position in plan.new.items()}
            others |= {self.own_key(name): position for name, position in (plan.separate | plan.parked | plan.untouched).items()}
            others |= {self.group_key(group): position for group, position in plan.groups.items()}
            before = {self.common_key: common, **{stored.groups[name]: at for name, at in groups.items()}}
            before |= {stored.own[name]: at for name, at in own.items()}
            written = with_counts_kept(before, {self.common_key: plan.common, **others}, self.common_key, configured)
            shared = {group: written[self.group_key(group)] or at for group, at in plan.groups.items()}
            plan = replace(plan, common=written.pop(self.common_key) or plan.common, groups=shared)
            crash.point("driver.take.before")
            common_writer.write([], common, plan.common, written)
            self._claims.hold([self.common_key, *map(self.group_key, plan.groups), *map(self.own_key, plan.separate)])
            self._claims.give_up([*map(self.own_key, plan.parked)])
            crash.point("driver.take.after")
            return None if plan.idle else plan

    def _stored_keys(self, _diverts: tuple[DivertSpec, ...]) -> StoredKeys:
        """Return the keys for whose positions a start of the diverts is responsible."""
        return StoredKeys.of(self._seen_keys())

    def _taken_all(self, keys: Mapping[str, str]) -> dict[str, Position]:
        return {name: found for name, key in keys.items() if (found := self._taken(key, self.common_key)) is not None}

    def _loss_of_common(
        self, common: Position | None, topic_id: str, history: TopicHistory, lineage: PartitionLineage
    ) -> PositionLost | None:
        """Return why the default group cannot continue from its position. Raises PositionLost if the position is missing."""
        try:
            self._check(COMMON, self.pipelines.topics.journal, self.pipelines.topics.partition, topic_id, common, history, lineage)
        except PositionLost as lost:
            if common is None:
                raise
            return lost
        return None

    def take_sources(
        self, pipeline: str, sources: Mapping[Source, str], start: StartPosition, names: Callable[[str], bool] = lambda _: True,
        definition: str = "", *, begun: bool = False,
    ) -> list[Position]:  # fmt: skip
        """Take over all source partitions of an ingress. ``sources`` has the topic id of each.

        Partitions of a new ingress begin at ``start``. Partitions that a known ingress finds later are new, and it reads them from the
        first record. One transaction under the ingress's own transactional id adds the new positions and registers the ingress. Positions
        in topics that the ingress no longer names (``names``) become vacant: if the ingress names the topic again, it continues there, or
        starts like a new one if records are lost. ``definition`` is the id of a definition made at run time, which is stored with the
        positions. If the ingress has ``begun`` with it, a missing registration means that another driver has deleted the ingress. Raises
        PositionLost, PositionTaken.
        """
        with closing(self.writer(pipeline)) as leader, ThreadPoolExecutor(TAKEN_AT_ONCE) as pool:
            known = self._take(leader, pipeline)
            if begun and known is None:
                raise PositionTaken(f"the positions of {pipeline!r} were deleted by another driver of the bridge; this driver stops")
            found = dict(zip(sources, pool.map(partial(self._take_source, pipeline), sources, sources.values()), strict=True))
            begin = StartPosition(EARLIEST) if known or any(found.values()) else start
            owner = self._claims.name(pipeline)
            taken = {
                position_key(pipeline, *source): replace(position or self._beginning(source, sources[source], begin), owner=owner)
                for source, position in found.items()
            }
            left = {key: replace(at, owner="") for key, at in self._left_out(pipeline, names).items()}
            marks = {f"{DEFINED}{pipeline}": defined_mark(definition)} if definition else {}
            leader.write([], known, replace(known or Position("", "", 0, 0), owner=owner), taken | left | marks)
            self._claims.hold([pipeline, *taken])
        return list(taken.values())

    def leader_of(self, _key: str) -> str:
        """Return the key that is taken before a position of diverts: see ``Claims.take``."""
        return self.common_key

    def part(self, pipeline: str, before: Position, names: Collection[str]) -> dict[str, Position]:
        """Give members of the position of a group positions of their own at the same offset, in one transaction.

        Returns the new positions by divert. The position of the group stays, also without members, until the next takeover. Raises
        PositionMoved.
        """
        owner = self._claims.name(self.common_key)
        own = {name: replace(before, members=(name,), owner=owner, carried=NOTHING_CARRIED) for name in names}
        after = replace(before, members=tuple(name for name in before.members if name not in own))
        crash.point("hold.before")
        self.move(self.key_of(pipeline), before, after, {self.own_key(name): position for name, position in own.items()})
        self._claims.hold([self.own_key(name) for name in own])
        crash.point("hold.after")
        return own

    def rewrite(
        self, leader: str, key: str, others: Collection[str],
        change: Callable[[Mapping[str, Position | None]], Mapping[str, Position | None] | None],
    ) -> None:  # fmt: skip
        """Take over positions that no task uses, and write what ``change`` makes of them in one transaction, unless it returns None.

        The transaction compares the position of ``key``. ``leader`` is the key that is taken first (``Claims.take``). Raises PositionMoved,
        PositionTaken, Unavailable.
        """
        with closing(self.writer(key)) as writer, ThreadPoolExecutor(TAKEN_AT_ONCE) as pool:
            before = self._take(writer, leader)
            found = dict(zip(others, pool.map(partial(self._taken, leader=leader), others), strict=True))
            after = change({key: before, **found})
            if after is not None:
                crash.point("offsets.before")
                writer.write([], before, after[key], {other: at for other, at in after.items() if other != key})
                crash.point("offsets.after")

    def move(self, key: str, before: Position, after: Position, others: Mapping[str, Position | None]) -> Position:
        """Move a position, and ``others``, from the values that this run has read, in one transaction. Raises PositionMoved."""
        with closing(self.writer(key)) as writer:
            writer.write([], before, after, others)
        return after

    def pass_over(self, ends: Mapping[Claim, int | None]) -> list[Claim]:
        """Move positions of idle sources past offsets that are no records: transaction markers and aborted records.

        Otherwise a retention that deletes these would leave a position before the first offset, as if records had been lost. ``ends`` are
        the end offsets of the last finished batches, None where there was no batch. Returns the claims that were checked. It leaves out
        claims whose topic is gone or for which Kafka does not answer, and, after PASSED_WITHIN_S, all that remain. Raises Unavailable.
        """
        deadline = time.monotonic() + PASSED_WITHIN_S
        stored = self.stored(IDLE_TIMEOUT_S)
        found = {claim: at for claim in ends if (at := stored.get(claim.key)) is not None and at.owner == claim.owner}
        behind = {claim: at for claim, at in found.items() if at.offset != ends[claim]}
        ids = self.topics.ids({claim.topic for claim in behind})
        there = {claim: at for claim, at in behind.items() if ids.get(claim.topic) == claim.topic_id}
        with ThreadPoolExecutor(TAKEN_AT_ONCE) as pool:
            passed = dict(zip(there, pool.map(partial(self._pass_over, deadline), there, there.values()), strict=True))
        return [claim for claim in ends if claim not in behind or passed.get(claim)]

    def stored(self, timeout_s: float = READ_TIMEOUT_S, *, decides: bool = False) -> dict[str, Position]:
        """Return all positions without taking any.

        If a decision depends on the result, set ``decides``: it reads behind barrier records.
        """
        with self._readers.reading(range(POSITION_PARTITIONS)) as reader:
            return reader.read_behind_barrier(timeout_s) if decides else reader.read(timeout_s)

    def close(self) -> None:
        """Free the clients."""
        self._forget_keys()
        self._readers.close()

    def read(self, key: str) -> Position:
        """Return the current position of this run's diverts. Only the caller that has read it can move it.

        Also checks the journal, which may have been trimmed or recreated since the run began. Raises PositionLost, PositionTaken,
        Unavailable.
        """
        found = self.taken(key)
        topic, partition = self.pipelines.topics.journal, self.pipelines.topics.partition
        topic_id = self.topics.ids([topic]).get(topic)
        if topic_id is None:
            raise Unavailable(f"topic {topic!r} no longer exists")
        self._check(key.partition("/")[0], topic, partition, topic_id, found, *self._looks(topic, partition))
        return found

    def taken(self, key: str) -> Position:
        """Return the current position of this run's diverts without a check of the journal. Raises PositionLost if it is missing."""
        found = self._taken(key, self.leader_of(key))
        if found is None:
            raise PositionLost(f"position {key!r} is missing; restore topic {self.pipelines.topics.positions!r}")
        return found

    @property
    def common_key(self) -> str:
        """Return the key of the position that the diverts of the default group share."""
        return self.key_of(COMMON)

    def own_key(self, divert: str) -> str:
        """Return the key of a divert's own position."""
        return self.key_of(f"{DIVERT}{divert}")

    def group_key(self, group: str) -> str:
        """Return the key of the position that the diverts of a group share."""
        return self.key_of(group_pipeline(group))

    def begun_key(self, divert: str) -> str:
        """Return the key of the position at which a divert once began."""
        return self.key_of(f"{BEGUN}{divert}")

    def key_of(self, pipeline: str) -> str:
        """Return the key of a position in the journal by the name of its pipeline."""
        return position_key(pipeline, self.pipelines.topics.journal, self.pipelines.topics.partition)

    def _taken(self, key: str, leader: str) -> Position | None:
        with closing(self.writer(key)) as writer:
            return self._take(writer, leader)

    def _take(self, writer: TransactionalWriter, leader: str) -> Position | None:
        """Return the position under a new owner name of this run. See ``Claims.take``. Raises PositionTaken, Unavailable."""
        return run_blocking(self._claims.take(writer.protocol, leader))

    def _take_source(self, pipeline: str, source: Source, topic_id: str) -> Position | None:
        found = self._taken(position_key(pipeline, *source), pipeline)
        history, lineage = self._looks(*source)
        if found is not None and found.vacant:
            loss = loss_of(pipeline, replace(found, owner=self.owner), topic_id, history.earliest(), lineage)
            if loss is not None:
                log.warning("source restarts from start offset", ingress=pipeline, topic=source[0], partition=source[1], reason=str(loss))
                # What was carried still counts: the counters of a running driver do not fall.
                found = replace(self._beginning(source, topic_id, StartPosition(EARLIEST)), carried=found.carried)
        else:
            self._check(pipeline, *source, topic_id, found, history, lineage, f". {LEAVE_OUT}")
        crash.point("driver.source.after")
        return found

    def _left_out(self, pipeline: str, names: Callable[[str], bool]) -> dict[str, Position]:
        stored = self.stored(decides=True)
        keys = [key for key, at in stored.items() if key.startswith(f"{pipeline}/") and not at.vacant and not names(at.topic)]
        return {key: found for key in keys if (found := self._taken(key, pipeline)) is not None}

    def removed_ingresses(self, configured: Container[str]) -> set[str]:
        """Return the ingresses that have run, are no longer configured, and still have positions that are not vacant."""
        stored = ((key.partition("/")[0], at) for key, at in self.stored(decides=True).items() if key.startswith(INGRESS) and "/" in key)
        return {pipeline for pipeline, at in stored if not at.vacant and pipeline.removeprefix(INGRESS) not in configured}

    def _beginning(self, source: Source, topic_id: str, start: StartPosition) -> Position:
        topic, partition = source
        history, lineage = self._looks(topic, partition)
        position = Position(topic, topic_id, partition, offset_of(start, history))
        return replace(position, leader_epoch=lineage.check_tail(position))

    def _looks(self, topic: str, partition: int) -> tuple[TopicHistory, PartitionLineage]:
        kafka, admin = self.pipelines.kafka, self.shared.offsets
        return TopicHistory(kafka, topic, partition, admin=admin), PartitionLineage(kafka, topic, partition, admin)

    def _pass_over(self, deadline: float, claim: Claim, at: Position) -> bool:
        if time.monotonic() > deadline:
            return False
        try:
            lineage = PartitionLineage(self.pipelines.kafka, at.topic, at.partition, self.shared.offsets)
            leader_epoch = lineage.check_tail(at, IDLE_TIMEOUT_S)
            record = self._next_record(at)
            after = replace(at, offset=record, leader_epoch=leader_epoch)
            if record > at.offset and lineage.check_tail(after, IDLE_TIMEOUT_S) == leader_epoch:
                # a moved position means that the source is not idle
                with suppress(PositionMoved), closing(self.writer(claim.key, IDLE_TIMEOUT_S)) as writer:
                    writer.write([], at, after)
        except (Unavailable, PositionLost) as error:  # the next start of the query reports a loss
            log.warning("could not advance position of idle source, will retry", key=claim.key, error=str(error))
            return False
        return True

    def _next_record(self, position: Position) -> int:
        """Return the offset of the next record, or where it will be."""
        history = TopicHistory(self.pipelines.kafka, position.topic, position.partition, IDLE_TIMEOUT_S, self.shared.offsets)
        end = history.stable()
        if end <= position.offset or history.earliest() > position.offset:  # no record, or records that were deleted
            return position.offset
        for message in history.records(position.offset, end, committed=True):
            return known_offset(message)
        return end

    def _seen_keys(self) -> set[str]:
        """Return each key that has, had or may have a position, also in transactions that are open or were rolled back."""
        reader = self._key_reader
        if reader is None or reader.failed:
            self._forget_keys()
            seen = self._keys = set[str]()
            place = self.pipelines.topics.positions, range(POSITION_PARTITIONS)
            reader = TableReader(self.pipelines.kafka, *place, lambda key, _: seen.add(key.decode()), committed=False, shared=self.shared)
            self._key_reader = reader
        reader.read_behind_barrier()
        reader.rest()
        return set(self._keys)

    def _forget_keys(self) -> None:
        if self._key_reader is not None:
            self._key_reader.close()
            self._key_reader = None

    def current(self, key: str) -> Position | None:
        """Return one position without taking it. Raises PositionLost, Unavailable."""
        with self._readers.reading([position_partition(key)]) as reader:
            return reader.read_behind_barrier().get(key)

    def _check(
        self, pipeline: str, topic: str, partition: int, topic_id: str, found: Position | None, history: TopicHistory,
        lineage: PartitionLineage, remedy: str = "",
    ) -> None:  # fmt: skip
        loss = loss_of(pipeline, found, topic_id, history.earliest(), lineage) if found is not None else None
        if found is not None and loss is None:
            return
        seen = committed_offset(self.pipelines.kafka, self.group(pipeline), topic, partition)
        if loss is not None:
            # For information only: the reader can see whether more than transaction markers was deleted.
            come = f". Consumer group {self.group(pipeline)!r} had reached offset {seen}" if seen >= 0 else ""
            raise PositionLost(f"{loss}{come}{remedy}")
        if seen >= 0:
            raise PositionLost(
                f"the position of pipeline {pipeline!r} for {topic}-{partition} is lost: consumer group {self.group(pipeline)!r}"
                f" has reached offset {seen}. Restore topic {self.pipelines.topics.positions!r}, or delete the consumer group to restart"
                " from the start offset"
            )


def _tell(findings: list[Finding]) -> None:
    for finding in findings:
        log.warning("weak topic setting", finding=str(finding))
