"""The writing side of a Spark task: take records in order, group them into transactions, write each transaction with its position."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from bascule.core import crash
from bascule.core.errors import BadRecord, Denied, InvalidInput, TopicMissing, Unavailable
from bascule.core.kafka_records import Output, SourceStart
from bascule.core.log import get_log
from bascule.kafka.admin import Topics
from bascule.kafka.errors import INVALID_TIMESTAMP
from bascule.kafka.lineage import ANSWER_S, Lineages, PartitionLineage
from bascule.kafka.positions import PositionReaders
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines.spec import PipelinesSpec, TransactionLimits
from bascule.pipelines.tally import CarriedTally
from bascule.pipelines.timestamps import Timestamps
from bascule.tracing.provider import process_tracing
from bascule.writer.claims import Claim
from bascule.writer.errors import Unwritable, WriteDenied
from bascule.writer.incarnation import FIRST_PAUSE_S, LONGEST_PAUSE_S
from bascule.writer.lineage import READ_ANYWHERE, SeenRecord
from bascule.writer.position import UNKNOWN_EPOCH, Position, PositionLost

if TYPE_CHECKING:
    from bascule.pipelines.spans import CarriedSpans

#: Containers allocated and not freed between two runs of the garbage collector: those of several transactions.
_COLLECT_AFTER = 1_000_000
#: While a transaction fills, its records are passed to Kafka's client in groups of this size, so that few are left for the end.
_AHEAD_RECORDS = 500
#: A position without output is moved at this interval, in seconds: most records of the journal may concern no divert.
POSITION_S = 1.0
#: How long the leader of a source may take to confirm the records of an open transaction, in seconds. Most often it answers within 5 ms.
CONFIRM_S = 2.0
#: After this many answers that were late, or came from another leader, the task ends.
DOUBTS_MAX = 8
#: A writer has two Kafka clients with half a dozen threads. Writers may use half of the descriptors that the process may open.
_WRITER_DESCRIPTORS = 20

log = get_log(__name__)

#: Returns the replacement for a record that Kafka refused. Raises the given error if it is not the record's fault.
Fallback = Callable[[Exception], Output]


class Targets:
    """Target topics, created and checked on first use. A topic in use is not checked again."""

    def __init__(self, pipelines: PipelinesSpec) -> None:
        self._topics = Topics(pipelines.kafka)
        self.timestamps = Timestamps(self._topics)
        self._partitions = pipelines.target_partitions
        self._replication_factor = pipelines.replication_factor
        self._there: set[str] = set()
        self._in_use: set[str] = set()

    def ensure(self, topic: str) -> None:
        """Create the topic if it is missing, and check that it is writable.

        Raises BadRecord if Kafka refuses the name, Denied without the right to write, and TopicMissing if the configuration creates no
        topics.
        """
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
            self._topics.await_visible([topic])  # before this, Kafka does not report who may write to the topic
            self._there.add(topic)
        self._topics.check_writable(topic)
        self._in_use.add(topic)

    def id_of(self, topic: str) -> str:
        """Return the id of a topic, "" if there is none. Raises Unavailable."""
        return self._topics.ids([topic]).get(topic, "")

    def look_again(self) -> None:
        """Check each topic again at its next use."""
        self._there.clear()
        self._in_use.clear()


class NewLeader(Unavailable):
    """The source has a new leader: records that a former leader returned and that were not carried must be read again."""


def read_again(carry: Callable[[], None]) -> None:
    """Call ``carry``, and again each time it raises NewLeader: it continues at the stored position. Raises its other errors."""
    while True:
        try:
            return carry()
        except NewLeader as error:
            log.info("reading source again", reason=str(error))


class _NotConfirmed(Exception):
    """The leader of the source is another one, or has not answered: it must be asked again, without an open transaction."""


@dataclass(slots=True)
class _Tools:
    """Objects that a worker process keeps between batches: idle writers, each with its next incarnation, tallies, and views of Kafka."""

    idle: dict[str, TransactionalWriter] = field(default_factory=dict)
    tallies: dict[str, CarriedTally] = field(default_factory=dict)
    targets: Targets | None = None
    lineages: Lineages | None = None
    readers: PositionReaders | None = None


_kept = _Tools()


def writer_for(pipelines: PipelinesSpec, key: str) -> TransactionalWriter:
    """Return a writer of a position. The caller returns it with ``give_back``."""
    writer = _kept.idle.pop(key, None)
    if writer is None:
        # The records of a transaction stay in memory until the commit: the collector would scan them repeatedly in vain.
        gc.set_threshold(_COLLECT_AFTER)
        place = pipelines.transactional_id(key), pipelines.topics.positions, key
        writer = TransactionalWriter(pipelines.kafka, *place, readers=_readers_of(pipelines))
    return writer


def allow_writers(count: int) -> None:
    """Let the process open the descriptors that this number of writers needs, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * _WRITER_DESCRIPTORS * count
    if needed > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))


