"""The journal's partition in Kafka: many appends in flight, confirmed in order, and reads of ranges."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from bascule.broker.epoch import Outcome
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.journal.offsets import UNKNOWN_OFFSET
from bascule.journal.reading import CutOff, Trimmed
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.errors import passing, words
from bascule.kafka.history import READ_AHEAD, TopicHistory, readable_headers, taken_at_once
from bascule.kafka.retrying import ask_until
from bascule.kafka.topic_view import TopicViewLog, viewing
from bascule.threads.lasting import end_process, lasting_thread

log = get_log(__name__)

#: How long, in seconds, the delivery thread sleeps when no report arrives; only its end waits for it.
POLL_S = 0.25
#: The same for reads that are mostly short.
AT_END_S = 0.02
#: Timeout, in seconds, for requests that are not appends.
ANSWER_TIMEOUT_S = 30.0
#: A reader that receives nothing for this time, in seconds, although there is more, gets a new client. The old one may read from a node
#: that is cut off from its peers and still calls itself the leader. A new client may ask another node for the leader.
RENEW_S = 5.0
#: How long, in seconds, a full client gets to deliver some record.
ROOM_POLL_S = 0.1

APPEND_SETTINGS: Mapping[str, Any] = {
    "enable.idempotence": True,
    "acks": "all",
    "linger.ms": 0,  # the broker already batches records
    # No timeout: after a stall, librdkafka reported stored records as failed, and later ones succeeded.
    "message.timeout.ms": 0,
    "message.max.bytes": RECORD_BYTES_MAX,
    "queue.buffering.max.kbytes": 512 * 1024,  # the broker limits the bytes in flight
    "socket.nagle.disable": True,
    "retry.backoff.ms": 20,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1000,
}
#: After a record that Kafka refuses permanently, no other may be stored: the sequence would have a gap, and no broker could load it.
GAPLESS_SETTINGS: Mapping[str, Any] = {**APPEND_SETTINGS, "enable.gapless.guarantee": True}
READ_SETTINGS: Mapping[str, Any] = {
    **READ_AHEAD,
    "group.id": "bascule-reader",  # required by the client; nothing is committed
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "check.crcs": True,
    "fetch.wait.max.ms": 50,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1000,
}
#: For a reader that waits at the end for hours: Kafka answers at once if there is a record, and each empty answer costs both sides. Only
#: the check whether a reader is at the end has to wait for such an answer.
FOLLOWING_SETTINGS: Mapping[str, Any] = {"fetch.wait.max.ms": 500}


def offset_of(message: Message) -> int:
    """Return the offset of a record. Raises Unavailable if the client does not report it."""
    offset = message.offset()
    if offset is None:
        raise Unavailable(f"the Kafka client returned a record of {message.topic()} without an offset")
    return offset


def header_of(message: Message, name: str) -> bytes | str | None:
    """Return the last header of a record with a name, or None, also if the client cannot decode the headers."""
    return dict(readable_headers(message) or ()).get(name)


def patient(producer: Producer) -> Callable[..., None]:
    """Return the client's ``produce`` in a form that waits if the client has no room, instead of a BufferError. Raises KafkaException."""

    def produce(*record: Any, **more: Any) -> None:
        while True:
            try:
                producer.produce(*record, **more)
                return
            except BufferError:
                producer.poll(ROOM_POLL_S)

    return produce


def introduce(producer: Producer, topic: str, timeout_s: float) -> None:
    """Connect a new client before its first transaction or record. Raises KafkaException.

    The bootstrap connection answers the first request and is then replaced by the connection to the broker, which answers the second.
    This takes 20 ms instead of 60 or 510 ms.
    """
    for _ in range(2):
        clients.introduce(producer, topic, timeout_s)


def takes_appends(kafka: Mapping[str, Any], topic: str, partition: int, timeout_s: float) -> bool:
    """Return whether a new client finds the leader of the partition, and the in-sync replicas that an append needs. Blocks."""
    try:
        topics = Topics(kafka)
        in_sync = topics.in_sync(topic, partition, timeout_s)
        if not in_sync or in_sync < int(topics.config(topic, timeout_s)["min.insync.replicas"]):
            return False
        TopicHistory(kafka, topic, partition, timeout_s).latest()  # the leader answers
    except Unavailable:
        return False
    return True


