"""The JMS interface of a connection to Kafka: it sends like the JMS client, and messages become records as in Bascule's diverts."""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING

from bascule.client import Context, Destination, Message, MessageRefused, Producer, TimedOut
from bascule.client.destination import require_destination
from bascule.client.managed import refused
from bascule.client.message import Body, SendOptions, encode, stamp
from bascule.client.sends import SendCompletion
from bascule.core.errors import BadRecord, BasculeError, InvalidInput, TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.jms.to_kafka import record_of, target_topic

if TYPE_CHECKING:
    from bascule.adapter.outbound.factory import KafkaConnection

_log = get_log("bascule.adapter")


class JmsSession:
    """A session from ``KafkaConnection.jms``. A JMS queue or topic is the Kafka topic of the same name, or of the template's result."""

    _refusal = "a connection to Kafka cannot receive. Receive records with an endpoint, messages with a context of a JmsConnectionFactory"

    def __init__(self, connection: KafkaConnection, key: str, topic: str) -> None:
        """``key`` is the record key, as in a divert: ``message-id``, ``correlation-id``, ``group-id``, ``property:NAME`` or ``none``."""
        self._connection = connection
        self._key = key
        self._topic = topic

    def producer(
        self,
        destination: Destination | None = None,
        *,
        persistent: bool = True,
        priority: int = 4,
        time_to_live_s: float = 0.0,
        delivery_delay_s: float = 0.0,
    ) -> Producer:
        """Return a producer for one destination, or for one that each send names. The other arguments are defaults for messages."""
        return Producer(self, destination, SendOptions(persistent, priority, time_to_live_s, delivery_delay_s))

    def send(self, destination: Destination, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Send one message, and return when it is stored; within a transaction at once.

        Raises InvalidInput for a value that JMS does not have or that has no form as a record, MessageRefused if the message is too large,
        TimedOut, Unavailable.
        """
        return self.producer(destination).send(content, timeout_s=timeout_s)

    def reply(self, request: Message, content: Message | Body, *, timeout_s: float | None = None) -> Message:
        """Answer a message. Raises InvalidDestination if the request has no reply destination."""
        return self.send(*request.answer(content), timeout_s=timeout_s)

    request = refused(Context.request)
    consumer = refused(Context.consumer)
    durable_consumer = refused(Context.durable_consumer)
    shared_consumer = refused(Context.shared_consumer)
    shared_durable_consumer = refused(Context.shared_durable_consumer)
    browse = refused(Context.browse)
    unsubscribe = refused(Context.unsubscribe)
    temporary_queue = refused(Context.temporary_queue)
    temporary_topic = refused(Context.temporary_topic)

    def _send(
        self,
        destination: Destination,
        content: Message | Body,
        options: SendOptions,
        timeout_s: float | None,
        completion: SendCompletion,
    ) -> Message:
        """See SendingContext."""
        require_destination(destination)
        message = Message.of(content)
        now_ms = time.time_ns() // 1_000_000
        if not (completion.repeat and message.message_id):
            stamp(message, destination, options, f"ID:{uuid.uuid4()}", now_ms)
        told = _Answer(message, completion)
        try:
            self._connection.send_record(self._record(message, destination, now_ms), told)
        except TooLarge as error:
            raise MessageRefused(str(error)) from error
        if completion.wait:
            told.wait(timeout_s)
        return message

    def _flush(self, timeout_s: float | None) -> None:
        self._connection.flush(timeout_s)

    def _record(self, message: Message, destination: Destination, now_ms: int) -> Outgoing:
        try:
            output = record_of(encode(message), target_topic(self._topic, destination.name), self._key, [], now_ms)
        except BadRecord as error:
            raise InvalidInput(str(error)) from error
        headers = [(name, value.encode() if isinstance(value, str) else value) for name, value in output.headers]
        return Outgoing(output.topic, output.key, output.value, headers, timestamp_ms=output.timestamp_ms)


class _Answer:
    """The outcome of a message: called once, by the thread that knows it."""

    def __init__(self, message: Message, completion: SendCompletion) -> None:
        self._message, self._completion = message, completion
        self._known = threading.Event()
        self._error: BasculeError | None = None

    def __call__(self, error: BaseException | None) -> None:
        self._error = failure = None if error is None else _failure(error)
        if failure is not None and self._completion.refusals is not None:
            self._completion.refusals.append(failure)
        self._known.set()
        if self._completion.on_done is not None:
            try:
                self._completion.on_done(self._message, failure)
            except Exception:
                _log.exception("send callback failed", message=self._message.message_id)

    def wait(self, timeout_s: float | None) -> None:
        """Return when the message is stored. Raises TimedOut, and the error if it may not be stored."""
        if not self._known.wait(timeout_s):
            raise TimedOut(f"send of message {self._message.message_id} timed out; the record may or may not be stored")
        if self._error is not None:
            raise self._error


def _failure(error: BaseException) -> BasculeError:
    if isinstance(error, TooLarge):
        return MessageRefused(str(error))
    return error if isinstance(error, BasculeError) else Unavailable(repr(error))
