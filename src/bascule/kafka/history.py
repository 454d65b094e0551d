"""Queries on the past of a topic: offsets by time, the state of the journal's fence at an offset, one read of a range."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from confluent_kafka import OFFSET_INVALID, Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, ListOffsetsResultInfo, OffsetSpec

from bascule.core.errors import Unavailable
from bascule.kafka import clients
from bascule.kafka.errors import passing, words
from bascule.kafka.retrying import LEAST_ANSWER_S, ask_in_tries, ask_until
from bascule.threads.background import in_background
from bascule.writer.lineage import LogEnd
from bascule.writer.position import UNKNOWN_EPOCH

#: How long, in seconds, the end of a program waits for data that only monitors use.
CLOSE_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 60.0
#: Maximum characters of the metadata of an offset: Kafka keeps 4,096 bytes (offset.metadata.max.bytes).
NOTE_MAX = 1_000
#: Interval, in seconds, at which unchanged offsets are published again: Kafka forgets the offsets of a group without members after days
#: (``offsets.retention.minutes``), and an administrator may have deleted them.
REPEAT_S = 600.0
#: A reader buffers this much (default: 64 MiB), and fetches again as soon as there is room: by default it waits a second, which was more
#: than half of the start with a million messages.
READ_AHEAD: Mapping[str, Any] = {"queued.max.messages.kbytes": 16 * 1024, "fetch.queue.backoff.ms": 2}
#: For a client that is used as soon as it is created: half of it is the pause between its first two connections (default: 100). Not for
#: consumers: with it, read_committed readers repeatedly stalled for a second (a test of 9 s took 28).
PROMPT: Mapping[str, Any] = {"reconnect.backoff.ms": 10}
_ANSWER_S = 0.01  # between two checks for the answer to a commit


class PartitionOffsets:
    """Asks for offsets of partitions of one topic, regardless of open transactions. Raises Unavailable if no client can be made."""

    def __init__(self, kafka: Mapping[str, Any], at: Sequence[TopicPartition], admin: AdminClient | None = None) -> None:
        """``admin`` is a client to share with others."""
        self._admin = offsets_client(kafka) if admin is None else admin  # not "or": a client without events is false
        self._at = list(at)
        self._looked = False

    def ask(self, spec: OffsetSpec, timeout_s: float, isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED) -> dict[int, int]:
        """Return the offset of each partition. Raises Unavailable if Kafka does not answer."""
        return {partition: int(found.offset) for partition, found in self._ask(spec, timeout_s, isolation).items()}

    def end(self, timeout_s: float, *, again: bool = False) -> LogEnd:
        """Return the high watermark of the first partition. ``again`` finds its leader first. Raises Unavailable."""
        self._looked = self._looked and not again
        found = self._ask(OffsetSpec.latest(), timeout_s, IsolationLevel.READ_UNCOMMITTED)[self._at[0].partition]
        return LogEnd(int(found.offset), UNKNOWN_EPOCH if found.leader_epoch is None else int(found.leader_epoch))

    def _ask(self, spec: OffsetSpec, timeout_s: float, isolation: IsolationLevel) -> dict[int, ListOffsetsResultInfo]:
        deadline_s = time.monotonic() + timeout_s
        try:
            # A new topic, or a leader that moves, refuses requests for a moment.
            return ask_in_tries(deadline_s, partial(self._ask_once, spec, isolation))
        except KafkaException as error:
            raise Unavailable(f"the offsets of {self._at[0].topic} cannot be read: {error.args[0].str()}") from error

    def _ask_once(self, spec: OffsetSpec, isolation: IsolationLevel, timeout_s: float) -> dict[int, ListOffsetsResultInfo]:
        """Ask once. Raises KafkaException."""
        if not self._looked:
            # A new client replaces its first connection at once; a request in flight would be repeated after one or three seconds. After a
            # failure, the client continues to use the leader epoch of its last lookup for minutes.
            self._admin.list_topics(self._at[0].topic, timeout=timeout_s)
        self._looked = False
        asked = self._admin.list_offsets(dict.fromkeys(self._at, spec), isolation_level=isolation, request_timeout=timeout_s)
        found = {each.partition: future.result() for each, future in asked.items()}
        # The client returns this offset like an answer if the connection broke before the answer.
        if any(each.offset == OFFSET_INVALID for each in found.values()):
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        self._looked = True
        return found


def offsets_client(kafka: Mapping[str, Any]) -> AdminClient:
    """Return a client that asks for offsets. Raises Unavailable."""
    try:
        return clients.admin({**PROMPT, **kafka})
    except KafkaException as error:
        raise Unavailable(f"could not create a client to read offsets: {words(error)}") from error


def known_offset(message: Message) -> int:
    """Return the offset of a record that a consumer has read. Raises Unavailable if the client does not report it."""
    offset = message.offset()
    if offset is None or offset < 0:
        raise Unavailable(f"{message.topic()}-{message.partition()}: the Kafka client returned a record without an offset")
    return offset


def content_of(message: Message) -> tuple[bytes | None, bytes | None]:
    """Return key and value of a record that was read."""
    return _octets(message.key()), _octets(message.value())


def readable_headers(message: Message) -> list[tuple[str, Any]] | None:
    """Return the headers of a record that was read; None if the client cannot read them, because the name of one is no text (UTF-8)."""
    try:
        headers: Any = message.headers()
    except (UnicodeDecodeError, SystemError):  # which of them depends on the client
        return None
    return headers or []


def _octets(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def taken_at_once(consumer: Consumer, count: int, timeout_s: float) -> list[Message]:
    """Return what a consumer has now, at most ``count`` messages; wait only for the first one. Errors of Kafka come as messages."""
    first = consumer.poll(timeout_s)
    if first is None:
        return []
    return [first, *(consumer.consume(count - 1, 0) if count > 1 else ())]


class TopicHistory:
    """Reads offsets and records of one partition. Raises Unavailable if Kafka does not answer within ``timeout_s``."""

    def __init__(
        self, kafka: Mapping[str, Any], topic: str, partition: int, timeout_s: float = READ_TIMEOUT_S, admin: AdminClient | None = None
    ) -> None:
        """``admin`` is a client to share with others."""
        self._kafka = dict(kafka)
        self._timeout_s = timeout_s
        self._at = TopicPartition(topic, partition)
        self._offsets = PartitionOffsets(kafka, [self._at], admin)

    def earliest(self) -> int:
        """Return the first offset that is not deleted."""
        return self._offset(OffsetSpec.earliest())

    def latest(self) -> int:
        """Return the high watermark."""
        return self._offset(OffsetSpec.latest())

    def stable(self) -> int:
        """Return the last stable offset: every transaction that began before it has ended."""
        return self._offset(OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)

    def at_time(self, timestamp_ms: int) -> int:
        """Return the first offset at or after a time (ms since the epoch), or the high watermark if all records are older."""
        latest = self.latest()  # asked first: records that arrive between the two requests may be younger
        found = self._offset(OffsetSpec.for_timestamp(timestamp_ms))
        return latest if found < 0 else found

    def records(self, start: int, end: int, *, committed: bool = False) -> Iterator[Message]:
        """Yield the records from ``start`` up to ``end`` (exclusive). Raises Unavailable, also if ``start`` was deleted."""
        if start >= end:
            return
        consumer = clients.consumer(
            {
                **PROMPT,
                **self._kafka,
                **READ_AHEAD,
                # If the range ends with a transaction marker, Kafka would keep the client waiting for the next record.
                "fetch.wait.max.ms": 10,
                "group.id": "bascule.history.unused",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "auto.offset.reset": "error",
                "check.crcs": True,
            }
        )
        try:
            clients.assign(consumer, [TopicPartition(self._at.topic, self._at.partition, start)])
            yield from self._between(consumer, start, end)
        finally:
            consumer.close()

    def _between(self, consumer: Consumer, start: int, end: int) -> Iterator[Message]:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            # No wait for as many records as there can be: a transaction marker has an offset, but is no record.
            for message in taken_at_once(consumer, max(1, min(1000, end - start)), 0.5):
                failure = message.error()
                offset = known_offset(message)
                if failure is None:
                    if offset >= end:
                        return
                    yield message
                    start = offset + 1
                    if start >= end:
                        return
                elif failure.code() == KafkaError._PARTITION_EOF:
                    # Transaction markers may fill the range up to its end. An EOF before it waits for an open transaction.
                    if offset >= end:
                        return
                elif not passing(failure):
                    raise Unavailable(f"{self._at.topic}-{self._at.partition} cannot be read: {failure.str()}")
                else:
                    continue
                deadline = time.monotonic() + self._timeout_s
        raise Unavailable(f"{self._at.topic}-{self._at.partition} could not be read up to offset {end}")

    def _offset(self, spec: OffsetSpec, isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED) -> int:
        return self._offsets.ask(spec, self._timeout_s, isolation)[self._at.partition]


def committed_offset(kafka: Mapping[str, Any], group: str, topic: str, partition: int) -> int:
    """Return the committed offset of a consumer group, negative if none. Raises Unavailable if the coordinator does not answer in time."""
    return committed_note(kafka, group, topic, partition)[0]


def committed_note(kafka: Mapping[str, Any], group: str, topic: str, partition: int) -> tuple[int, str]:
    """Return the committed offset, and the metadata committed with it."""
    consumer = clients.consumer({**kafka, "group.id": group, "enable.auto.commit": False})
    deadline_s = time.monotonic() + READ_TIMEOUT_S
    try:
        # A Kafka that has just started may not know the coordinator of a group yet.
        (found,) = ask_until(deadline_s, lambda: consumer.committed([TopicPartition(topic, partition)], timeout=READ_TIMEOUT_S))
        return int(found.offset), found.metadata or ""
    except KafkaException as error:
        raise Unavailable(f"group {group} does not answer: {words(error)}") from error
    finally:
        consumer.close()


class LagMirror:
    """Publishes positions as offsets of a consumer group for monitors. Bascule does not read these offsets, and does not wait for them."""

    def __init__(self, kafka: Mapping[str, Any], group: str) -> None:
        self._consumer = clients.consumer({**kafka, "group.id": group, "enable.auto.commit": False, "on_commit": self._answered})
        self._wanted: dict[tuple[str, int], TopicPartition] = {}
        # One commit at a time: the client repeats a failed commit, which may overtake a later one.
        self._asked: dict[tuple[str, int], TopicPartition] = {}
        self._stored: dict[tuple[str, int], TopicPartition] = {}
        self._stored_since_s = time.monotonic()

    def show(self, offsets: Mapping[tuple[str, int], int], note: str = "") -> None:
        """Commit the next offsets to read, by topic and partition, with ``note`` as metadata.

        The call also retries earlier offsets that Kafka has not stored, so callers repeat it even without new offsets.
        """
        if time.monotonic() - self._stored_since_s >= REPEAT_S:
            self._stored, self._stored_since_s = {}, time.monotonic()
        for at, offset in offsets.items():
            shown = TopicPartition(*at, offset, note[:NOTE_MAX])
            known = self._wanted.get(at) or self._stored.get(at)
            if known is None or (known.offset, known.metadata) != (shown.offset, shown.metadata):
                self._wanted[at] = shown
        self._consumer.poll(0)
        self._commit()

    def close(self) -> None:
        """Free the client. Without Kafka the client would wait forever for its last commit; in this case it is abandoned."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._wanted and time.monotonic() < deadline:
            self._commit()
            self._consumer.poll(_ANSWER_S)
        closing = in_background(self._consumer.close, "lag-mirror-close")
        with suppress(TimeoutError):
            closing.result(max(0.0, deadline - time.monotonic()))

    def _commit(self) -> None:
        if self._wanted and not self._asked:
            self._asked = dict(self._wanted)
            self._consumer.commit(offsets=list(self._asked.values()), asynchronous=True)

    def _answered(self, error: KafkaError | None, _: list[TopicPartition]) -> None:
        """Handle the result of a commit (called by ``poll``). Offsets that were not stored are retried."""
        if error is None:
            self._stored |= self._asked
            self._wanted = {at: shown for at, shown in self._wanted.items() if self._asked.get(at) is not shown}
        self._asked = {}