class JournalWriter:
    """Appends to one partition. ``on_outcomes`` is called from another thread, with outcomes in the order of the appends.

    :mod:`bascule.kafka.journal_writer` needs this thread only if the installed Kafka client does not report to a file descriptor.
    """

    def __init__(self, kafka: Mapping[str, Any], topic: str, partition: int, on_outcomes: Callable[[list[Outcome]], None]) -> None:
        self._producer = clients.producer({**kafka, **GAPLESS_SETTINGS})
        self._topic = topic
        self._partition = partition
        self._on_outcomes = on_outcomes
        self._outcomes: deque[Outcome] = deque()
        self._closing = False
        self._thread = lasting_thread(self._poll, "journal-delivery", on_failure=end_process)
        self._thread.start()

    def append(self, key: bytes, value: bytes) -> None:
        """Append a record; ``on_outcomes`` receives its outcome. Raises Unavailable if the client accepts no more."""
        try:
            self._producer.produce(self._topic, value=value, key=key, partition=self._partition, on_delivery=self._delivered)
        except (BufferError, KafkaException) as error:
            raise Unavailable(f"journal {self._topic}: append of {len(value)} bytes refused: {words(error)}") from error

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._outcomes.append((-1, words(error)))
            return
        offset = message.offset()  # None also if the client reports OFFSET_INVALID
        self._outcomes.append((UNKNOWN_OFFSET if offset is None or offset < 0 else offset, None))

    def _poll(self) -> None:
        producer, outcomes = self._producer, self._outcomes
        failed = False
        while not (self._closing or failed):
            try:
                producer.poll(POLL_S)
            except KafkaException as error:  # the client is unusable, and nothing that it still holds will be stored
                failed = True
                outcomes.append((-1, words(error)))
            except Exception as error:  # raised by the delivery callback: the outcome of that record is lost
                failed = True
                log.exception("delivery report failed", topic=self._topic)
                outcomes.append((-1, f"the delivery report cannot be used: {error!r}"))
            if outcomes:
                taken = list(outcomes)
                outcomes.clear()
                self._on_outcomes(taken)

    def stop(self) -> None:
        """Stop reporting outcomes, except those that the thread is reporting now."""
        self._closing = True

    def close(self) -> None:
        """Stop. The outcome of records in flight stays unknown."""
        self.stop()
        self._thread.join()
        self._producer.purge()
        with suppress(KafkaException):  # raised if a record was still in flight
            self._producer.poll(0)
        del self._producer  # its threads and connections end here; the epoch may keep the writer for long


class _Silence:
    """How long a reader has received nothing although more records exist."""

    def __init__(self, reader: PartitionReader) -> None:
        self._reader = reader
        self._idle_s = 0.0
        self._renewed_s = 0.0

    def lasts(self, waited_s: float, *, came: bool) -> bool:
        """Count a read that took ``waited_s``. Return whether the reader must give up. Raises Unavailable like ``renew``."""
        if came:
            self._idle_s = self._renewed_s = 0.0
            return False
        self._idle_s += waited_s
        if self._idle_s - self._renewed_s > RENEW_S:
            self._renewed_s = self._idle_s
            self._reader.renew()
        return self._idle_s > ANSWER_TIMEOUT_S


