"""The JMS face of a connection: a session, its producers, and messages that become records as Bascule's diverts make them."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from bascule.client.destination import Destination
from bascule.client.message import Body, Message, SendOptions, encode, stamp
from bascule.core.errors import BadRecord, InvalidInput
from bascule.core.kafka_records import Outgoing
from bascule.jms.to_kafka import record_of, target_topic

if TYPE_CHECKING:
    from bascule.adapter.outbound.factory import KafkaConnection


class JmsSession:
    """Made by ``KafkaConnection.jms``. A queue and a topic of JMS are the Kafka topic of their name, or what the template makes of it."""

    def __init__(self, connection: KafkaConnection, key: str, topic: str) -> None:
        """``key`` is a divert's choice: ``message-id``, ``correlation-id``, ``group-id``, ``property:NAME`` or ``none``."""
        self._connection = connection
        self._key = key
        self._topic = topic

    def producer(self, destination: Destination, options: SendOptions | None = None) -> JmsProducer:
        """Sends to one destination."""
        return JmsProducer(self, destination, options or SendOptions())

    def send(self, destination: Destination, content: Message | Body, options: SendOptions | None = None) -> str:
        """One message; gives its JMSMessageID. Raises InvalidInput for what JMS has not, or has no form as a record."""
        message = Message.of(content)
        now_ms = time.time_ns() // 1_000_000
        stamp(message, destination, options or SendOptions(), f"ID:{uuid.uuid4()}", now_ms)
        try:
            output = record_of(encode(message), target_topic(self._topic, destination.name), self._key, [], now_ms)
        except BadRecord as error:
            raise InvalidInput(str(error)) from error
        headers = [(name, value.encode() if isinstance(value, str) else value) for name, value in output.headers]
        self._connection.send_record(Outgoing(output.topic, output.key, output.value, headers, timestamp_ms=output.timestamp_ms))
        return message.message_id or ""


class JmsProducer:
    """Made by ``JmsSession.producer``."""

    def __init__(self, session: JmsSession, destination: Destination, options: SendOptions) -> None:
        self._session = session
        self._destination = destination
        self._options = options

    def send(self, content: Message | Body) -> str:
        """As ``JmsSession.send``."""
        return self._session.send(self._destination, content, self._options)