class StableEnds:
    """Asks for the ends of partitions of many topics, as readers of committed records see them. Not thread-safe."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._kafka = kafka
        self._admin: AdminClient | None = None
        #: Topics whose leaders are to be found first: see ``PartitionOffsets``.
        self._to_find: set[str] = set()

    def of(self, places: Collection[tuple[str, int]], timeout_s: float) -> dict[tuple[str, int], int]:
        """Return the ends that Kafka reports. Partitions for which it reports none are left out. Raises Unavailable."""
        if not places:
            return {}
        if self._admin is None:  # not "or": a client without events is false
            self._admin, self._to_find = offsets_client(self._kafka), {next(iter(places))[0]}
        deadline_s = time.monotonic() + timeout_s
        try:
            for topic in self._to_find.intersection(topic for topic, _ in places):
                self._admin.list_topics(topic, timeout=max(LEAST_ANSWER_S, deadline_s - time.monotonic()))
            asked = self._admin.list_offsets(
                {TopicPartition(*place): OffsetSpec.latest() for place in places},
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=max(LEAST_ANSWER_S, deadline_s - time.monotonic()),
            )
        except KafkaException as error:
            raise Unavailable(f"the offsets of partitions cannot be read: {error.args[0].str()}") from error
        found = {}
        for at, future in asked.items():
            with suppress(KafkaException):
                found[at.topic, at.partition] = int(future.result().offset)
        found = {place: offset for place, offset in found.items() if offset >= 0}
        self._to_find = {topic for topic, partition in places if (topic, partition) not in found}
        return found
