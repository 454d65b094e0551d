"""Connection factories: pooled connections that send directly, in Kafka transactions, or as part of the current transaction.

bind("kafka/orders", KafkaConnectionFactory({"bootstrap.servers": "127.0.0.1:9092"}))
with lookup("kafka/orders").connection() as connection:
    connection.send("orders", b"...")
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from bascule.adapter.outbound.pool import LeaseInfo, Pool, PoolLimits
from bascule.client import TimedOut
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import OUTBOUND
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.appender import CLIENT_SETTINGS, Appender, OffsetUnknown
from bascule.kafka.compacted import Stored
from bascule.kafka.own_topics import COMMITTED_PARTITIONS
from bascule.kafka.slot import Slot
from bascule.writer.errors import RecordRefused
from bascule.xa.errors import OutOfOrder

if TYPE_CHECKING:
    from bascule.adapter.outbound.jms import JmsSession
    from bascule.xa.kafka import KafkaResource
    from bascule.xa.manager import TransactionManager

#: Marks of committed transactions, with their time (ms since the epoch). A mark shows the outcome of a commit that was not answered. Each
#: mark has its own key, so that no connection overwrites the mark of another one with the same transactional id.
COMMITTED_TOPIC = OUTBOUND
#: A connection deletes its last mark with the next one. Older marks than this were left by connections that are gone.
MARKS_KEPT_MS = 7 * 24 * 3_600_000

Headers = Sequence[tuple[str, bytes | None]]


class CommitInDoubt(Unavailable):
    """Raised when the outcome of a commit is unknown. Do not simply repeat the transaction."""

    retriable = False


@dataclass(frozen=True, slots=True)
class KafkaTransactions:
    """Records sent in a ``with connection.transaction()`` block become visible together, or not at all.

    ``id`` is the prefix of the transactional ids. The host and ``instance`` distinguish processes; a process should keep them over
    restarts. Two factories with the same ids duplicate nothing but disturb each other: Kafka aborts the transaction of the other, which
    starts again.
    """

    id: str
    instance: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class XaSends:
    """Sends take part in the manager's current transaction. Raises InvalidInput if the resource does not belong to the manager."""

    manager: TransactionManager
    kafka: KafkaResource

    def __post_init__(self) -> None:
        if self.manager.resources.get(self.kafka.name) is not self.kafka:
            raise InvalidInput(f"resource {self.kafka.name!r} does not belong to transaction manager {self.manager.name!r}")


#: Called with None when a record is stored, or with the error; within a transaction at once.
Answered = Callable[[BaseException | None], None]


class _Physical(Protocol):
    def send(self, outgoing: Outgoing, answered: Answered | None) -> None: ...

    def flush(self, timeout_s: float | None) -> None: ...

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def validate(self) -> None: ...

    def close(self) -> None: ...


class _UnderWay:
    """Unanswered records, and the errors of answered ones: only what ``flush`` needs, however late it comes."""

    def __init__(self) -> None:
        self._answered = threading.Condition()
        self._waiting = self._sent = self._failed = 0
        self._first: BaseException | None = None

    def add(self, future: Future[int], answered: Answered | None) -> None:
        with self._answered:
            self._sent += 1
            self._waiting += 1
        future.add_done_callback(partial(self._done, answered))

    def flush(self, timeout_s: float | None) -> None:
        with self._answered:
            if not self._answered.wait_for(lambda: not self._waiting, timeout_s):
                raise TimedOut(f"flush timed out: {self._waiting} records are not confirmed and may or may not be stored")
            sent, failed, first = self._sent, self._failed, self._first
            self._sent = self._failed = 0
            self._first = None
        if first is not None:
            raise Unavailable(f"{failed} of {sent} records are not confirmed and may or may not be stored: {first}") from first

    def _done(self, answered: Answered | None, future: Future[int]) -> None:
        error = future.exception()
        if isinstance(error, OffsetUnknown):
            error = None
        if answered is not None:
            answered(error)
        with self._answered:
            self._waiting -= 1
            if error is not None and answered is None:
                self._failed += 1
                self._first = self._first or error
            self._answered.notify_all()


