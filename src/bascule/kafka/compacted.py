"""A compacted topic as a table: many clients append, and a reader reads up to the current end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Headers, Outgoing
from bascule.kafka import clients
from bascule.kafka.appender import APPEND_TIMEOUT_S, Appender, OffsetUnknown
from bascule.kafka.errors import passing
from bascule.kafka.history import PROMPT, READ_AHEAD, PartitionOffsets, known_offset, readable_headers
from bascule.threads.background import in_background
from bascule.writer.reading import BARRIER_KEY, READ_TIMEOUT_S, read_behind_barrier, read_latest, store_barriers

if TYPE_CHECKING:
    from bascule.kafka.shared import SharedClients

#: A running transaction ends long before this time, in seconds; a longer one was left open by a dead process.
HELD_UP_S = 1.0
#: Pause, in seconds, before the next attempt to end such a transaction: the last one may have failed because of Kafka.
HELD_UP_AGAIN_S = 3.0
#: Minimum time, in seconds, for which a deletion can be read before compaction removes it (``delete.retention.ms``).
DELETIONS_KEPT_S = 3600.0

#: A reader stops fetching this time, in seconds, after a read. Until then, the next read is some milliseconds faster.
REST_AFTER_S = 1.0

#: The settings with which Bascule's tables are created.
TABLE_CONFIG: Mapping[str, str] = {
    "cleanup.policy": "compact",
    "unclean.leader.election.enable": "false",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": "3600000",
}


class Stored(NamedTuple):
    """The stored record of a key."""

    value: bytes
    partition: int
    offset: int
    headers: Headers = []  # noqa: RUF012 - never changed

    def place(self, topic: str, key: bytes) -> str:
        """Return the place of the record for error messages."""
        return f"{topic}, partition {self.partition}, offset {self.offset}, key {key!r}"


class _Barriers:
    """Writes barrier records to partitions of a topic; as effects (``writer.reading.BarrierEffects``), to partition 0."""

    def __init__(self, appender: Appender, topic: str, key: bytes) -> None:
        self._topic, self._key = topic, key
        self._appender = appender
        self.now_s = time.monotonic

    @property
    def partitions(self) -> Sequence[int]:
        """Return the partition of topics with one partition."""
        return [0]

    async def write_barriers(self, partitions: Sequence[int]) -> Mapping[int, int | None]:
        """Store a barrier record in each partition. Raises Unavailable."""
        return self.write(partitions, READ_TIMEOUT_S)

    def write(self, partitions: Sequence[int], timeout_s: float) -> dict[int, int | None]:
        """Store a barrier record in each partition; return its offset, None if it is unknown. Raises Unavailable."""
        deadline, topic = time.monotonic() + timeout_s, self._topic
        sent = {each: self._appender.append(Outgoing(topic, self._key, None, partition=each)) for each in partitions}
        found: dict[int, int | None] = {}
        for partition, future in sent.items():
            try:
                found[partition] = future.result(max(0.0, deadline - time.monotonic()))
            except OffsetUnknown:
                found[partition] = None
            except TimeoutError:
                raise Unavailable(f"{topic} has not stored a barrier record in time; its leader may be cut off from the replicas") from None
        return found


def stored_barrier(kafka: Mapping[str, Any], topic: str, key: bytes) -> int:
    """Store a barrier record in a topic of one partition; return its offset, which bounds a read. Raises Unavailable."""
    with closing(Appender(kafka)) as appender:
        return run_blocking(store_barriers(_Barriers(appender, topic, key)))[0] - 1


class TableReader:
    """The newest records of partitions of a compacted topic, by key. Thread-safe.

    Each read continues at the end of the previous read. If the previous read was long ago, the reader starts from the beginning, because
    compaction may have removed a deleted record together with its deletion.
    """

    def __init__(
        self,
        kafka: Mapping[str, Any],
        topic: str,
        partitions: Sequence[int],
        follow: Callable[[bytes, bytes | None], None] = lambda *_: None,
        *,
        begin: Callable[[], None] = lambda: None,
        committed: bool = True,
        barrier_key: bytes = BARRIER_KEY,
        shared: SharedClients | None = None,
    ) -> None:
        """``follow`` receives each record in the order of offsets of its partition. ``begin`` is called when a read restarts.

        ``committed=False`` also reads records of open transactions, and waits for none. ``barrier_key`` is for a table whose readers refuse
        unknown keys. ``shared`` are clients to use in place of own ones.
        """
        self._follow = follow
        self._begun = begin
        self._at = [TopicPartition(topic, partition) for partition in partitions]
        self._kafka = dict(kafka)
        self._barrier_key = barrier_key
        self._shared = shared
        self._appender: Appender | None = None
        self._closed = False
        #: Whether a read has raised an error.
        self.failed = False
        #: Whether the last ``read`` has asked a node that knows less than what was read: a former leader, or a topic that was recreated.
        self.retreated = False
        self._offsets = PartitionOffsets(kafka, self._at, None if shared is None else shared.offsets)
        self._consumer = clients.consumer(
            {
                **PROMPT,
                **kafka,
                **READ_AHEAD,
                "group.id": "bascule.table.unused",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 10,
                "check.crcs": True,
            }
        )
        self._reached: dict[int, int] = {}
        self._resting = True
        self._read_s = 0.0  # on the monotonic clock, when the last read has ended
        self._waits_to_rest = False
        self._ended = threading.Event()
        self._table: dict[bytes, Stored] = {}
        #: Everything stored before this time is read or will be (``time.time``: the monotonic clock stops while the machine is suspended).
        self._known_s = 0.0
        self._lock = threading.RLock()

    def read(
        self, timeout_s: float = READ_TIMEOUT_S, held_up: Callable[[Mapping[bytes, Stored]], None] | None = None
    ) -> dict[bytes, Stored]:
        """Return all records stored before the call, as some node knows them: up to the high watermark, not only to the last stable offset.

        No decision may depend on the result, because a former leader may answer: see ``read_behind_barrier``. The call waits for open
        transactions, and calls ``held_up`` with their place if this takes long. Raises Unavailable if the end is not reached in time.
        """
        return self._known_by(self._read_latest(TableReads(self, timeout_s, held_up)), timeout_s)

    async def _read_latest(self, reads: TableReads) -> dict[bytes, Stored]:
        before = dict(self._reached)
        table = await read_latest(reads)
        self.retreated = any(end < before[partition] for partition, end in reads.asked.items())
        return table

    def read_behind_barrier(
        self, timeout_s: float = READ_TIMEOUT_S, held_up: Callable[[Mapping[bytes, Stored]], None] | None = None
    ) -> dict[bytes, Stored]:
        """Return all records stored before the call, whichever node answers: for reads on which a decision depends (``writer.reading``).

        ``held_up`` as for ``read``. Raises Unavailable.
        """
        return self._known_by(read_behind_barrier(TableReads(self, timeout_s, held_up), timeout_s), timeout_s)

    def write_barriers(self, partitions: Sequence[int], timeout_s: float = READ_TIMEOUT_S) -> dict[int, int | None]:
        """Store a barrier record in each of the partitions; return its offset, None if it is unknown. Raises Unavailable."""
        with self._lock:
            self._check_open()  # nobody would close the new client
            if self._shared is not None:
                appender = self._shared.appender
            else:
                appender = self._appender = self._appender or Appender(self._kafka)
            reached = dict(self._reached)
        found = _Barriers(appender, self._at[0].topic, self._barrier_key).write(partitions, timeout_s)
        for partition, offset in found.items():
            if offset is not None and offset < reached.get(partition, 0):
                self.forget()
                raise Unavailable(f"{self._at[0].topic}-{partition} ends before what was read: it was recreated, or has lost records")
        return found

    def forget(self) -> None:
        """Let the next read start from the beginning. The log that was read is gone, and a barrier in the new one would prove nothing."""
        with self._lock:
            self.failed = True
            self.rest()
            self._reached, self._table = {}, {}

    def ends(self, timeout_s: float = READ_TIMEOUT_S, *, stable: bool = False) -> dict[int, int]:
        """Return the high watermark of each partition, or its last stable offset, as some node reports it. Raises Unavailable."""
        isolation = IsolationLevel.READ_COMMITTED if stable else IsolationLevel.READ_UNCOMMITTED
        return self._offsets.ask(OffsetSpec.latest(), timeout_s, isolation)

    def read_to(
        self,
        ends: Mapping[int, int],
        timeout_s: float = READ_TIMEOUT_S,
        held_up: Callable[[Mapping[bytes, Stored]], None] | None = None,
    ) -> dict[bytes, Stored]:
        """Return all records before these offsets, and possibly more. ``held_up`` as for ``read``. Raises Unavailable."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            try:
                self._begin(timeout_s)
                self._reach(ends, deadline, held_up)
            except BaseException:
                self.failed = True
                raise
            finally:
                self._rest_soon()
            return dict(self._table)

    def reach(self, partition: int, offset: int, timeout_s: float = READ_TIMEOUT_S) -> dict[bytes, Stored]:
        """Return all records up to ``offset`` (inclusive), which is stored, and possibly more. Raises Unavailable."""
        return self.read_to({partition: offset + 1}, timeout_s)

    def _known_by(self, read: Coroutine[Any, Any, dict[bytes, Stored]], timeout_s: float) -> dict[bytes, Stored]:
        """Return the result of a read of all partitions. Everything stored when the read began is known afterwards."""
        with self._lock, closing(read):
            self._begin(timeout_s)
            asked_s = time.time()
            table = run_blocking(read)
            self._known_s = asked_s
            return table

    @property
    def partitions(self) -> Sequence[int]:
        """Return the partitions that are read."""
        return [at.partition for at in self._at]

    def reached(self) -> dict[int, int]:
        """Return the next offset to read of each partition."""
        with self._lock:
            return dict(self._reached)

    def known(self) -> dict[bytes, Stored]:
        """Return the result of the last read."""
        with self._lock:
            return dict(self._table)

    def rest(self) -> None:
        """Stop fetching until the next read, which then takes some milliseconds longer. For a reader that will wait for seconds.

        A reader that does not rest asks Kafka 100 times a second between two reads. After ``REST_AFTER_S`` it rests by itself.
        """
        with self._lock:
            if not self._resting and not self._closed:
                self._resting = True
                self._consumer.unassign()

    def close(self) -> None:
        """Free the clients."""
        self._ended.set()
        with self._lock:
            self._closed = True
            self._consumer.close()
            if self._appender is not None:
                self._appender.close()

    def _rest_soon(self) -> None:
        """Let the reader rest once it was not used for ``REST_AFTER_S``. One thread waits for this as long as reads follow each other."""
        self._read_s = time.monotonic()
        if not self._resting and not self._waits_to_rest:
            self._waits_to_rest = True
            in_background(self._rest_when_idle, "table-rest")

    def _rest_when_idle(self) -> None:
        while not self._ended.wait(REST_AFTER_S):
            with self._lock:
                if self._resting or time.monotonic() - self._read_s >= REST_AFTER_S:
                    self._waits_to_rest = False
                    self.rest()
                    return

    def _begin(self, timeout_s: float) -> None:
        self._check_open()
        if not self._reached or abs(time.time() - self._known_s) > DELETIONS_KEPT_S / 2:
            self._reached, self._table, self._known_s = {}, {}, time.time()
            self._begun()
            self._reached, self._resting = self._offsets.ask(OffsetSpec.earliest(), timeout_s), True

    def _check_open(self) -> None:
        """Raise Unavailable if another thread has closed the reader."""
        if self._closed:
            raise Unavailable(f"{self._at[0].topic}: the reader was closed")

    def _reach(self, ends: Mapping[int, int], deadline: float, held_up: Callable[[Mapping[bytes, Stored]], None] | None) -> None:
        patient_until = time.monotonic() + HELD_UP_S
        while any(self._reached[partition] < end for partition, end in ends.items()):
            if self._resting:
                self._resting = False
                clients.assign(self._consumer, [TopicPartition(at.topic, at.partition, self._reached[at.partition]) for at in self._at])
            if held_up is not None and time.monotonic() > patient_until:
                held_up(self._table)
                patient_until = time.monotonic() + HELD_UP_AGAIN_S
            message = self._consumer.poll(min(HELD_UP_S, max(0.0, deadline - time.monotonic())))
            if message is not None:
                self._take(message)
            elif time.monotonic() >= deadline:
                raise Unavailable(f"{self._at[0].topic} could not be read to its end: a transaction stayed open, or Kafka is unavailable")
        if time.time() - self._known_s > DELETIONS_KEPT_S:
            raise Unavailable(f"{self._at[0].topic}: this process was suspended while it read the topic")

    def _take(self, message: Message) -> None:
        failure = message.error()
        if failure is not None and passing(failure):
            return
        partition, offset = message.partition(), known_offset(message)
        if partition is None:
            raise Unavailable(f"{self._at[0].topic}: the Kafka client returned a record without a partition")
        if failure is None:
            key, value = bytes(message.key() or b""), message.value()
            if value is None:
                self._table.pop(key, None)
            else:
                self._table[key] = Stored(bytes(value), partition, offset, readable_headers(message) or [])
            self._follow(key, value)
            self._reached[partition] = offset + 1
        elif failure.code() == KafkaError._PARTITION_EOF:
            self._reached[partition] = max(self._reached[partition], offset)
        else:
            raise Unavailable(f"{self._at[0].topic} cannot be read: {failure.str()}")


