"""Kafka as a resource. Records of a branch go to a side topic at once, and to their own topics when the branch commits.

``kafka_protocol`` has the rules; this module performs their effects with librdkafka, in the calling thread.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import XA_PREFIX
from bascule.kafka.appender import CLIENT_SETTINGS, OffsetUnknown
from bascule.kafka.compacted import Stored, trim
from bascule.kafka.history import TopicHistory
from bascule.kafka.own_topics import BRANCH_PARTITIONS
from bascule.kafka.transactional import end_open_transactions
from bascule.threads.clock import elapsed_s
from bascule.threads.joint import JointTry
from bascule.threads.loops import in_own_thread
from bascule.xa.blocking import now_ms
from bascule.xa.errors import ResourceFailed, UnknownXid
from bascule.xa.forks import abandon
from bascule.xa.kafka_clients import Clients
from bascule.xa.kafka_protocol import LIMITS, BranchLimits, KafkaBranches
from bascule.xa.kafka_records import BranchTopics, Make, SideEnds, SideRecord, slots_of
from bascule.xa.resource import CommitPriority, Vote
from bascule.xa.xid import Xid

#: Number of transactions at once in one process: while one commits, the next collects branches and prepares its incarnation.
SLOTS = 2


class KafkaBranch:
    """The handle, which sends records. Use it in one thread at a time."""

    def __init__(self, send: Callable[[Outgoing], None]) -> None:
        self._send = send

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int = -1,
        timestamp_ms: int = 0,
    ) -> None:
        """Send a record in the transaction. Readers with ``read_committed`` see all of its records at once, or none.

        ``value`` None is a tombstone. If ``partition`` is -1, the key selects the partition as in the Java client. ``timestamp_ms`` 0 means
        the time of the commit. Raises InvalidInput if the topic does not exist or would refuse the record, or if the branch has more than
        500,000 records or 256 MiB; ResourceFailed if Kafka does not report the rules of the topic, or the program may not write to it.
        """
        self._send(Outgoing(topic, key, value, list(headers), partition, timestamp_ms))


class AsyncKafkaBranch:
    """The handle for asyncio. Use it in one task at a time."""

    def __init__(self, branch: KafkaBranch, call: Callable[[], AbstractContextManager[object]]) -> None:
        """``call`` surrounds each call, whose thread may have to wait before it begins."""
        self._branch = branch
        self._call = call

    async def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int = -1,
        timestamp_ms: int = 0,
    ) -> None:
        """Do the same as KafkaBranch.send, in a thread of its own, because it may wait for Kafka.

        A cancellation is raised when the call has ended. The record is then part of the transaction unless the CancelledError has a cause.
        """
        send = functools.partial(self._branch.send, topic, value, key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)
        with self._call():
            await in_own_thread(send, "bascule-xa-send")


class KafkaResource:
    """A Kafka cluster. Thread-safe.

    The first branch creates the topics ``PREFIX.side`` and ``PREFIX.log``. Raises UnsafeTopic if one of their settings could lose prepared
    branches.
    """

    def __init__(
        self,
        name: str,
        kafka: Mapping[str, Any],
        *,
        prefix: str = XA_PREFIX,
        instance: str | None = None,
        limits: BranchLimits = LIMITS,
        priority: int = CommitPriority.KAFKA,
    ) -> None:
        """Use ``kafka``, settings of librdkafka (``bootstrap.servers``, security). See CommitPriority for ``priority``.

        ``instance`` is part of the transactional ids and must be unique to the process: two processes with the same one would fence each
        other. By default each process makes a new one; Kafka forgets unused ids after ``transactional.id.expiration.ms``, 7 days by
        default.
        """
        self.name = name
        self.priority = priority
        self._kafka = {**CLIENT_SETTINGS, **kafka}
        self._topics = BranchTopics(f"{prefix}.side", f"{prefix}.log", BRANCH_PARTITIONS)
        self._prefix, self._limits = prefix, limits
        self._begin(instance or _own_instance())

    def _begin(self, instance: str) -> None:
        slots = [f"{self._prefix}.{instance}.{number}" for number in range(SLOTS)]
        self._calls = KafkaCalls(self.name, self._kafka, self._topics, frozenset(slots))
        self._branches = KafkaBranches(
            self.name, self._topics, slots, self._calls, instance=instance, limits=self._limits, lock=threading.Lock()
        )

    def start(self, xid: Xid, *, timeout_s: float) -> KafkaBranch:  # noqa: ARG002 - its time is BranchLimits.prepare_within_s
        """See Resource. The handle sends records."""
        run_blocking(self._branches.start(xid))
        return KafkaBranch(lambda record: run_blocking(self._branches.send(xid, record)))

    def start_on_loop(self, xid: Xid, *, timeout_s: float, loop: asyncio.AbstractEventLoop) -> AsyncKafkaBranch:  # noqa: ARG002
        """See WorksOnLoop."""
        return AsyncKafkaBranch(self.start(xid, timeout_s=timeout_s), lambda: self._branches.call(xid))

    def end(self, xid: Xid, *, success: bool) -> None:
        """See Resource."""
        run_blocking(self._branches.end(xid, success=success))

    def prepare(self, xid: Xid) -> Vote:
        """See Resource."""
        return run_blocking(self._branches.prepare(xid))

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource. A one-phase commit saves the manager's log, not this one, which tells the outcome of a commit in doubt."""
        run_blocking(self._branches.commit(xid, one_phase=one_phase))

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        run_blocking(self._branches.rollback(xid))

    def recover(self) -> Sequence[Xid]:
        """See Resource. Returns only prepared branches: branches that were not prepared belong to nobody."""
        return run_blocking(self._branches.recover())

    def started(self) -> dict[Xid, float]:
        """Return the branches that send and are not prepared, with their age in seconds."""
        return run_blocking(self._branches.started())

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        raise UnknownXid(f"{self.name} has no heuristic outcome of branch {xid}")

    def after_fork(self) -> None:
        """See Forks. The transactional ids belong to the parent: the child gets its own."""
        abandon(self._calls, self._branches)
        self._begin(_own_instance())

    def close(self) -> None:
        """Close the clients. Prepared branches stay as they are."""
        self._calls.close()


