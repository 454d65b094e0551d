"""A partition's log as its leader has it: records, transactions, producers, replicas and the high watermark.

All replicas share one list of records, since below the high watermark they never differ. Behind it the list has the leader's tail, which
followers do not have yet; a leader change may truncate it. A former leader that is cut off from its peers is a view: the high watermark,
the last stable offset and the start of the moment when it was cut off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bascule.journal.offsets import UNKNOWN_OFFSET
from tests.sim.world import Process, Promise

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

Headers = Sequence[tuple[str, str | bytes | None]]
#: Of a fetch: what was to be read has been deleted.
TRIMMED: Final = "trimmed"
_OFFSET: Final = attrgetter("offset")


class KafkaFault(Exception):
    """What a client is told: ``fenced``, ``invalid-state``, ``incomplete``, ``failed``, ``timed-out``, ``trimmed`` or ``closed``."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class NotNow(Exception):
    """The server answers with an error that the client retries."""


class Later(Exception):
    """The server answers when a promise is kept: enough replicas have stored a record."""

    def __init__(self, answer: Promise[Any]) -> None:
        super().__init__("waits for replicas")
        self.answer = answer


class Transaction:
    """One transaction of a transactional id."""

    __slots__ = ("partitions",)

    def __init__(self) -> None:
        self.partitions: dict[Partition, None] = {}


class Record(NamedTuple):
    """A stored record. ``transaction`` is None for one outside of transactions; ``key`` and ``value`` are None for a marker."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    transaction: Transaction | None
    marker: bool = False


class ToWrite(NamedTuple):
    """A record to be stored."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@dataclass(slots=True)
class _Sequence:
    """What a partition knows of a producer: its epoch, and the offsets of its batches by sequence."""

    epoch: int
    next: int = 0
    offsets: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class FormerLeader:
    """What a leader that was cut off from its peers still answers, and which clients believe that it leads."""

    node: int
    start: int
    end: int
    stable: int
    believers: dict[Process, bool] = field(default_factory=dict)


