"""What runs in Spark's Python workers: take records in order, cut them into transactions, write each with its position."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Self

from bascule.core import crash
from bascule.core.errors import BadRecord, Denied, InvalidInput, TopicMissing
from bascule.core.kafka_records import Output
from bascule.kafka.admin import Topics
from bascule.kafka.errors import INVALID_TIMESTAMP
from bascule.kafka.lineage import Lineages, PartitionLineage
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines.spec import PipelinesSpec, TransactionLimits
from bascule.pipelines.timestamps import Timestamps
from bascule.writer.claims import Claim
from bascule.writer.errors import PositionMoved, Unwritable, WriteDenied
from bascule.writer.lineage import SeenRecord
from bascule.writer.position import Position

#: Containers made and not freed between two looks of the garbage collector: those of several transactions.
_COLLECT_AFTER = 1_000_000
#: Records are handed to Kafka's client so many at a time while the transaction fills: what is left at its end takes no time to speak of.
_AHEAD_RECORDS = 500
#: Spark gives the partitions of a source to any worker, so each worker keeps a writer for each partition of its query. With fewer,
#: partitions that take turns would make a new writer for each batch. This is the least number, and that of other tasks.
IDLE_WRITERS_MIN = 8
#: A writer has three Kafka clients, with a dozen threads. Half of what a process may open is for its writers.
_WRITER_DESCRIPTORS = 20

#: Says what to write in place of a record that Kafka refuses; raises what it is given where that is not the record's fault.
Fallback = Callable[[Exception], Output]


class Targets:
    """Target topics, created and looked at on first use. A topic in use is not asked for again."""

    def __init__(self, pipelines: PipelinesSpec) -> None:
        self._topics = Topics(pipelines.kafka)
        self.timestamps = Timestamps(self._topics)
        self._partitions = pipelines.target_partitions
        self._replication_factor = pipelines.replication_factor
        self._there: set[str] = set()
        self._in_use: set[str] = set()

    def ensure(self, topic: str) -> None:
        """Raises BadRecord when Kafka refuses the name, Denied, TopicMissing when topics are not to be created."""
        if topic in self._in_use:
            return
        if topic not in self._there:
            self._there.update(self._topics.partitions())
        if topic not in self._there:
            if self._partitions < 1:
                raise TopicMissing(topic, "does not exist and is not created, because pipelines.target_partitions = 0")
            try:
                self._topics.create(topic, self._partitions, {}, replication_factor=self._replication_factor)
            except InvalidInput as error:
                raise BadRecord(str(error)) from error
            self._topics.await_visible([topic])  # else Kafka does not say yet who may write it
            self._there.add(topic)
        self._topics.check_writable(topic)
        self._in_use.add(topic)

    def look_again(self) -> None:
        """Each topic is asked for anew at its next use."""
        self._there.clear()
        self._in_use.clear()


@dataclass(slots=True)
class _Tools:
    """What a worker process keeps between batches: writers that nobody uses, each with its next incarnation."""

    idle: dict[str, TransactionalWriter] = field(default_factory=dict)
    idle_max: int = IDLE_WRITERS_MIN
    targets: Targets | None = None
    lineages: Lineages | None = None


_kept = _Tools()


def writer_for(pipelines: PipelinesSpec, key: str) -> TransactionalWriter:
    """A writer of a position, to be given back."""
    writer = _kept.idle.pop(key, None)
    if writer is None:
        # A transaction's records are kept until it is committed: the collector would look through them again and again, for nothing.
        gc.set_threshold(_COLLECT_AFTER)
        writer = TransactionalWriter(pipelines.kafka, pipelines.transactional_id(key), pipelines.topics.positions, key)
    return writer


def keep_writers(keys: Collection[str]) -> None:
    """Keep idle writers of these positions, and of no others, as far as the process may open descriptors for them."""
    for key in _kept.idle.keys() - set(keys):
        _kept.idle.pop(key).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * _WRITER_DESCRIPTORS * len(keys)
    if needed > soft != resource.RLIM_INFINITY:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = len(keys) if soft == resource.RLIM_INFINITY else min(len(keys), soft // (2 * _WRITER_DESCRIPTORS))
    _kept.idle_max = max(IDLE_WRITERS_MIN, room)


def give_back(writer: TransactionalWriter) -> None:
    """Keeps a writer for the next batch of its position.

    Beyond what is kept the newest one goes: partitions take turns, and the one that was not used for the longest time comes next.
    """
    if len(_kept.idle) >= _kept.idle_max:
        writer.close()
    else:
        _kept.idle[writer.key] = writer


def targets_for(pipelines: PipelinesSpec) -> Targets:
    """This process's view of the target topics."""
    if _kept.targets is None:
        _kept.targets = Targets(pipelines)
    return _kept.targets


def lineage_of(pipelines: PipelinesSpec, topic: str, partition: int) -> PartitionLineage:
    """This process's view of a source partition's leaders. Raises Unavailable."""
    if _kept.lineages is None:
        _kept.lineages = Lineages(pipelines.kafka)
    return _kept.lineages.of(topic, partition)


def held_position(pipelines: PipelinesSpec, claim: Claim) -> Position:
    """The position to go on from, read after the transactional id was taken. Raises PositionLost or PositionTaken."""
    writer = writer_for(pipelines, claim.key)
    try:
        return claim.check(writer.current())
    finally:
        give_back(writer)