class _Plain:
    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._appender = Appender(kafka)
        self._topics = Topics(kafka)
        self._under_way = _UnderWay()

    def send(self, outgoing: Outgoing, answered: Answered | None) -> None:
        self._under_way.add(self._appender.append(outgoing), answered)

    def flush(self, timeout_s: float | None) -> None:
        self._under_way.flush(timeout_s)

    def begin(self) -> None:
        raise OutOfOrder(
            "connections of this factory have no transactions; use KafkaConnectionFactory(..., transacted=KafkaTransactions(...))"
        )

    commit = rollback = begin

    def validate(self) -> None:
        self._topics.reach()

    def close(self) -> None:
        self._appender.close()


class _InKafkaTransaction:
    def __init__(self, kafka: Mapping[str, Any], transactional_id: str) -> None:
        self._topics = Topics(kafka)
        self._id = transactional_id
        self._mark = b""
        self._partition = zlib.crc32(transactional_id.encode()) % COMMITTED_PARTITIONS
        self._slot = Slot(kafka, transactional_id, COMMITTED_TOPIC, self._partition)
        self._gathered: list[Outgoing] | None = None

    def send(self, outgoing: Outgoing, answered: Answered | None) -> None:
        if self._gathered is None:
            raise OutOfOrder("send outside of a transaction; send within `with connection.transaction()`")
        self._gathered.append(outgoing)
        if answered is not None:
            answered(None)

    def flush(self, timeout_s: float | None) -> None:  # noqa: ARG002 - there is nothing to wait for
        if self._gathered is not None:
            raise OutOfOrder("the transaction has not ended")

    def begin(self) -> None:
        if self._gathered is not None:
            raise OutOfOrder("begin: a transaction is active already; transactions do not nest")
        self._gathered = []
        self._slot.prepare()

    def commit(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            raise OutOfOrder("commit: no transaction is active")
        if not gathered:
            return
        mark, tried = f"{self._id}#{uuid.uuid4().hex}".encode(), False

        def make(table: Mapping[bytes, Stored]) -> list[Outgoing]:
            nonlocal tried
            if mark in table:
                return []  # the first attempt, which was not answered, has committed
            tried = True
            return [*gathered, *self._marks(mark, table)]

        try:
            self._slot.transact(make)
        except Unavailable as error:
            if not tried or isinstance(error, RecordRefused):
                raise
            raise CommitInDoubt(f"the transaction may or may not be committed: {error}") from error
        self._mark = mark

    def _marks(self, mark: bytes, table: Mapping[bytes, Stored]) -> list[Outgoing]:
        """Return the new mark, and deletions of marks that nobody needs any more."""
        now_ms = time.time_ns() // 1_000_000
        over = [key for key, stored in table.items() if key == self._mark or int.from_bytes(stored.value, "big") < now_ms - MARKS_KEPT_MS]
        marks = {mark: now_ms.to_bytes(8, "big"), **dict.fromkeys(over)}
        return [Outgoing(COMMITTED_TOPIC, key, value, partition=self._partition) for key, value in marks.items()]

    def rollback(self) -> None:
        self._gathered = None

    def validate(self) -> None:
        self._topics.reach()

    def close(self) -> None:
        self._slot.close()


class _InCurrentTransaction:
    def __init__(self, xa: XaSends) -> None:
        self._xa = xa

    def send(self, outgoing: Outgoing, answered: Answered | None) -> None:
        topic, key, value, headers, partition, timestamp_ms = outgoing
        branch = self._xa.manager.enlist(self._xa.kafka)
        branch.send(topic, value, key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)
        if answered is not None:
            answered(None)

    def flush(self, timeout_s: float | None) -> None:
        """Do nothing: the transaction waits."""

    def begin(self) -> None:
        raise OutOfOrder(
            "connections of this factory take part in transactions of the transaction manager; begin and end transactions there"
        )

    commit = rollback = begin

    def validate(self) -> None:
        """Do nothing: there is no connection of its own."""

    close = validate


class KafkaConnection:
    """A connection from ``KafkaConnectionFactory.connection``, for one thread at a time. Return it with ``close`` or ``with``."""

    def __init__(self, pool: Pool[_Physical]) -> None:
        self._pool = pool
        self._number, taken = pool.take()
        self._physical: _Physical | None = taken
        self._broken = False

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        headers: Headers = (),
        partition: int = -1,
        timestamp_ms: int = 0,
    ) -> None:
        """Send a record. ``flush``, or the end of the ``with`` block or transaction, reports whether it is stored.

        ``value`` None is a tombstone. If ``partition`` is -1, the key selects the partition as in the Java client. Raises OutOfOrder,
        NoTransaction.
        """
        self.send_record(Outgoing(topic, key, value, list(headers), partition, timestamp_ms))

    def send_record(self, outgoing: Outgoing, answered: Answered | None = None) -> None:
        """Do the same as ``send``. If ``answered`` is called with an error, in a thread of the connection, ``flush`` does not report it."""
        self._open().send(outgoing, answered)

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when all records sent are stored. Raises Unavailable if some may not be stored, and TimedOut."""
        self._guarded(partial(self._open().flush, timeout_s))

    @contextmanager
    def transaction(self) -> Iterator[Self]:
        """Make the records sent in the block visible together at its end, or never.

        Raises RecordRefused, Unavailable: they stay invisible. Raises CommitInDoubt if the outcome is unknown.
        """
        physical = self._open()
        physical.begin()
        try:
            yield self
        except BaseException:
            physical.rollback()
            raise
        self._guarded(physical.commit)

    def jms(self, *, key: str = "message-id", topic: str = "${address}") -> JmsSession:
        """Return the JMS interface of this connection: messages become records as diverts make them (``bascule.adapter.outbound.jms``)."""
        from bascule.adapter.outbound.jms import JmsSession

        return JmsSession(self, key, topic)

    def close(self) -> None:
        """Flush, and return the connection to the pool. A second call does nothing."""
        if (physical := self._physical) is None:
            return
        try:
            self._guarded(partial(physical.flush, None))
        finally:
            self._physical = None
            self._pool.give_back(self._number, broken=self._broken)

    def __enter__(self) -> Self:
        """Return the connection itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Return the connection to the pool."""
        self.close()

    def _open(self) -> _Physical:
        if self._physical is None:
            raise OutOfOrder("the connection was returned to its pool")
        return self._physical

    def _guarded(self, call: Any) -> None:
        try:
            call()
        except Exception:
            self._broken = True
            raise


class KafkaConnectionFactory:
    """Creates connections to a Kafka cluster. Thread-safe; it opens nothing before the first connection."""

    def __init__(
        self,
        kafka: Mapping[str, Any],
        *,
        transacted: KafkaTransactions | XaSends | None = None,
        limits: PoolLimits | None = None,
        name: str = "kafka",
    ) -> None:
        """``kafka`` are librdkafka settings; ``name`` appears in error messages."""
        self._kafka = {**CLIENT_SETTINGS, **kafka}
        self._transacted = transacted
        self._ensured = False
        self._pool: Pool[_Physical] = Pool(name, self._make, limits or PoolLimits())

    def connection(self) -> KafkaConnection:
        """Return a connection from the pool. Raises PoolExhausted, PoolClosed, Unavailable."""
        return KafkaConnection(self._pool)

    def leases(self, longer_than_s: float = 0.0) -> list[LeaseInfo]:
        """Return the leak report: connections that are in use for at least ``longer_than_s`` seconds."""
        return self._pool.leases(longer_than_s)

    def close(self) -> None:
        """Close the connections; those in use when they are returned."""
        self._pool.close()

    def _make(self, number: int) -> _Physical:
        match self._transacted:
            case None:
                return _Plain(self._kafka)
            case KafkaTransactions() as transactions:
                if not self._ensured:
                    own_topics.prepare(self._kafka, {COMMITTED_TOPIC: own_topics.COMMITTED})
                    self._ensured = True
                instance = transactions.instance or f"{socket.gethostname()}.{os.getpid()}"
                return _InKafkaTransaction(self._kafka, f"{transactions.id}.{instance}.{number}")
            case xa:
                return _InCurrentTransaction(xa)
