"""A producer of single records, whose clients are replaced when they fail."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from bascule.core.errors import TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.kafka import clients
from bascule.kafka.errors import TOO_LARGE
from bascule.kafka.history import PROMPT
from bascule.kafka.log import APPEND_SETTINGS, POLL_S, introduce, patient
from bascule.threads.lasting import lasting_thread

_log = get_log("bascule.kafka.appender")

#: After this time, in seconds, an append is reported in doubt: it may still be stored.
APPEND_TIMEOUT_S = 30.0
#: An append that is given up is reported at once, with or without Kafka; on a busy machine the client's threads may be late.
PURGE_TIMEOUT_S = 30.0
#: A Kafka that has recovered is found within a second.
CLIENT_SETTINGS: Mapping[str, Any] = {"reconnect.backoff.max.ms": 1000}


class OffsetUnknown(Unavailable):
    """A record is stored, but Kafka has not reported its offset.

    Kafka reports this (DUPLICATE_SEQUENCE_NUMBER) for a repeated request if it no longer remembers the offset of the first attempt.
    """


def hand_over(produce: Callable[..., None], record: Outgoing, delivered: Callable[[KafkaError | None, Message], None]) -> None:
    """Call the ``produce`` of a client, or a ``patient`` one, for an Outgoing."""
    produce(
        record.topic,
        record.value,
        record.key,
        record.partition,
        on_delivery=delivered,
        timestamp=record.timestamp_ms,
        headers=list(record.headers),
    )


class Appender:
    """Appends single records, each acknowledged by all replicas. Thread-safe.

    Its client ends with ``close``, or when nobody uses the appender any more and no record is in flight.
    """

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._settings = {
            **APPEND_SETTINGS,
            **PROMPT,
            **kafka,
            "enable.idempotence": True,
            "acks": "all",
            "partitioner": "murmur2_random",
            "message.timeout.ms": int(APPEND_TIMEOUT_S * 1000),
        }
        self._producer: Producer | None = None
        self._lock = threading.Lock()

    def append(self, record: Outgoing) -> Future[int]:
        """Append a record; return a future of its offset. The future raises TooLarge, or Unavailable if the record may be stored or not.

        The future raises OffsetUnknown if the record is stored at an unknown offset; ``await_stored`` is for callers that need no
        offset. If the client has no room, the call waits: earlier records are stored or fail within ``APPEND_TIMEOUT_S``.
        """
        future: Future[int] = Future()

        def delivered(error: KafkaError | None, message: Message, _user: Appender = self) -> None:
            try:
                future.set_result(_offset(record, error, message))
            except Exception as failure:
                future.set_exception(failure if isinstance(failure, Unavailable) else Unavailable(f"{record.topic}: {failure!r}"))

        producer = self._client(record.topic)
        try:
            hand_over(patient(producer), record, delivered)
        except KafkaException as error:
            if error.args[0].fatal():
                self._drop(producer)
            future.set_exception(_failure(record, error.args[0]))
        else:
            if self._producer is not producer:  # the client was dropped meanwhile, and nobody else might report the record
                _answer_all(producer)
        return future

    def close(self, timeout_s: float = APPEND_TIMEOUT_S) -> None:
        """Wait for records in flight, give up those that are not stored in time, and free the client. Then each future has a result."""
        if (producer := self._producer) is not None:
            self._drop(producer, timeout_s)

    def _client(self, topic: str) -> Producer:
        with self._lock:
            if self._producer is None:
                producer = self._producer = clients.producer(self._settings)
                owner = weakref.ref(self)
                poll, failed = partial(_poll, owner, producer, topic), partial(_failed, owner, producer)
                lasting_thread(poll, "bascule-appender", on_failure=failed).start()
            return self._producer

    def _drop(self, producer: Producer, timeout_s: float = APPEND_TIMEOUT_S) -> None:
        with self._lock:
            if self._producer is producer:  # and not a later client
                self._producer = None
        _answer_all(producer, timeout_s)

    def uses(self, producer: Producer) -> bool:
        """Return True if this is the client for the next record."""
        return self._producer is producer

    def failed(self, producer: Producer, error: BaseException) -> None:
        """Replace a failed client at the next append, and answer its records in flight."""
        _log.warning("Kafka client failed, starting a new one", error=repr(error))
        self._drop(producer)


def _poll(owner: weakref.ref[Appender], producer: Producer, topic: str) -> None:
    with suppress(KafkaException):
        introduce(producer, topic, POLL_S)
    while (appender := owner()) is not None and appender.uses(producer):
        del appender  # so that it ends if nobody else uses it
        producer.poll(POLL_S)


def _failed(owner: weakref.ref[Appender], producer: Producer, error: BaseException) -> None:
    if (appender := owner()) is not None:
        appender.failed(producer, error)


def _answer_all(producer: Producer, timeout_s: float = APPEND_TIMEOUT_S) -> None:
    """Answer all records in flight. The client itself would report the last of them too late."""
    if producer.flush(timeout_s):
        producer.purge()
        producer.flush(PURGE_TIMEOUT_S)


def await_stored(future: Future[int], timeout_s: float | None = None) -> None:
    """Return when an appended record is stored, at any offset. Raises the errors of ``Appender.append``, and TimeoutError."""
    with suppress(OffsetUnknown):
        future.result(timeout_s)


def _offset(record: Outgoing, error: KafkaError | None, message: Message) -> int:
    """Return the offset of a record by its delivery report. Raises Unavailable, OffsetUnknown."""
    if error is not None:
        raise _failure(record, error)
    offset = message.offset()
    if offset is None or offset < 0:
        raise OffsetUnknown(f"topic {record.topic!r} has stored a record, but Kafka has not reported its offset")
    return offset


def _failure(record: Outgoing, error: KafkaError) -> Unavailable:
    return (TooLarge if error.code() in TOO_LARGE else Unavailable)(f"{record.topic}: {error.str()}")