class PartitionReader:
    """Reads one partition from an offset, up to the high watermark if asked (never only to the last stable offset)."""

    def __init__(
        self, kafka: Mapping[str, Any], topic: str, partition: int, *, committed_only: bool = False, following: bool = False
    ) -> None:
        """``following`` is for a reader that waits at the end and does not use ``at_end`` or ``to_end``. It has a ``topic_view``.

        Raises Unavailable if no client can be made, for example without file descriptors.
        """
        isolation = "read_committed" if committed_only else "read_uncommitted"
        self._settings = {**kafka, **READ_SETTINGS, **(FOLLOWING_SETTINGS if following else {}), "isolation.level": isolation}
        self._following = following
        self._view_log: TopicViewLog | None = None
        self._topic = topic
        self._partition = partition
        self._position = OFFSET_BEGINNING
        self._consumer = self._client()
        self.at_end = False  # the last read reached the end of what can be read
        self.end_seen = -1  # the offset of the last such end; a node that lags reports an earlier one than others

    def _client(self) -> Consumer:
        settings = self._settings
        if self._following:
            settings, self._view_log = viewing(settings, log)
        try:
            return clients.consumer(settings, self._view_log)
        except KafkaException as error:
            raise Unavailable(f"could not create a client to read {self._topic}: {words(error)}") from error

    @property
    def topic_view(self) -> int | None:
        """Return a number that changes before this reader returns records of a recreated topic; None if this cannot be known."""
        return None if self._view_log is None else self._view_log.view

    @property
    def read_topic_id(self) -> str:
        """Return the id of the topic to which the returned records belong, as the client knows it; "" if this cannot be known."""
        return "" if self._view_log is None else self._view_log.topic_id(self._topic)

    def renew(self) -> None:
        """Continue to read with a new client. Raises Unavailable if none can be made."""
        fresh = self._client()
        self._consumer.close()
        self._consumer = fresh
        self.seek(self._position)

    def range(self) -> tuple[int, int]:
        """Return the first offset and the high watermark. Raises Unavailable."""
        at = TopicPartition(self._topic, self._partition)

        def ask() -> tuple[int, int]:
            found = self._consumer.get_watermark_offsets(at, timeout=ANSWER_TIMEOUT_S)
            if found is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            return found

        try:
            return ask_until(time.monotonic() + ANSWER_TIMEOUT_S, ask)
        except KafkaException as error:
            raise Unavailable(f"Kafka does not answer for topic {self._topic}: {words(error)}") from error

    def seek(self, offset: int = OFFSET_BEGINNING) -> None:
        """Set the offset of the next read."""
        self._position = offset
        clients.assign(self._consumer, [TopicPartition(self._topic, self._partition, offset)])

    def read(self, count: int = 1000, timeout_s: float = POLL_S) -> list[Message]:
        """Return records that arrive in time, at most ``count``. Raises Unavailable; Trimmed or CutOff if the offset is not in the log."""
        return self._taken(self._consumer.consume(count, timeout_s))

    def read_at_once(self, count: int, timeout_s: float) -> list[Message]:
        """Return the records that are there, at most ``count``; wait only for the first one. Raises the errors of ``read``."""
        return self._taken(taken_at_once(self._consumer, count, timeout_s))

    def _taken(self, messages: Sequence[Message]) -> list[Message]:
        found: list[Message] = []
        self.at_end = False
        for message in messages:
            error = message.error()
            if error is None:
                self._position = offset_of(message) + 1
                found.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                self.at_end = True
                self.end_seen = offset_of(message)
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise self._beyond()
            elif not passing(error):
                raise Unavailable(f"reading {self._topic}: {words(error)}")
        return found

    def _beyond(self) -> Unavailable:
        first, end = self.range()
        if self._position > end:
            return CutOff(
                f"{self._topic} ends at offset {end}, before the position {self._position}; the topic was recreated or has lost its end"
            )
        return Trimmed(f"{self._topic} begins at offset {first}, after the position {self._position}")

    def to_end(self, barrier: int = -1) -> Iterator[Message]:
        """Yield all records up to the end, and up to offset ``barrier`` even if a node reports an earlier end.

        Raises Unavailable if no more records arrive.
        """
        silence = _Silence(self)
        self.at_end = False
        while not self.at_end or self._position <= barrier:
            # The client waits this long for as many records as requested, although it knows that it is at the end.
            messages = self.read(timeout_s=AT_END_S)
            if silence.lasts(AT_END_S, came=bool(messages)):
                raise Unavailable(f"reading {self._topic}: no record for {ANSWER_TIMEOUT_S:.0f} s before its end")
            yield from messages

    def up_to(self, end_offset: int) -> Iterator[Message]:
        """Yield every record before ``end_offset``; a record must exist directly before it. Raises Unavailable if no record arrives."""
        position, silence = -1, _Silence(self)
        while position < end_offset - 1:
            messages = self.read()
            if silence.lasts(POLL_S, came=bool(messages)):
                raise Unavailable(f"reading {self._topic}: no record for {ANSWER_TIMEOUT_S:.0f} s at offset {position + 1} of {end_offset}")
            for message in messages:
                position = offset_of(message)
                if position < end_offset:
                    yield message

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()