class TableReads:
    """The reads of a table as blocking effects (``writer.reading.TableEffects``)."""

    def __init__(
        self,
        reader: TableReader,
        timeout_s: float = READ_TIMEOUT_S,
        held_up: Callable[[Mapping[bytes, Stored]], None] | None = None,
    ) -> None:
        self._reader, self._timeout_s, self._held_up = reader, timeout_s, held_up
        #: What ``ends`` has returned last.
        self.asked: Mapping[int, int] = {}

    def now_s(self) -> float:
        """Return the time of a monotonic clock."""
        return time.monotonic()

    @property
    def partitions(self) -> Sequence[int]:
        """Return the partitions that are read."""
        return self._reader.partitions

    async def write_barriers(self, partitions: Sequence[int]) -> Mapping[int, int | None]:
        """Store barrier records."""
        return self._reader.write_barriers(partitions, self._timeout_s)

    async def ends(self, *, stable: bool = False) -> Mapping[int, int]:
        """Return the high watermarks, or the last stable offsets."""
        self.asked = self._reader.ends(self._timeout_s, stable=stable)
        return self.asked

    async def read_to(self, ends: Mapping[int, int]) -> dict[bytes, Stored]:
        """Return all records before these offsets."""
        return self._reader.read_to(ends, self._timeout_s, self._held_up)


def trim(kafka: Mapping[str, Any], topic: str, ends: Mapping[int, int]) -> None:
    """Delete the records of a topic before an offset of each partition. The next call retries failures."""
    admin = clients.admin({**PROMPT, **kafka})  # kept in a variable: without the client the futures never end
    asked = admin.delete_records(
        [TopicPartition(topic, partition, end) for partition, end in ends.items()], request_timeout=APPEND_TIMEOUT_S
    )
    for future in asked.values():
        with suppress(KafkaException):
            future.result()


class TableReading:
    """Passes the effects that read a table, other than ``read_to``, to the subclass's ``_reads``."""

    _reads: TableReads

    @property
    def partitions(self) -> Sequence[int]:
        """Return the partitions of the table."""
        return self._reads.partitions

    async def write_barriers(self, partitions: Sequence[int]) -> Mapping[int, int | None]:
        """Store barrier records."""
        return await self._reads.write_barriers(partitions)

    async def ends(self, *, stable: bool = False) -> Mapping[int, int]:
        """Return the high watermarks, or the last stable offsets."""
        return await self._reads.ends(stable=stable)
