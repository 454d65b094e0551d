"""JMS messages of an outbound connection, as Kafka records."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bascule.adapter.outbound.jms import JmsSession
from bascule.client.destination import Queue
from bascule.client.message import Message, SendOptions
from bascule.core.errors import InvalidInput
from bascule.core.kafka_records import Outgoing


class Connection:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []

    def send_record(self, record: Outgoing) -> None:
        self.sent.append(record)


def session(key: str = "message-id", topic: str = "") -> tuple[JmsSession, Connection]:
    connection = Connection()
    return JmsSession(cast("Any", connection), key, topic or "jms.${address}"), connection


def test_message_is_a_record_of_the_topic_that_the_template_makes_under_its_message_id() -> None:
    jms, connection = session()
    message_id = jms.producer(Queue("orders")).send("one")
    (record,) = connection.sent
    assert message_id.startswith("ID:")
    assert (record.topic, record.key, record.value) == ("jms.orders", message_id.encode(), b"one")
    assert all(isinstance(value, bytes | None) for _, value in record.headers)
    assert record.timestamp_ms > 0


def test_record_is_keyed_by_a_property_and_options_are_headers() -> None:
    jms, connection = session("property:customer")
    jms.producer(Queue("orders"), SendOptions(priority=7)).send(Message("one", properties={"customer": "acme"}))
    (record,) = connection.sent
    assert record.key == b"acme"
    assert b"7" in [value for name, value in record.headers if "priority" in name.lower()]


def test_message_that_has_no_form_as_a_record_is_refused() -> None:
    jms, connection = session(topic="${address}")
    with pytest.raises(InvalidInput):
        jms.send(Queue("no topic of Kafka: ä"), "one")
    assert connection.sent == []