class Partition:
    """A partition's log. Without a cluster it has one replica."""

    def __init__(self, topic: str, index: int = 0, cluster: Cluster | None = None) -> None:
        self.topic = topic
        self.index = index
        self.records: list[Record] = []  # also what was trimmed, for the judgement
        self.start = 0  # what is before it has been deleted
        self.log_end = 0  # of the leader
        self.end = 0  # the high watermark
        self.open: dict[Transaction, int] = {}  # first offset of each open transaction
        self.committed: dict[Transaction, bool] = {}
        self.producers: dict[int, _Sequence] = {}
        self.on_delete: Callable[[], None] = lambda: None  # records are trimmed, or keys deleted
        # the replicas
        self.leader = 0
        self.leader_epoch = 0
        self.in_sync: set[int] = {0}
        self.former: FormerLeader | None = None
        self.away_until_ms = 0.0  # a leader is being elected
        self.known_end: int | None = None  # the high watermark that a new leader knows, until its followers have fetched
        self.view: FormerLeader | None = None  # the request that is carried out is at a former leader
        self._cluster = cluster
        self._waiting: list[tuple[int, Promise[int]]] = []  # offset, and who waits until it is replicated

    @property
    def stable(self) -> int:
        """The last stable offset: a reader of committed records stops there."""
        return min(self.end, *self.open.values()) if self.open else self.end

    # -- writing -----------------------------------------------------------------------------------------------------

    def store(self, record: ToWrite, transaction: Transaction | None = None) -> int:
        """Append one record with acks=all; returns its offset. Raises NotNow, and Later until it is replicated."""
        self._check_replicas()
        offset = self._append(record, transaction)
        self._replicate()
        return self._acknowledged(offset)

    def produce(self, producer: int, epoch: int, sequence: int, records: Sequence[ToWrite], transaction: Transaction | None) -> int:
        """A batch of an idempotent producer; returns its first offset. Raises KafkaFault, NotNow or Later.

        A repeated batch of which the leader does not know the offset is stored at an unknown one.
        """
        known = self.producers.get(producer)
        if known is None or epoch > known.epoch:
            known = self.producers[producer] = _Sequence(epoch)
        if epoch < known.epoch:
            raise KafkaFault("fenced")
        if sequence < known.next:
            offset = known.offsets.get(sequence, UNKNOWN_OFFSET)
            if offset == UNKNOWN_OFFSET and self._cluster is not None:
                self._cluster.world.note("unknown offset", self.topic)
            return self._acknowledged(offset)
        if sequence > known.next:
            raise NotNow
        self._check_replicas()
        offset = self.log_end
        known.offsets[sequence] = offset
        known.next = sequence + 1
        for record in records:
            self._append(record, transaction)
        self._replicate()
        if records[0].value is None:
            self.on_delete()
        return self._acknowledged(offset)

    def finish(self, transaction: Transaction, producer: int, epoch: int, *, commit: bool) -> Promise[int]:
        """Append a transaction's marker; the promise is kept when it counts. Repeated where a leader change truncates it."""
        done: Promise[int] = Promise()
        offset = self._append(ToWrite(None, None), transaction, marker=True)
        replicated: Promise[int] = Promise()
        self._waiting.append((offset, replicated))

        def count() -> None:
            if replicated.error is not None:
                self.finish(transaction, producer, epoch, commit=commit).then(lambda: done.keep(0))
                return
            self.open.pop(transaction, None)
            self.committed.setdefault(transaction, commit)
            known = self.producers.get(producer)
            if known is None or epoch > known.epoch:
                self.producers[producer] = _Sequence(epoch)
            done.keep(0)

        replicated.then(count)
        self._replicate()
        return done

    def _append(self, record: ToWrite, transaction: Transaction | None, *, marker: bool = False) -> int:
        offset = self.log_end
        self.records.append(Record(offset, record.key, record.value, record.headers, transaction, marker))
        self.log_end += 1
        if transaction is not None and not marker:
            self.open.setdefault(transaction, offset)
        return offset

    def _check_replicas(self) -> None:
        if self._cluster is not None:
            self._cluster.check_replicas(self)

    def _replicate(self) -> None:
        if self._cluster is None or self._cluster.prompt:
            self.advance(self.log_end)
        else:
            self._cluster.replicate(self)

    def _acknowledged(self, offset: int) -> int:
        if offset < self.end:
            return offset
        answer: Promise[int] = Promise()
        self._waiting.append((offset, answer))
        raise Later(answer)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def advance(self, end: int) -> None:
        """All replicas in sync have the records before an offset."""
        if end > self.end:
            self.end = end
        if self._waiting:
            done = [each for each in self._waiting if each[0] < self.end]
            self._waiting = [each for each in self._waiting if each[0] >= self.end]
            for offset, answer in done:
                answer.keep(offset)

    def truncate(self, end: int) -> int:
        """A new leader has no records from an offset on, which is not before the high watermark; returns how many go."""
        gone = self.log_end - end
        if gone:
            del self.records[bisect_left(self.records, end, key=_OFFSET) :]
            self.log_end = end
            self.open = {transaction: first for transaction, first in self.open.items() if first < end}
            for known in self.producers.values():
                lost = [sequence for sequence, offset in known.offsets.items() if offset >= end]
                for sequence in lost:
                    del known.offsets[sequence]
                known.next = min(lost, default=known.next)
            done = [each for each in self._waiting if each[0] >= end]
            self._waiting = [each for each in self._waiting if each[0] < end]
            for _, answer in done:
                answer.fail(NotNow())
        return gone

    def forget_offsets(self) -> None:
        """The new leader knows of the producers' batches which sequences it has, and no offsets."""
        for known in self.producers.values():
            known.offsets = {sequence: offset for sequence, offset in known.offsets.items() if offset >= self.end}

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def earliest(self) -> int:
        """The first offset that is there."""
        return self.start if self.view is None else self.view.start

    def latest(self, *, committed: bool = False) -> int:
        """ListOffsets: the high watermark, or the last stable offset. Raises NotNow while a new leader does not know it."""
        if self.view is not None:
            return self.view.stable if committed else self.view.end
        if self.known_end is not None:
            raise NotNow
        return self.stable if committed else self.end

    def read(self, start: int, *, committed: bool, count: int = 1 << 30) -> tuple[list[Record], int]:
        """Records from an offset on, and where to read on. Raises KafkaFault."""
        if start < self.earliest:
            raise KafkaFault(TRIMMED)
        limit = self._readable(committed=committed)
        found: list[Record] = []
        for record in islice(self.records, bisect_left(self.records, start, key=_OFFSET), None):
            if record.offset >= limit:
                break
            if len(found) == count:
                return found, record.offset
            if not record.marker and not (committed and record.transaction is not None and not self.committed.get(record.transaction)):
                found.append(record)
        return found, max(start, limit)

    def _readable(self, *, committed: bool) -> int:
        """The offset at which a reader stops."""
        if self.view is not None:
            return self.view.stable if committed else self.view.end
        limit = self.stable if committed else self.end
        return limit if self.known_end is None else min(limit, self.known_end)

    def committed_end(self) -> int:
        """The offset behind the last record that a reader of committed records is given; 0 when there is none."""
        limit = self._readable(committed=True)
        return next((record.offset + 1 for record in self._backwards(limit) if record.offset >= self.earliest), 0)

    def newest(self, key: bytes) -> Record | None:
        """Of what a reader of committed records has ever been able to read the last record with a key."""
        return next((record for record in self._backwards(self.stable) if record.key == key), None)

    def _backwards(self, end: int) -> Iterator[Record]:
        """Committed records before an offset, deleted or not, the last one first."""
        for place in range(bisect_left(self.records, end, key=_OFFSET) - 1, -1, -1):
            if self._counts(self.records[place]):
                yield self.records[place]

    def all_committed(self) -> list[Record]:
        """Return what a reader of committed records has ever been able to read, deleted or not."""
        stable = self.stable
        return [record for record in self.records if record.offset < stable and self._counts(record)]

    def trim(self, end: int) -> None:
        """DeleteRecords: none before an offset is there any more."""
        self.start = max(self.start, end)
        self.on_delete()

    def compact(self, below: int) -> int:
        """Of committed records below an offset only the newest of each key stays; returns how many go."""
        if self.former is not None:
            return 0  # it has records of its own to answer from
        before, below = len(self.records), min(below, self.stable)
        newest = {record.key: record.offset for record in self.records if record.offset < below and self._counts(record)}
        self.records = [
            record for record in self.records if record.offset >= below or (self._counts(record) and newest[record.key] == record.offset)
        ]
        return before - len(self.records)

    def _counts(self, record: Record) -> bool:
        return not record.marker and (record.transaction is None or bool(self.committed.get(record.transaction)))