def _own_instance() -> str:
    return f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"


class KafkaCalls:
    """The effects of ``kafka_protocol``, performed by the calling thread. The clients are created when needed."""

    def __init__(self, name: str, kafka: Mapping[str, Any], topics: BranchTopics, own_slots: frozenset[str]) -> None:
        """``own_slots`` are the transactional ids of this process. Clients of other ids are closed after each use."""
        self._name = name
        self._kafka = kafka
        self._topics = topics
        self._own_slots = own_slots
        self._clients: Clients | None = None
        self._lock = threading.Lock()
        self._opening = JointTry(self._lock)

    def now_ms(self) -> int:
        """See BranchCalls."""
        return now_ms()

    def monotonic_s(self) -> float:
        """See BranchCalls."""
        return elapsed_s()

    def turn(self, slot: str) -> AbstractAsyncContextManager[object]:
        """See BranchCalls."""
        return _Turn(self._open().turn(slot))

    def get_ready(self, slot: str) -> None:
        """See BranchCalls."""
        with self._open().slot(slot, own=True) as at:
            at.prepare()

    async def reach(self, slot: str) -> None:
        """See BranchCalls."""
        with self._open().slot(slot, own=True) as at:
            at.reach()

    async def room(self, record: Outgoing) -> int:
        """See BranchCalls."""
        return self._open().check(record)

    def append(self, record: Outgoing) -> _Receipt:
        """See BranchCalls."""
        return _Receipt(self._open().appender.append(record))

    async def transact(self, slot: str, make: Make) -> None:
        """See BranchCalls."""
        with self._open().slot(slot, own=slot in self._own_slots) as at:
            at.transact(make)

    async def table(self) -> Mapping[bytes, Stored]:
        """See BranchCalls."""
        return self._open().reader.read_behind_barrier(held_up=self._end_transactions)

    async def side(self, partition: int, first: int, last: int) -> Iterable[SideRecord]:
        """See BranchCalls."""
        records = TopicHistory(self._kafka, self._topics.side, partition).records(first, last + 1)
        return (SideRecord(record.key(), record.value(), record.headers() or []) for record in records)  # type: ignore[arg-type]

    async def side_ends(self) -> SideEnds:
        """See BranchCalls."""
        return self._open().side_ends()

    async def trim(self, ends: Mapping[int, int]) -> None:
        """See BranchCalls."""
        trim(self._kafka, self._topics.side, ends)

    def close(self) -> None:
        """Close the clients."""
        with self._lock:
            clients, self._clients = self._clients, None
        if clients is not None:
            clients.close()

    def _end_transactions(self, table: Mapping[bytes, Stored]) -> None:
        """Abort transactions of dead processes, under the ids that their branches name."""
        end_open_transactions(self._kafka, slots_of(table) - self._own_slots)

    def _open(self) -> Clients:
        try:
            return self._clients or self._opening(self._opened)
        except Unavailable as error:
            raise ResourceFailed(f"{self._name}: {error}") from error

    def _opened(self) -> Clients:
        if self._clients is None:
            self._clients = Clients(self._kafka, self._topics, self._end_transactions)
        return self._clients


class _Receipt:
    def __init__(self, stored: Future[int]) -> None:
        self._stored = stored

    async def offset(self) -> int | None:
        try:
            return self._stored.result()
        except OffsetUnknown:
            return None


class _Turn:
    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
