"""Taking positions over: a driver writes a name into the positions it works from, a new one each time, and tasks of earlier ones stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
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
from bascule.kafka.positions import PositionReader
from bascule.kafka.transactional import TransactionalWriter, end_open_transactions
from bascule.pipelines.losses import LEAVE_OUT, loss_of
from bascule.pipelines.registry import DivertPlan, journal_position, offset_of, plan_diverts
from bascule.pipelines.spec import EARLIEST, DivertSpec, PipelinesSpec, StartPosition
from bascule.writer.claims import Claim, Claims
from bascule.writer.epochs import first_marks, taken_since
from bascule.writer.errors import PositionMoved
from bascule.writer.position import (
    BEGUN,
    COMMON,
    DIVERT,
    INGRESS,
    POSITION_PARTITIONS,
    Position,
    PositionLost,
    lag_group,
    position_key,
    position_partition,
)
from bascule.writer.reading import READ_TIMEOUT_S
from bascule.writer.transactional import WRITE_DEADLINE_S

log = get_log(__name__)

#: Topic and partition.
Source = tuple[str, int]

TAKEN_AT_ONCE = 8
#: Who looks after queries waits no longer for somebody's open transaction.
IDLE_TIMEOUT_S = 5.0
#: Sources that are looked at later than that wait for the next time.
PASSED_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class _Journal:
    """The journal as it is when a driver starts."""

    topic: str
    partition: int
    topic_id: str
    history: TopicHistory
    lineage: PartitionLineage
    first: int
    end: int
    leader_epoch: int

    def position(self, offset: int) -> Position:
        """Of a reader that begins there."""
        found = journal_position(self.topic, self.topic_id, self.partition, offset, self.history)
        return replace(found, leader_epoch=self.leader_epoch)

    def taken_since(self, position: Position | None) -> dict[str, int]:
        """Where what exclusive diverts took begins, behind a position: one in an earlier journal says nothing of this one.

        Where nobody has answered for it, the marks themselves say it of an epoch whose start is trimmed.
        """
        known = position if position is not None and position.topic_id == self.topic_id else None
        unknown = first_marks(known, self.history, self.end) if known is None or known.vacant else {}
        return taken_since(known, self.history, self.end) | unknown

    def what_is_left(
        self, own: Mapping[str, Position], diverts: tuple[DivertSpec, ...]
    ) -> tuple[dict[str, Position], dict[str, PositionLost]]:
        """Where diverts stand that stand elsewhere, and why those of them that are enabled cannot go on from there.

        One that is not configured any more answers for what is left of the journal: what it took in it nobody knows.
        """
        found = {name: loss_of(f"{DIVERT}{name}", at, self.topic_id, self.first, self.lineage) for name, at in own.items()}
        losses = {name: loss for name, loss in found.items() if loss is not None}
        removed = losses.keys() - {divert.name for divert in diverts}
        for name in removed:
            log.error("unread records of a removed divert deleted", divert=name, reason=str(losses[name]))
        left = {name: replace(self.position(self.first), exclusive=(name,), members=(name,)) for name in removed}
        return {**own, **left}, {divert.name: losses[divert.name] for divert in diverts if divert.enabled and divert.name in losses}


class Positions:
    """The positions of one bridge, as one driver run (``owner``) takes them over.

    ``bascule.writer.claims`` has the rules. The leader is the common position, or an ingress's own.
    """

    def __init__(self, pipelines: PipelinesSpec, owner: str) -> None:
        self.pipelines = pipelines
        self.owner = owner
        self.topics = Topics(pipelines.kafka)
        self._claims = Claims(owner)

    def prepare_topics(self) -> None:
        """Creates Bascule's own topics that the pipelines write. Raises UnsafeTopic when the positions, for one, would not be kept."""
        pipelines = self.pipelines
        wanted = {
            pipelines.topics.positions: own_topics.POSITIONS,
            pipelines.topics.ingress: own_topics.INGRESS,
            pipelines.topics.dead_letters: own_topics.DEAD_LETTERS,
        }
        found = own_topics.ensure(
            pipelines.kafka,
            wanted,
            {pipelines.topics.journal: TopicRole.OTHERS_LOG},
            replication_factor=pipelines.replication_factor,
            min_insync_replicas=pipelines.min_insync_replicas,
        )
        _tell(found)

    def end_transactions(self) -> None:
        """Aborts what an earlier driver's writers have left open, also those of pipelines that this one does not take.

        Who reads what they wrote to, the positions among it, would wait until Kafka does it, which may be after minutes.
        """
        keys = (key for key in self._seen_keys() if key.startswith((f"{COMMON}/", DIVERT, INGRESS)))  # and no sink of a user's job
        end_open_transactions(self.pipelines.kafka, map(self.pipelines.transactional_id, keys))

    def look_at_transactions(self) -> None:
        """To be called when a position has been taken, by which Kafka has made what it needs. Raises UnsafeTopic."""
        _tell(guard_transactions(self.pipelines.kafka))

    def know_diverts(self) -> bool:
        """Whether diverts have run here, be they configured or not."""
        return self.common_key in self._seen_keys()

    def writer(self, key: str, deadline_s: float = WRITE_DEADLINE_S) -> TransactionalWriter:
        """A writer of a position; taking it ends whatever an earlier one had open."""
        pipelines = self.pipelines
        return TransactionalWriter(pipelines.kafka, pipelines.transactional_id(key), pipelines.topics.positions, key, deadline_s=deadline_s)

    def group(self, pipeline: str) -> str:
        """The consumer group that shows a pipeline's lag."""
        return lag_group(self.pipelines.topics.prefix, self.pipelines.bridge_id, pipeline)

    def claim(self, key: str, position: Position) -> Claim:
        """What a task must find to work."""
        return Claim(key, position.topic, position.topic_id, position.partition, position.owner, position.members)

    def take_diverts(self, diverts: tuple[DivertSpec, ...], topic_id: str) -> DivertPlan | None:
        """Registers new diverts, parks disabled ones, forgets removed ones, and takes all that stand somewhere over.

        One transaction under the common transactional id writes it all. It compares the common position only: the others have been given
        names that nobody else knows, after the common one, so a driver that starts meanwhile makes it fail. None when there is nothing
        to do: no divert, and nothing left of earlier ones. Raises PositionLost, of the common position alone, and PositionMoved.
        """
        topic, partition = self.pipelines.topics.journal, self.pipelines.topics.partition
        history, lineage = self._looks(topic, partition)
        # First of all: what a broker takes that begins while this looks around lies behind it.
        end = run_blocking(lineage.end())
        with closing(self.writer(self.common_key)) as common_writer:
            common = self._take(common_writer, self.common_key)
            keys = self._seen_keys()
            kept, begun = (
                {key.partition("/")[0].removeprefix(prefix): key for key in keys if key.startswith(prefix)} for prefix in (DIVERT, BEGUN)
            )
            own = {name: found for name, key in kept.items() if (found := self._taken(key, self.common_key)) is not None}
            self._check(COMMON, topic, partition, topic_id, common, history, lineage)
            if common is not None and not common.vacant and end.offset < common.offset:
                raise Unavailable(f"stale end offset {end.offset} of journal {topic!r}: the Kafka node is cut off from the cluster")
            journal = _Journal(topic, partition, topic_id, history, lineage, history.earliest(), *end)

            def has_begun(name: str) -> bool:
                return name in begun and self._stored(begun[name]) is not None

            own, lost = journal.what_is_left(own, diverts)
            fit = tuple(replace(divert, enabled=divert.enabled and divert.name not in lost) for divert in diverts)
            plan = self._plan(fit, common, own, has_begun, journal)
            if plan is None:
                return None
            configured = {divert.name for divert in diverts}
            others: dict[str, Position | None] = dict.fromkeys(kept.values())
            others |= dict.fromkeys(key for name, key in begun.items() if name not in configured)
            others |= {self.begun_key(name): position for name, position in plan.new.items()}
            others |= {self.own_key(name): position for name, position in (plan.separate | plan.parked).items()}
            crash.point("driver.take.before")
            common_writer.write([], common, plan.common, others)
            self._claims.hold([self.common_key, *map(self.own_key, plan.separate)])
            crash.point("driver.take.after")
            return None if plan.common.vacant else replace(plan, lost=lost)

    def _plan(
        self, diverts: tuple[DivertSpec, ...], stored: Position | None, own: Mapping[str, Position], has_begun: Callable[[str], bool],
        journal: _Journal,
    ) -> DivertPlan | None:  # fmt: skip
        """The plan under a name of this run. What exclusive diverts took for which nobody stands is looked up in the journal."""
        common = None if stored is None or stored.vacant else stored
        if not diverts and common is None:
            return None
        configured = {divert.name for divert in diverts}
        taken = journal.taken_since(stored)
        # A divert with a position of its own that is not configured any more still answers for what it took; the common position does for
        # all others.
        own = {name: at for name, at in own.items() if name in configured or name in taken or name in journal.taken_since(at)}
        unclaimed = taken.keys() - {*own, *(common.members if common else ())}
        if common is not None:
            unclaimed &= configured

        def at(offset: int) -> Position:
            return replace(common, members=(), owner="") if common is not None and offset == common.offset else journal.position(offset)

        def start_of(divert: DivertSpec) -> Position:
            if has_begun(divert.name):
                topic = self.pipelines.topics.positions
                raise PositionLost(f"the position of divert {divert.name!r} is lost: the divert has run before. Restore topic {topic!r}")
            return at(min(offset_of(divert.start, journal.history), journal.end))

        plan = plan_diverts(diverts, common, own, start_of, {name: at(taken[name]) for name in unclaimed if not has_begun(name)})
        if plan is None:
            return None
        if not diverts and not taken and not plan.separate:
            # Nothing of earlier diverts is left: there is no more to answer for.
            return replace(plan, common=replace(plan.common, offset=journal.end, epoch=journal.end, exclusive=(), owner=""))
        owner = self._claims.name(self.common_key)
        return DivertPlan(
            replace(plan.common, owner=owner),
            {name: replace(position, owner=owner) for name, position in plan.separate.items()},
            {name: replace(position, owner="") for name, position in plan.parked.items()},
            plan.new,
            frozenset({*own, *taken} - configured),
            journal.end,
        )

    def take_sources(
        self, pipeline: str, sources: Mapping[Source, str], start: StartPosition, names: Callable[[str], bool] = lambda _: True
    ) -> list[Position]:
        """Takes all source partitions of an ingress over, each with its topic's id.

        Those of a new ingress begin at ``start``. What a known one finds later is new since then: all of it counts. One transaction under
        the ingress's own transactional id adds those that are new, and says that it is known. Positions in topics that the ingress does
        not name any more (``names``) are left vacant: it goes on there if it names them again, or begins anew where that cannot be.
        Raises PositionLost, PositionTaken.
        """
        with closing(self.writer(pipeline)) as leader, ThreadPoolExecutor(TAKEN_AT_ONCE) as pool:
            known = self._take(leader, pipeline)
            found = dict(zip(sources, pool.map(partial(self._take_source, pipeline), sources, sources.values()), strict=True))
            begin = StartPosition(EARLIEST) if known or any(found.values()) else start
            owner = self._claims.name(pipeline)
            taken = {
                position_key(pipeline, *source): replace(position or self._beginning(source, sources[source], begin), owner=owner)
                for source, position in found.items()
            }
            left = {key: replace(at, owner="") for key, at in self._left_out(pipeline, names).items()}
            leader.write([], known, replace(known or Position("", "", 0, 0), owner=owner), taken | left)
            self._claims.hold([pipeline, *taken])
        return list(taken.values())

    def move(self, key: str, before: Position, after: Position, others: Mapping[str, Position | None]) -> Position:
        """Moves a position from where this run has read it, and ``others`` that it has read, in one transaction. Raises PositionMoved."""
        with closing(self.writer(key)) as writer:
            writer.write([], before, after, others)
        return after

    def pass_over(self, ends: Mapping[Claim, int | None]) -> list[Claim]:
        """Moves positions of idle sources past what is no record: ends of transactions, and what was rolled back.

        Else a retention that deletes these would leave a position before the first offset, as if records had been lost. ``ends`` are those
        of the last finished batches; None where there was none.
        Returns those that it could look at: not where the topic is gone, or Kafka does not answer, nor, once that takes long, the others:
        the driver has more to do. Raises Unavailable.
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
        """All positions, without taking any: as some node knows them, or, where a decision rests on them, behind barrier records."""
        everywhere = range(POSITION_PARTITIONS)
        with closing(PositionReader(self.pipelines.kafka, self.pipelines.topics.positions, everywhere)) as reader:
            return reader.read_behind_barrier(timeout_s) if decides else reader.read(timeout_s)

    def read(self, key: str) -> Position:
        """Diverts' position of this run as it is now; only who is told of this reading can move it.

        The journal is looked at, too: it may have been trimmed, or made anew, since the run began. Raises PositionLost, PositionTaken,
        Unavailable.
        """
        found = self._taken(key, self.common_key)
        if found is None:
            raise PositionLost(f"position {key!r} is missing; restore topic {self.pipelines.topics.positions!r}")
        topic, partition = self.pipelines.topics.journal, self.pipelines.topics.partition
        topic_id = self.topics.ids([topic]).get(topic)
        if topic_id is None:
            raise Unavailable(f"topic {topic!r} no longer exists")
        self._check(key.partition("/")[0], topic, partition, topic_id, found, *self._looks(topic, partition))
        return found

    @property
    def common_key(self) -> str:
        """The key of the position that the diverts share."""
        return self._key(COMMON)

    def own_key(self, divert: str) -> str:
        """The key of a divert's position while it has one of its own."""
        return self._key(f"{DIVERT}{divert}")

    def begun_key(self, divert: str) -> str:
        """The key of the position at which a divert once began."""
        return self._key(f"{BEGUN}{divert}")

    def _key(self, pipeline: str) -> str:
        return position_key(pipeline, self.pipelines.topics.journal, self.pipelines.topics.partition)

    def _taken(self, key: str, leader: str) -> Position | None:
        with closing(self.writer(key)) as writer:
            return self._take(writer, leader)

    def _take(self, writer: TransactionalWriter, leader: str) -> Position | None:
        """The position under a new name of this run. See ``Claims.take``. Raises PositionTaken, Unavailable."""
        return run_blocking(self._claims.take(writer.protocol, leader))

    def _take_source(self, pipeline: str, source: Source, topic_id: str) -> Position | None:
        found = self._taken(position_key(pipeline, *source), pipeline)
        history, lineage = self._looks(*source)
        if found is not None and found.vacant:
            loss = loss_of(pipeline, replace(found, owner=self.owner), topic_id, history.earliest(), lineage)
            if loss is not None:
                log.warning("source restarts from start offset", ingress=pipeline, topic=source[0], partition=source[1], reason=str(loss))
                found = None
        else:
            self._check(pipeline, *source, topic_id, found, history, lineage, f". {LEAVE_OUT}")
        crash.point("driver.source.after")
        return found

    def _left_out(self, pipeline: str, names: Callable[[str], bool]) -> dict[str, Position]:
        stored = self.stored(decides=True)
        keys = [key for key, at in stored.items() if key.startswith(f"{pipeline}/") and not at.vacant and not names(at.topic)]
        return {key: found for key in keys if (found := self._taken(key, pipeline)) is not None}

    def removed_ingresses(self, configured: Container[str]) -> set[str]:
        """Those that have run and are not configured any more, whose positions are not vacant yet."""
        stored = ((key.partition("/")[0], at) for key, at in self.stored(decides=True).items() if key.startswith(INGRESS) and "/" in key)
        return {pipeline for pipeline, at in stored if not at.vacant and pipeline.removeprefix(INGRESS) not in configured}

    def _beginning(self, source: Source, topic_id: str, start: StartPosition) -> Position:
        topic, partition = source
        history, lineage = self._looks(topic, partition)
        position = Position(topic, topic_id, partition, offset_of(start, history))
        return replace(position, leader_epoch=lineage.check_tail(position))

    def _looks(self, topic: str, partition: int) -> tuple[TopicHistory, PartitionLineage]:
        kafka = self.pipelines.kafka
        return TopicHistory(kafka, topic, partition), PartitionLineage(kafka, topic, partition)

    def _pass_over(self, deadline: float, claim: Claim, at: Position) -> bool:
        if time.monotonic() > deadline:
            return False
        try:
            lineage = PartitionLineage(self.pipelines.kafka, at.topic, at.partition)
            leader_epoch = lineage.check_tail(at, IDLE_TIMEOUT_S)
            record = self._next_record(at)
            after = replace(at, offset=record, leader_epoch=leader_epoch)
            if record > at.offset and lineage.check_tail(after, IDLE_TIMEOUT_S) == leader_epoch:
                with suppress(PositionMoved), closing(self.writer(claim.key, IDLE_TIMEOUT_S)) as writer:  # moved: then it is not idle
                    writer.write([], at, after)
        except (Unavailable, PositionLost) as error:  # of what is lost the next start of the query tells
            log.warning("could not advance position of idle source, will retry", key=claim.key, error=str(error))
            return False
        return True

    def _next_record(self, position: Position) -> int:
        """Where the next record is or will be."""
        history = TopicHistory(self.pipelines.kafka, position.topic, position.partition, IDLE_TIMEOUT_S)
        end = history.stable()
        if end <= position.offset or history.earliest() > position.offset:  # nothing is there, or nobody knows what was
            return position.offset
        for message in history.records(position.offset, end, committed=True):
            return known_offset(message)
        return end

    def _seen_keys(self) -> set[str]:
        """Every key that has, had or may have a position: also those in transactions that are open or were rolled back."""
        seen: set[str] = set()
        everywhere = range(POSITION_PARTITIONS)
        with closing(
            TableReader(
                self.pipelines.kafka, self.pipelines.topics.positions, everywhere, lambda key, _: seen.add(key.decode()), committed=False
            )
        ) as reader:
            reader.read_behind_barrier()
        return seen

    def _stored(self, key: str) -> Position | None:
        with closing(PositionReader(self.pipelines.kafka, self.pipelines.topics.positions, [position_partition(key)])) as reader:
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
            # It decides nothing: who reads this can see whether more was deleted than ends of transactions.
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
