"""JMS messages that a Kafka connection sends: their records, and the outcomes of the sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from bascule.adapter.outbound.jms import JmsSession
from bascule.client import Context, IllegalState, MessageRefused, Producer, TimedOut
from bascule.client.destination import Queue
from bascule.client.message import Message
from bascule.core.errors import BasculeError, InvalidInput, TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing
from tests.unit.client.test_faces import public, signature


class Connection:
    """A connection that keeps its records. ``answer`` decides when and how a send is answered."""

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []
        self.flushes: list[float | None] = []
        self.answer: Callable[[Callable[[BaseException | None], None]], None] = lambda told: told(None)

    def send_record(self, record: Outgoing, answered: Callable[[BaseException | None], None]) -> None:
        self.sent.append(record)
        self.answer(answered)

    def flush(self, timeout_s: float | None) -> None:
        self.flushes.append(timeout_s)


def session(key: str = "message-id", topic: str = "") -> tuple[JmsSession, Connection]:
    connection = Connection()
    return JmsSession(cast("Any", connection), key, topic or "jms.${address}"), connection


def test_jms_message_becomes_record_of_template_topic_with_message_id_as_key() -> None:
    jms, connection = session()
    message = jms.producer(Queue("orders")).send("one")
    (record,) = connection.sent
    assert message.message_id is not None
    assert message.message_id.startswith("ID:")
    assert (record.topic, record.key, record.value) == ("jms.orders", message.message_id.encode(), b"one")
    assert all(isinstance(value, bytes | None) for _, value in record.headers)
    assert record.timestamp_ms > 0


def test_property_is_record_key_and_send_options_are_headers() -> None:
    jms, connection = session("property:customer")
    jms.producer(Queue("orders"), priority=7).send(Message("one", properties={"customer": "acme"}))
    (record,) = connection.sent
    assert record.key == b"acme"
    assert b"7" in [value for name, value in record.headers if "priority" in name.lower()]


def test_message_without_valid_topic_is_refused() -> None:
    jms, connection = session(topic="${address}")
    with pytest.raises(InvalidInput):
        jms.send(Queue("no topic of Kafka: ä"), "one")
    assert connection.sent == []


def test_reply_is_record_of_reply_to_topic_with_correlation_id() -> None:
    jms, connection = session()
    answer = jms.reply(Message("?", message_id="ID:1", reply_to=Queue("answers")), "!")
    assert (connection.sent[0].topic, answer.correlation_id) == ("jms.answers", "ID:1")


def test_repeated_message_keeps_its_message_id() -> None:
    jms, _ = session()
    producer = jms.producer(Queue("orders"))
    message = producer.send("one")
    before = message.message_id
    assert producer.repeat(message).message_id == before


@pytest.mark.parametrize(
    ("failure", "told"),
    [(TooLarge("too large"), MessageRefused), (Unavailable("away"), Unavailable), (ValueError("odd"), Unavailable)],
)
def test_failed_record_is_reported_to_every_kind_of_send(failure: Exception, told: type[BasculeError]) -> None:
    jms, connection = session()
    connection.answer = lambda answered: answered(failure)
    producer = jms.producer(Queue("orders"))
    errors: list[BasculeError | None] = []
    with pytest.raises(told, match=str(failure)):
        producer.send("one")
    with pytest.raises(told, match=str(failure)):
        producer.send_many(["one", "two"])
    with pytest.raises(told, match=str(failure)):
        producer.send_async("one", on_done=lambda _, error: errors.append(error)).result(0)
    assert [type(error) for error in errors] == [told]
    assert connection.flushes == [None]
    assert len(connection.sent) == 3


def test_record_refused_in_transaction_raises_message_refused() -> None:
    jms, connection = session()

    def refuse(_: object) -> None:
        raise TooLarge("too large")

    connection.answer = refuse
    with pytest.raises(MessageRefused, match="too large"):
        jms.send(Queue("orders"), "one")


def test_send_waits_for_its_record_and_async_send_completes_later(caplog: pytest.LogCaptureFixture) -> None:
    jms, connection = session()
    waiting: list[Callable[[BaseException | None], None]] = []
    connection.answer = waiting.append
    producer = jms.producer(Queue("orders"))
    with pytest.raises(TimedOut, match="the record may or may not be stored"):
        producer.send("one", timeout_s=0.01)

    def on_done(_: Message, error: BasculeError | None) -> None:
        raise LookupError("of the application")

    future = producer.send_async("two", on_done=on_done)
    assert not future.done()
    for answered in waiting:
        answered(None)
    assert future.result(0).body == "two"
    assert "of the application" in caplog.text


def test_kafka_session_has_client_send_signatures_and_refuses_receive() -> None:
    here, there = public(JmsSession), public(Context)
    assert set(here) < set(there)
    assert {name: signature(method) for name, method in here.items()} == {name: signature(there[name]) for name in here}
    jms, _ = session()
    assert type(jms.producer()) is Producer
    for name in set(here) - {"producer", "send", "reply"}:
        with pytest.raises(IllegalState, match=rf"{name}\(\) is refused: a connection to Kafka cannot receive"):
            getattr(jms, name)(Queue("orders"))
