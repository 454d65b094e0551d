"""A JMS message arrives with the content that was sent; a message that is too large or expired does not arrive."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.interop.conftest import MAX_MESSAGE_BYTES, Connect
from tests.support.qpid import JmsError, MessageType, Received, Session
from tests.support.system import System, wait_for

EVERY_TYPE: dict[str, Any] = {
    "a_boolean": True,
    "a_byte": ["byte", -7],
    "a_short": ["short", 300],
    "an_int": 70_000,
    "a_long": ["long", 1 << 40],
    "a_float": ["float", 1.5],
    "a_double": 2.25,
    "a_string": "größer → ∞",
}


def received(session: Session, queue: str) -> Received:
    message = session.consumer(queue).receive()
    assert message is not None
    return message


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text", "grüße\n" * 3),
        ("text", ""),
        ("bytes", bytes(range(256))),
        ("map", {"n": 1, "s": "two", "b": b"\x00\xff", "none": None}),
        ("stream", [1, "two", b"\x03", 4.5, True]),
        ("object", "serialized"),
        ("message", None),
    ],
)
def test_body_of_every_jms_type_arrives_unchanged(connect: Connect, queue: str, kind: MessageType, body: Any) -> None:
    connection = connect()
    connection.session().producer(queue).send(body, type=kind)
    message = received(connection.session(), queue)
    assert (message.type, message.body) == (kind, body)


def test_headers_and_properties_of_every_type_arrive(connect: Connect, queue: str) -> None:
    connection = connect()
    before_ms = int(time.time() * 1000)
    message_id = connection.session().producer(queue).send(
        "x", properties=EVERY_TYPE, correlation_id="c-1", jms_type="flight", reply_to="topic:answers", priority=7, ttl_ms=60_000
    )  # fmt: skip
    message = received(connection.session(), queue)
    assert {name: message.properties[name] for name in EVERY_TYPE} == {
        name: value[1] if isinstance(value, list) else value for name, value in EVERY_TYPE.items()
    }
    assert {name: message.types[name] for name in EVERY_TYPE} == {
        "a_boolean": "boolean", "a_byte": "byte", "a_short": "short", "an_int": "int", "a_long": "long", "a_float": "float",
        "a_double": "double", "a_string": "string",
    }  # fmt: skip
    assert (message.message_id, message.correlation_id, message.jms_type) == (message_id, "c-1", "flight")
    assert (message.destination, message.reply_to) == (queue, "topic:answers")
    assert (message.persistent, message.priority, message.redelivered, message.delivery_count) == (True, 7, False, 1)
    assert before_ms <= message.timestamp_ms <= int(time.time() * 1000)
    assert message.expiration_ms == message.timestamp_ms + 60_000


def test_receiver_sees_the_non_persistent_delivery_mode(connect: Connect, queue: str) -> None:
    connection = connect()
    connection.session().producer(queue).send("x", persistent=False)
    assert not received(connection.session(), queue).persistent


def test_message_of_many_frames_arrives_complete(connect: Connect, queue: str) -> None:
    connection = connect()
    large = bytes(range(256)) * (8 << 10)  # 2 MiB: more than thirty frames
    connection.session().producer(queue).send(large)
    connection.session().producer(queue).send("behind it")
    consumer = connection.session().consumer(queue)
    first, second = consumer.receive_many(2)
    assert first.body == large
    assert second.body == "behind it"


def test_message_larger_than_the_limit_is_refused_and_other_sends_succeed(connect: Connect, system: System, name: str, queue: str) -> None:
    connection, other = connect(), connect()
    producer = connection.session().producer(queue)
    with pytest.raises(JmsError, match=str(MAX_MESSAGE_BYTES)) as refused:
        producer.send(bytes(MAX_MESSAGE_BYTES))
    assert "amqp:link:message-size-exceeded" in " ".join([refused.value.message, *refused.value.linked])
    other.session().producer(queue).send("fits")
    assert [message.body for message in other.session().browse(queue)] == ["fits"]
    connection.session().producer(queue).send("fits, too")
    system.wait_depth(name, 2)


def test_message_with_elapsed_time_to_live_is_not_delivered(connect: Connect, system: System, name: str, queue: str) -> None:
    connection = connect()
    producer = connection.session().producer(queue)
    producer.send("short-lived", ttl_ms=50)
    producer.send("lasting")
    deadline = time.monotonic() + 0.1
    wait_for(lambda: time.monotonic() > deadline, "its end")
    messages = connection.session().consumer(queue).receive_all(1)
    assert [message.body for message in messages] == ["lasting"]
    system.wait_depth(name, 0)


def test_sends_with_a_completion_listener_are_completed_in_order(connect: Connect, system: System, name: str, queue: str) -> None:
    producer = connect().session().producer(queue)
    producer.send_async("{n}", count=500)
    completions = producer.completions(500)
    assert [completion["n"] for completion in completions] == list(range(500))
    assert not any("error" in completion for completion in completions)
    system.wait_depth(name, 500)


def test_anonymous_producer_sends_to_the_destination_of_each_message(connect: Connect, name: str) -> None:
    connection = connect()
    topic = connection.session().consumer(f"topic:{name}.news")
    anonymous = connection.session().producer()
    for number in range(3):
        anonymous.send(str(number), to=f"queue:{name}.{number}")
    anonymous.send("all", to=f"topic:{name}.news")
    for number in range(3):
        assert received(connection.session(), f"queue:{name}.{number}").body == str(number)
    assert [message.body for message in topic.receive_many(1)] == ["all"]