def spans_of_process() -> CarriedSpans | None:
    """Return the spans of the next transactions; None if tracing is off."""
    tracing = process_tracing("bascule-pipelines")
    if tracing is None:
        return None
    from bascule.pipelines.spans import CarriedSpans

    return CarriedSpans(tracing)


def give_back(writer: TransactionalWriter) -> None:
    """Keep a writer for the next batch of its position."""
    _kept.idle[writer.key] = writer


def targets_for(pipelines: PipelinesSpec) -> Targets:
    """Return this process's view of the target topics."""
    if _kept.targets is None:
        _kept.targets = Targets(pipelines)
    return _kept.targets


def lineage_of(pipelines: PipelinesSpec, topic: str, partition: int) -> PartitionLineage:
    """Return this process's view of the leaders of a source partition. Raises Unavailable."""
    if _kept.lineages is None:
        _kept.lineages = Lineages(pipelines.kafka, _readers_of(pipelines).shared.offsets)
    return _kept.lineages.of(topic, partition)


def _readers_of(pipelines: PipelinesSpec) -> PositionReaders:
    if _kept.readers is None:
        _kept.readers = PositionReaders(pipelines.kafka, pipelines.topics.positions)
    return _kept.readers


def held_position(pipelines: PipelinesSpec, claim: Claim) -> Position:
    """Return the position to continue from, read after the transactional id was taken. Raises PositionLost or PositionTaken."""
    writer = writer_for(pipelines, claim.key)
    try:
        return claim.check(writer.current())
    finally:
        give_back(writer)