class Carrier:
    """Writes the records of one source partition in transactions of bounded size, each with the position after it.

    A context: what is left by an error leaves no transaction open.
    """

    def __init__(self, pipelines: PipelinesSpec, claim: Claim, position: Position, state: Callable[[], dict[str, Any]] = dict) -> None:
        """``state`` gives the position's further fields (the journal's fence) as of the last record taken."""
        crash.point("task.begin")
        self._state = state
        self._limits: TransactionLimits = pipelines.limits
        self._targets = targets_for(pipelines)
        self._lineage = lineage_of(pipelines, claim.topic, claim.partition)
        self._writer = writer_for(pipelines, claim.key)
        self._outputs: list[Output] = []
        self._fallbacks: list[Fallback] = []
        self._size_bytes = self._ahead = 0
        self._since_s = time.monotonic()
        self.position = position
        self.begun_at = position.offset
        self._reached = self.position.offset
        self._first = -1
        self._last: SeenRecord | None = None
        self.written = 0

    def __enter__(self) -> Self:
        """The carrier."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Gives up what is not committed."""
        self._writer.abandon()
        give_back(self._writer)

    def add(self, output: Output, fallback: Fallback) -> None:
        """A record to write in the transaction of the source record at hand."""
        output = self._placed(output, fallback)
        self._outputs.append(output)
        self._fallbacks.append(fallback)
        self._size_bytes += output.size_bytes

    def reach(self, record: SeenRecord) -> None:
        """A source record is complete and the next one is to be taken; commits when the transaction is full."""
        if self._reached == self.position.offset:
            self._first = record.offset
        self._last = record
        self._reached = record.offset + 1
        count = len(self._outputs)
        if (
            count >= self._limits.records
            or self._size_bytes >= self._limits.size_bytes
            or time.monotonic() - self._since_s >= self._limits.age_s
        ):
            self.commit()
        elif count >= self._ahead + _AHEAD_RECORDS:
            self._ahead = count
            self._writer.ahead(self._outputs, self.position)

    def commit(self) -> None:
        """Writes what has been added and the position reached. Records that Kafka refuses are replaced by their fallback.

        Raises Unavailable where the source has other records by now than were read.
        """
        self._since_s = time.monotonic()
        if self._last is None or self._reached == self.position.offset:
            return
        leader_epoch = self._lineage.check_read(self.position.leader_epoch, self._last, self._reached)
        after = replace(self.position, offset=self._reached, leader_epoch=leader_epoch, **self._state())
        while True:
            try:
                self._writer.write(self._outputs, self.position, after)
                self._writer.prepare()
                break
            except Unwritable as refused:
                self._replace(refused)
            except WriteDenied as denied:
                self._place_anew(denied)
            except PositionMoved as moved:
                self.position = self._passed_over(moved)
        crash.point("task.transaction.after")
        self.position = after
        self.written += len(self._outputs)
        self._outputs, self._fallbacks, self._size_bytes, self._ahead = [], [], 0, 0

    def _passed_over(self, moved: PositionMoved) -> Position:
        """Where the driver, which took the source for idle, has moved the position: up to the first record at hand and no further.

        Raises what it is given where something else has happened.
        """
        found: Position | None = moved.found
        known = self.position
        if found is None or not known.offset < found.offset <= self._first or _moved(known, found) != found:
            raise moved
        return found

    def _placed(self, output: Output, fallback: Fallback) -> Output:
        try:
            self._targets.ensure(output.topic)
        except (BadRecord, Denied, TopicMissing) as error:
            output = fallback(error)
            self._targets.ensure(output.topic)
        return self._targets.timestamps.fitting(output)

    def _place_anew(self, denied: WriteDenied) -> None:
        """After a right was taken away: what its topic does not take has its fallback. Raises what it is given where all are taken."""
        self._targets.look_again()
        placed = [self._placed(*each) for each in zip(self._outputs, self._fallbacks, strict=True)]
        if placed == self._outputs:
            raise denied
        self._outputs = placed

    def _replace(self, refused: Unwritable) -> None:
        for place, fault in refused.faults.items():
            output = self._outputs[place]
            if fault.code() == INVALID_TIMESTAMP and output.timestamp_ms:
                self._outputs[place] = self._targets.timestamps.refused(output)
            else:
                self._outputs[place] = self._substitute(place, refused)
        # Of a sender whose clock is wrong all records are refused: they are not found one by one.
        self._outputs = list(map(self._targets.timestamps.fitting, self._outputs))

    def _substitute(self, place: int, refused: Unwritable) -> Output:
        """The dead letter in place of a record."""
        output, fault = self._outputs[place], refused.faults[place]
        substitute = self._fallbacks[place](BadRecord(fault.str()))
        if substitute.topic == output.topic:
            # Too large for the dead-letter topic as well: where it stands in the source is what can be said of it.
            substitute = substitute._replace(value=b"")
            if not output.value:
                what = f"topic {substitute.topic!r} refused a dead letter, even without its value ({fault.str()})"
                raise Unwritable(refused.faults, f"{what}. Raise max.message.bytes of the topic") from refused
        self._targets.ensure(substitute.topic)
        return substitute


def _moved(position: Position, found: Position) -> Position:
    return replace(position, offset=found.offset, leader_epoch=found.leader_epoch)
