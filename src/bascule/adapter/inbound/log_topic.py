"""The topic of the inbound log in Kafka: appends, and one view of its content that all threads of a process share."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from bascule.adapter.inbound.state import NOBODY, OWNER, LogFold, Place, PlaceState, Ref, key_of
from bascule.core.errors import BasculeError
from bascule.core.kafka_records import Outgoing
from bascule.kafka.appender import CLIENT_SETTINGS, Appender, OffsetUnknown, await_stored
from bascule.kafka.compacted import DELETIONS_KEPT_S, TABLE_CONFIG, TableReader, trim
from bascule.kafka.guards import TopicRole, ensure

#: Partitions of the log. Entries of one source partition are in order and do not wait for those of most others.
PARTITIONS = 8
#: Timeout for a read, in seconds. Nobody writes transactions to the log, so nothing delays a read.
READ_TIMEOUT_S = 30.0
#: The log is trimmed up to the oldest entry that still counts. Therefore its policy also has ``delete``, though never by age. Segments are
#: small and compacted soon, because one old entry prevents trimming.
LOG_CONFIG: Mapping[str, str] = {
    **TABLE_CONFIG,
    "cleanup.policy": "compact,delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(16 << 20),
    "segment.ms": "600000",
    "delete.retention.ms": str(int(DELETIONS_KEPT_S * 1000)),
}
#: Bulk entries wait this long, in milliseconds, for one another: a request to Kafka costs more than an entry.
LINGER_MS = 5
#: The key of barrier records in this topic. Earlier releases refuse a key that is no entry; this one is the owner of no partition.
BARRIER_ENTRY = key_of(OWNER, Ref(Place("", 0), NOBODY, -1))
#: Fewer records than this are not worth a request to delete them.
TRIM_RECORDS_MIN = 10_000

R = TypeVar("R")


class LogClients(NamedTuple):
    """``single`` sends entries that a caller waits for, ``many`` bulk entries. Entries of one key go through the same client."""

    single: Appender
    many: Appender
    reader: TableReader


class LogTopic:
    """The effects of the protocol (``log_protocol.LogEffects``) on Kafka, blocking. Thread-safe.

    The first use creates the topic. ``connect`` makes the clients; it gets a function to call with each record, and one to call when
    reading starts again.
    """

    def __init__(
        self,
        kafka: Mapping[str, Any],
        topic: str,
        connect: Callable[[Callable[[bytes, bytes | None], None], Callable[[], None]], LogClients] | None = None,
    ) -> None:
        self.topic = topic
        self._kafka = {**CLIENT_SETTINGS, **kafka}
        self._connect = connect or self._connected
        self._lock = threading.RLock()
        self._clients: LogClients | None = None
        self._fold = LogFold()
        self._trimmed: dict[int, int] = {}
        #: Entries to delete that Kafka may not have deleted.
        self._deletions: deque[tuple[Place, bytes]] = deque()

    # -- effects of the protocol

    async def append(self, key: bytes, value: bytes | None, place: Place) -> int | None:
        """See LogEffects."""
        try:
            return self.append_soon(key, value, place).result()
        except OffsetUnknown:
            return None

    async def store(self, entries: Sequence[tuple[Place, bytes, bytes | None]], *, many: bool) -> None:
        """See LogEffects."""
        for future in [self.append_soon(key, value, place, many=many) for place, key, value in entries]:
            await_stored(future)

    def send(self, key: bytes, value: bytes | None, place: Place) -> None:
        """See LogEffects."""
        self.append_soon(key, value, place)

    async def read(self, see: Callable[[LogFold], R]) -> R:
        """See LogEffects."""
        with self._lock:
            self._guarded(lambda reader: reader.read_behind_barrier(READ_TIMEOUT_S))
            return see(self._fold)

    async def look(self, see: Callable[[LogFold], R]) -> R:
        """See LogEffects."""
        with self._lock:
            self._guarded(lambda reader: reader.read(READ_TIMEOUT_S))
            return see(self._fold)

    async def reach(self, place: Place, offset: int | None, see: Callable[[PlaceState], R]) -> R:
        """See LogEffects."""
        if offset is None:
            return await self.read(lambda fold: see(fold.place(place)))
        with self._lock:
            self._guarded(lambda reader: reader.reach(partition_of(place), offset, READ_TIMEOUT_S))
            return see(self._fold.place(place))

    def known(self, see: Callable[[LogFold], R]) -> R:
        """See LogEffects."""
        with self._lock:
            return see(self._fold)

    # -- for the adapter

    def append_soon(self, key: bytes, value: bytes | None, place: Place, *, many: bool = False) -> Future[int]:
        """Send an entry. The future is that of ``Appender.append``."""
        clients = self._open()
        return (clients.many if many else clients.single).append(Outgoing(self.topic, key, value, partition=partition_of(place)))

    def append_record(self, outgoing: Outgoing) -> Future[int]:
        """Send a record to another topic."""
        return self._open().single.append(outgoing)

    def delete_soon(self, place: Place, keys: Sequence[bytes]) -> None:
        """Delete entries at some time. ``delete_again`` repeats deletions that Kafka has not stored."""
        # A single key is a flight entry, which was acknowledged. Several keys include entries that the other client may still be sending.
        for key in keys:
            self.append_soon(key, None, place, many=len(keys) == 1).add_done_callback(partial(self._keep, place, key))

    def _keep(self, place: Place, key: bytes, deletion: Future[int]) -> None:
        if not isinstance(deletion.exception(), OffsetUnknown | None):
            self._deletions.append((place, key))

    def delete_again(self) -> None:
        """Repeat deletions that failed: otherwise a record that is done would be redelivered at the next takeover."""
        for _ in range(len(self._deletions)):
            place, key = self._deletions.popleft()
            self.delete_soon(place, [key])

    def housekeep(self) -> None:
        """Repeat deletions that failed, and delete the log before the oldest entry that counts. Raises Unavailable."""
        self.delete_again()
        with self._lock:
            table = self._guarded(lambda reader: reader.read(READ_TIMEOUT_S))
            ends = self._open().reader.reached()
        for stored in table.values():
            ends[stored.partition] = min(ends[stored.partition], stored.offset)
        worth = {at: end for at, end in ends.items() if end - self._trimmed.get(at, 0) >= TRIM_RECORDS_MIN}
        if worth:
            trim(self._kafka, self.topic, worth)
            self._trimmed |= worth

    def close(self) -> None:
        """Wait for pending operations, and close the clients."""
        if self._clients is not None:
            self.delete_again()
        with self._lock:
            clients, self._clients = self._clients, None
        if clients is not None:
            for client in clients:
                client.close()

    # -- Kafka

    def _guarded(self, read: Callable[[TableReader], R]) -> R:
        """Run a read. A reader that fell behind the trimmed part, or failed half-way, starts again, so that it skips nothing."""
        clients = self._open()
        try:
            return read(clients.reader)
        except BasculeError:
            clients.reader.close()
            self._clients = clients._replace(reader=self._reader())
            raise

    def _reader(self) -> TableReader:
        return TableReader(self._kafka, self.topic, range(PARTITIONS), self._follow, begin=self._begin, barrier_key=BARRIER_ENTRY)

    def _begin(self) -> None:
        self._fold = LogFold()

    def _follow(self, key: bytes, value: bytes | None) -> None:
        if key != BARRIER_ENTRY:
            self._fold.apply(key, value)

    def _connected(self, _follow: Callable[[bytes, bytes | None], None], _begin: Callable[[], None]) -> LogClients:
        ensure(self._kafka, self.topic, TopicRole.MARKS, PARTITIONS, LOG_CONFIG)
        many = Appender({"linger.ms": LINGER_MS, **self._kafka})
        return LogClients(Appender(self._kafka), many, self._reader())

    def _open(self) -> LogClients:
        if (clients := self._clients) is not None:
            return clients
        with self._lock:
            if self._clients is None:
                self._clients = self._connect(self._follow, self._begin)
            return self._clients


@lru_cache(maxsize=1024)
def partition_of(place: Place) -> int:
    """Return the partition of the log that has the entries of a source partition."""
    return zlib.crc32(str(place).encode()) % PARTITIONS
