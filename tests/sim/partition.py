"""A partition's log as its leader has it: records, transactions, producers, replicas and the high watermark.

All replicas share one list of records, since below the high watermark they never differ. Behind it the list has the leader's tail, which
followers do not have yet; a leader change may truncate it. A former leader that is cut off from its peers is a view: the high watermark,
the last stable offset and the start at the moment when it was cut off.
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
#: Error of a fetch: the records have been deleted.
TRIMMED: Final = "trimmed"
_OFFSET: Final = attrgetter("offset")


class KafkaFault(Exception):
    """An error for a client: ``fenced``, ``invalid-state``, ``incomplete``, ``failed``, ``timed-out``, ``trimmed`` or ``closed``."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class NotNow(Exception):
    """Raised when the server answers with an error that the client retries."""


class Later(Exception):
    """Raised when the server answers later, when a promise is kept: enough replicas have stored a record."""

    def __init__(self, answer: Promise[Any]) -> None:
        super().__init__("waits for replicas")
        self.answer = answer


class Transaction:
    """One transaction of a transactional id."""

    __slots__ = ("partitions",)

    def __init__(self) -> None:
        self.partitions: dict[Partition, None] = {}


class Record(NamedTuple):
    """A stored record. ``transaction`` is None outside of transactions; ``key`` and ``value`` are None for a marker."""

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
    """A partition's state of a producer: its epoch, and the offsets of its batches by sequence."""

    epoch: int
    next: int = 0
    offsets: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class FormerLeader:
    """The answers of a leader that was cut off from its peers, and the clients that believe that it leads."""

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
        self.records: list[Record] = []  # also trimmed records, for the judgement
        self.start = 0  # records before this offset have been deleted
        self.log_end = 0  # end of the leader's log
        self.end = 0  # the high watermark
        self.open: dict[Transaction, int] = {}  # first offset of each open transaction
        self.committed: dict[Transaction, bool] = {}
        self.producers: dict[int, _Sequence] = {}
        self.on_delete: Callable[[], None] = lambda: None  # called when records are trimmed, or keys deleted
        # the replicas
        self.leader = 0
        self.leader_epoch = 0
        self.in_sync: set[int] = {0}
        self.former: FormerLeader | None = None
        self.away_until_ms = 0.0  # a leader is being elected until then
        self.known_end: int | None = None  # the high watermark that a new leader knows, until its followers have fetched
        self.view: FormerLeader | None = None  # set while a request is carried out at a former leader
        self._cluster = cluster
        self._waiting: list[tuple[int, Promise[int]]] = []  # offsets, and the promises that wait for their replication

    @property
    def stable(self) -> int:
        """Return the last stable offset, where a reader of committed records stops."""
        return min(self.end, *self.open.values()) if self.open else self.end

    # -- writing -----------------------------------------------------------------------------------------------------

    def store(self, record: ToWrite, transaction: Transaction | None = None) -> int:
        """Append one record with acks=all; return its offset. Raises NotNow, and Later until it is replicated."""
        self._check_replicas()
        offset = self._append(record, transaction)
        self._replicate()
        return self._acknowledged(offset)

    def produce(self, producer: int, epoch: int, sequence: int, records: Sequence[ToWrite], transaction: Transaction | None) -> int:
        """Append a batch of an idempotent producer; return its first offset. Raises KafkaFault, NotNow or Later.

        For a repeated batch whose offset the leader does not know, the offset is unknown.
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
        """Append a transaction's marker; the promise is kept when it counts. Append it again if a leader change truncates it."""
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
        """Note that all in-sync replicas have the records before an offset."""
        if end > self.end:
            self.end = end
        if self._waiting:
            done = [each for each in self._waiting if each[0] < self.end]
            self._waiting = [each for each in self._waiting if each[0] >= self.end]
            for offset, answer in done:
                answer.keep(offset)

    def truncate(self, end: int) -> int:
        """Truncate the records from an offset on, which a new leader lacks and which is not below the high watermark.

        Return their number.
        """
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
        """Let a new leader forget the offsets of producers' batches; it only knows their sequences."""
        for known in self.producers.values():
            known.offsets = {sequence: offset for sequence, offset in known.offsets.items() if offset >= self.end}

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def earliest(self) -> int:
        """Return the first offset that exists."""
        return self.start if self.view is None else self.view.start

    def latest(self, *, committed: bool = False) -> int:
        """ListOffsets: return the high watermark, or the last stable offset. Raises NotNow while a new leader does not know it."""
        if self.view is not None:
            return self.view.stable if committed else self.view.end
        if self.known_end is not None:
            raise NotNow
        return self.stable if committed else self.end

    def read(self, start: int, *, committed: bool, count: int = 1 << 30) -> tuple[list[Record], int]:
        """Return records from an offset on, and where to continue. Raises KafkaFault."""
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
        """Return the offset at which a reader stops."""
        if self.view is not None:
            return self.view.stable if committed else self.view.end
        limit = self.stable if committed else self.end
        return limit if self.known_end is None else min(limit, self.known_end)

    def committed_end(self) -> int:
        """Return the offset behind the last record that a reader of committed records gets; 0 if there is none."""
        limit = self._readable(committed=True)
        return next((record.offset + 1 for record in self._backwards(limit) if record.offset >= self.earliest), 0)

    def newest(self, key: bytes) -> Record | None:
        """Return the last record with a key that a reader of committed records could ever read."""
        return next((record for record in self._backwards(self.stable) if record.key == key), None)

    def _backwards(self, end: int) -> Iterator[Record]:
        """Yield committed records before an offset, deleted or not, the last one first."""
        for place in range(bisect_left(self.records, end, key=_OFFSET) - 1, -1, -1):
            if self._counts(self.records[place]):
                yield self.records[place]

    def all_committed(self) -> list[Record]:
        """Return all records that a reader of committed records could ever read, deleted or not."""
        stable = self.stable
        return [record for record in self.records if record.offset < stable and self._counts(record)]

    def trim(self, end: int) -> None:
        """DeleteRecords: delete the records before an offset."""
        self.start = max(self.start, end)
        self.on_delete()

    def compact(self, below: int) -> int:
        """Keep only the newest committed record of each key below an offset; return the number of removed records."""
        if self.former is not None:
            return 0  # the former leader answers from its own records
        before, below = len(self.records), min(below, self.stable)
        newest = {record.key: record.offset for record in self.records if record.offset < below and self._counts(record)}
        self.records = [
            record for record in self.records if record.offset >= below or (self._counts(record) and newest[record.key] == record.offset)
        ]
        return before - len(self.records)

    def _counts(self, record: Record) -> bool:
        return not record.marker and (record.transaction is None or bool(self.committed.get(record.transaction)))