class Carrier:
    """Writes the records of one source partition in transactions of bounded size, each with the position after it.

    A context manager: when the block ends with an error, it leaves no transaction open.
    """

    def __init__(
        self, pipelines: PipelinesSpec, claim: Claim, position: Position, state: Callable[[], dict[str, Any]] = dict, *,
        unseen: bool = False,
    ) -> None:  # fmt: skip
        """Begin at ``position``. ``state`` returns the position's other fields (the fence of the journal) as of the last record taken.

        ``unseen``: the reader of the source, which is Spark's, does not say which topic and which leader it reads. Then Kafka is asked
        before each transaction.
        """
        crash.point("task.begin")
        self._state = state
        self._limits: TransactionLimits = pipelines.limits
        self._targets = targets_for(pipelines)
        self._lineage = lineage_of(pipelines, claim.topic, claim.partition)
        self._writer = writer_for(pipelines, claim.key)
        self._tally = _kept.tallies.setdefault(claim.key, CarriedTally(pipelines.topics.dead_letters))
        self._tally.begin()
        self.spans = spans_of_process()
        self._outputs: list[Output] = []
        self._fallbacks: list[Fallback] = []
        self._size_bytes = self._ahead = 0
        self._since_s = time.monotonic()
        self.position = position
        self.begun_at = position.offset
        # No record has been taken yet, so all come from the leader of this epoch, or from a later one.
        self._begun_epoch = position.leader_epoch
        if self._begun_epoch == UNKNOWN_EPOCH:
            self._begun_epoch = self._lineage.leader_epoch()
        self._unseen = unseen
        self._reached = self.position.offset
        self._last: SeenRecord | None = None
        self.written = 0

    def __enter__(self) -> Self:
        """Return the carrier itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Discard uncommitted work."""
        if self.spans is not None:
            self.spans.dropped()
        self._writer.abandon()
        give_back(self._writer)

    @property
    def start(self) -> SourceStart:
        """Return the start at which the source must be opened."""
        return SourceStart(self.position.offset, self.position.topic_id, self._begun_epoch)

    def add(self, output: Output, fallback: Fallback, pipeline: str = "", sent_ms: int = 0) -> None:
        """Add a record of a pipeline, sent at a time since the epoch, to the transaction of the current source record."""
        output = self._placed(output, fallback)
        self._outputs.append(output)
        self._fallbacks.append(fallback)
        size_bytes = output.size_bytes
        self._size_bytes += size_bytes
        self._tally.add(pipeline, size_bytes, sent_ms)

    def reach(self, record: SeenRecord) -> None:
        """Finish a source record, and commit if the transaction is full.

        Raises NewLeader after a position with another leader epoch was written: a former leader may have returned the record, and the
        check of the next transaction would not show that the log has another one.
        """
        if self.position.leader_epoch not in (UNKNOWN_EPOCH, self._begun_epoch):
            raise self._new_leader()
        self._last = record
        self._tally.taken()
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

    def gathers_s(self) -> float:
        """Return how long further records of the source are worth waiting for, in seconds: a transaction cannot begin earlier."""
        return self._writer.begins_in_s()

    def rest(self) -> None:
        """Commit where no further record is there: output at once, a position or durations without output after POSITION_S."""
        if self._outputs or time.monotonic() - self._since_s >= POSITION_S:
            if self._tally.untold and self._reached == self.position.offset:
                self._tell()
            self.commit()

    def pause(self) -> None:
        """Commit output before the caller waits for something else.

        A transaction that stays open meanwhile holds back the readers of its topics, and Kafka aborts it after 30 s.
        """
        if self._outputs:
            self.commit()

    def commit(self) -> None:
        """Write the added records and the position reached. A record that Kafka refuses is replaced by its fallback.

        Raises Unavailable if the source now has other records than those that were read, and PositionLost if its log has lost records
        before the position.
        """
        self._since_s = time.monotonic()
        if self._last is None or self._reached == self.position.offset:
            return
        # Most often the leader is the same, and is asked while Kafka stores the records and the position.
        leader_epoch = self._checked(self._last) if self._unseen else self._begun_epoch
        after = replace(self.position, offset=self._reached, leader_epoch=leader_epoch, **self._state())
        doubts = 0
        while True:
            try:
                after = replace(after, carried=self._tally.counted(self.position.carried, self._outputs))
                self._writer.write(self._outputs, self.position, after, confirm=partial(self._confirm, after, doubts))
                self._writer.prepare()
                break
            except _NotConfirmed:
                doubts += 1
                after = replace(after, leader_epoch=self._leader_asked_again(self._last, doubts))
            except Unwritable as refused:
                self._replace(refused)
            except WriteDenied as denied:
                self._choose_topics_again(denied)
        crash.point("task.transaction.after")
        self.position = after
        self.written += len(self._outputs)
        self._tally.committed(time.monotonic() - self._since_s)
        if self.spans is not None:
            self.spans.committed()
        self._outputs, self._fallbacks, self._size_bytes, self._ahead = [], [], 0, 0

    async def _confirm(self, after: Position, doubts: int) -> None:
        """Check that the leader which the position names still leads its source. Raises _NotConfirmed.

        The transaction is open meanwhile, and readers of its topics wait for its end: those of the ingress topic with the messages of all
        other ingresses. So the leader has little time to answer. It gets more after each doubt: Kafka may be slow.
        """
        if not self._lineage.confirms(after.leader_epoch, after.offset, min(CONFIRM_S * 2**doubts, ANSWER_S)):
            raise _NotConfirmed

    def _leader_asked_again(self, last: SeenRecord, doubts: int) -> int:
        """Return the epoch of a leader that has the records that were read. The transaction was aborted.

        Raises Unavailable if the source now has other records, if no leader answers, or after too many doubts. Raises PositionLost if the
        log has lost records before the position.
        """
        if self._unseen:
            leader_epoch = self._checked(last)
        else:
            leader_epoch = self._lineage.check_read(self.position, self._begun_epoch, last, self._reached)
        if doubts >= DOUBTS_MAX:
            raise Unavailable(f"{self.position.topic}-{self.position.partition}: no leader has confirmed the records in {doubts} attempts")
        time.sleep(min(FIRST_PAUSE_S * 2 ** (doubts - 1), LONGEST_PAUSE_S))
        return leader_epoch

    def _checked(self, last: SeenRecord) -> int:
        """Return the epoch of the leader of the topic that the position names, if it has the records that were read.

        Raises Unavailable if the topic was recreated, or if the leader has other records, and PositionLost if the log has lost records
        before the position.
        """
        at = self.position
        if at.topic_id and self._targets.id_of(at.topic) != at.topic_id:
            raise Unavailable(f"topic {at.topic!r} is not the one with the id {at.topic_id}: it was deleted or recreated")
        return self._lineage.check_read(at, READ_ANYWHERE, last, self._reached)

    def pass_over(self, end: int) -> None:
        """Move the position to the end of its source, past transaction markers and aborted records.

        Otherwise a retention that deletes these would leave the position before the first offset, as if records had been lost. Raises
        Unavailable, also if the leader changes meanwhile: the client reports an end once, so the source must be read again (NewLeader).
        Raises PositionLost if the log has lost records before the position.
        """
        self.commit()
        if end <= self.position.offset:
            return
        leader_epoch = self._lineage.check_tail(self.position)
        if self._begun_epoch not in (UNKNOWN_EPOCH, leader_epoch):
            # A former leader may have reported the end, and the new one may have records before it. The next task begins with its epoch.
            if leader_epoch != self.position.leader_epoch:
                self._writer.write([], self.position, replace(self.position, leader_epoch=leader_epoch))
            raise self._new_leader()
        after = replace(self.position, offset=end, leader_epoch=leader_epoch)
        try:
            changed = self._lineage.check_tail(after) != leader_epoch
        except PositionLost:  # nothing before the stored position is lost
            changed = True
        if changed:
            raise Unavailable(f"{after.topic}-{after.partition} has a new leader, which may have another end than {end}")
        self._writer.write([], self.position, after)
        self.position, self._reached = after, end

    def _new_leader(self) -> NewLeader:
        return NewLeader(f"{self.position.topic}-{self.position.partition} has a new leader, so it must be read again")

    def _tell(self) -> None:
        """Store the durations of the last transaction, after which none has come."""
        after = replace(self.position, carried=self._tally.counted(self.position.carried, ()))
        self._writer.write([], self.position, after)
        self.position = after
        self._tally.told()

    def _placed(self, output: Output, fallback: Fallback) -> Output:
        try:
            self._targets.ensure(output.topic)
        except (BadRecord, Denied, TopicMissing) as error:
            output = fallback(error)
            self._targets.ensure(output.topic)
        return self._targets.timestamps.fitting(output)

    def _choose_topics_again(self, denied: WriteDenied) -> None:
        """After a permission was revoked, replace the records of unwritable topics by their fallback.

        Raises ``denied`` if there are none.
        """
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
        # If a sender's clock is wrong, all of its records are refused: convert them together instead of one after the other.
        self._outputs = list(map(self._targets.timestamps.fitting, self._outputs))

    def _substitute(self, place: int, refused: Unwritable) -> Output:
        """Return the dead letter that replaces a record."""
        output, fault = self._outputs[place], refused.faults[place]
        substitute = self._fallbacks[place](BadRecord(fault.str()))
        if substitute.topic == output.topic:
            # The dead-letter topic refuses the record as too large, too: keep its place in the source, without the value.
            substitute = substitute._replace(value=b"")
            if not output.value:
                what = f"topic {substitute.topic!r} refused a dead letter, even without its value ({fault.str()})"
                raise Unwritable(refused.faults, f"{what}. Raise max.message.bytes of the topic") from refused
        self._targets.ensure(substitute.topic)
        return substitute
