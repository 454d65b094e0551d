"""The Python client in the same cases against Bascule and Apache Artemis. Differences between the brokers are stated where they occur."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest

from bascule.client import (
    Acknowledge,
    Byte,
    Float,
    IllegalState,
    InvalidSelector,
    Long,
    Message,
    Queue,
    Refused,
    Short,
    Topic,
)
from tests.interop.both_brokers import Connect, artemis, bodies, connect, nothing_in, queue, url
from tests.support.client import SOON_S, all_bodies
from tests.support.system import wait_for

__all__ = ["artemis", "connect", "queue", "url"]  # fixtures

#: Time in which a waiting call must not end.
WAITS_S = 0.3


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text", "Grüße, 世界 😀"),
        ("text", ""),
        ("bytes", bytes(range(256))),
        ("map", {"text": "a", "int": 1, "long": 1 << 40, "double": 1.5, "truth": True, "bytes": b"\x00\xff", "none": None}),
        ("stream", ["a", 1, 2.5, False, b"x", None]),
        ("object", bytes.fromhex("aced0005740005" + b"hello".hex())),
        ("message", None),
    ],
    ids=["text", "empty", "bytes", "map", "stream", "object", "message"],
)
def test_body_of_every_kind_arrives_unchanged_at_the_python_client(connect: Connect, queue: Queue, kind: str, body: Any) -> None:
    context = connect()
    context.send(queue, Message(body, kind=kind))
    with context.consumer(queue) as consumer:
        received = consumer.receive(SOON_S)
    assert received is not None
    assert (received.kind, received.body) == (kind, body)


def test_headers_and_properties_arrive_with_their_types(connect: Connect, queue: Queue) -> None:
    properties = {
        "text": "a", "truth": True, "int": 5, "large": 1 << 40, "long": Long(5), "short": Short(3), "byte": Byte(-1), "double": 0.1,
        "float": Float(0.5),
    }  # fmt: skip
    context = connect()
    sent = context.producer(queue, priority=7, time_to_live_s=3600).send(
        Message(
            "x", properties=properties, correlation_id="c-1", reply_to=Topic("answers"), type="order", group_id="g", group_sequence=3
        )
    )  # fmt: skip
    with context.consumer(queue) as consumer:
        got = consumer.receive(SOON_S)
    assert got is not None
    assert got.properties == properties
    assert {name: type(value).__name__ for name, value in got.properties.items()} == {
        "text": "str", "truth": "bool", "int": "Int", "large": "Long", "long": "Long", "short": "Short", "byte": "Byte", "double": "float",
        "float": "Float",
    }  # fmt: skip
    for field in ("message_id", "correlation_id", "reply_to", "type", "group_id", "group_sequence", "persistent", "priority"):
        assert getattr(got, field) == getattr(sent, field), field
    assert (got.destination, got.timestamp_ms, got.expiration_ms) == (queue, sent.timestamp_ms, sent.timestamp_ms + 3_600_000)
    assert (got.redelivered, got.delivery_count) == (False, 1)


def test_a_large_message_arrives(connect: Connect, queue: Queue) -> None:
    context = connect()
    context.send(queue, b"x" * 2_000_000)
    with context.consumer(queue) as consumer:
        received = consumer.receive(SOON_S)
    assert received is not None
    assert received.body == b"x" * 2_000_000


def test_messages_of_higher_priority_are_delivered_first(connect: Connect, queue: Queue) -> None:
    context = connect()
    context.producer(queue).send_many(Message(str(priority), priority=priority) for priority in (0, 4, 9, 4))
    assert bodies(context, queue, 4) == ["9", "4", "4", "0"]


def test_an_expired_message_is_not_delivered(connect: Connect, queue: Queue) -> None:
    context = connect()
    context.producer(queue, time_to_live_s=0.001).send("short")
    context.producer(queue).send("long")
    wait_for(lambda: time.sleep(0.05) is None, "the life of a message to be over")
    assert bodies(context, queue, 1) == ["long"]
    assert nothing_in(context, queue)


def test_forwarded_message_keeps_its_types_and_gets_a_new_id(connect: Connect, queue: Queue, name: str) -> None:
    context = connect()
    first = context.send(queue, Message({"n": Long(1)}, properties={"l": Long(2), "i": 2}))
    first_id = first.message_id
    received = context.consumer(queue).receive(SOON_S)
    assert received is not None
    assert context.send(Queue(f"{name}.on"), received).message_id != first_id
    again = context.consumer(Queue(f"{name}.on")).receive(SOON_S)
    assert again is not None
    assert (again.body, again.properties) == ({"n": 1}, {"l": 2, "i": 2})
    assert (type(again.body["n"]), type(again.properties["l"]), type(again.properties["i"]).__name__) == (Long, Long, "Int")


def test_delivery_delay_is_observed_or_refused(connect: Connect, queue: Queue) -> None:
    context = connect()
    if "DELAYED_DELIVERY" not in context._thread.core.offered:
        with pytest.raises(Refused, match="does not support delivery delay"):
            context.producer(queue, delivery_delay_s=0.5).send("later")
        return
    sent = context.producer(queue, delivery_delay_s=0.5).send("later")
    with context.consumer(queue) as consumer:
        received = consumer.receive(SOON_S)
    assert received is not None
    assert time.time() * 1000 >= sent.delivery_time_ms == received.delivery_time_ms


def test_send_many_keeps_the_order_of_the_messages(connect: Connect, queue: Queue) -> None:
    context = connect()
    assert context.producer(queue).send_many(map(str, range(2_500))) == 2_500
    assert bodies(context, queue, 2_500) == list(map(str, range(2_500)))


def test_async_sends_complete_and_close_waits_for_their_completion(connect: Connect, queue: Queue) -> None:
    context = connect()
    futures = [context.producer(queue).send_async(str(number)) for number in range(50)]
    context.close()
    assert [future.result(SOON_S).body for future in futures] == list(map(str, range(50)))
    assert bodies(connect(), queue, 50) == list(map(str, range(50)))


def test_producer_without_destination_sends_to_the_destination_of_each_call(connect: Connect, name: str) -> None:
    context = connect()
    producer = context.producer()
    names = [Queue(f"{name}.{number}") for number in range(40)]  # longer than links are kept
    for each in names:
        producer.send(each.name, to=each)
    assert [bodies(context, each, 1) for each in names] == [[each.name] for each in names]


def test_receive_no_wait_asks_the_broker(connect: Connect, queue: Queue) -> None:
    context = connect()
    with context.consumer(queue) as consumer:
        assert consumer.receive_no_wait() is None
        context.send(queue, "a")
        received = consumer.receive_no_wait()
        assert received is not None
        assert received.body == "a"
        assert consumer.receive_no_wait() is None
        context.send(queue, "b")
        assert consumer.receive(SOON_S) is not None


@pytest.mark.parametrize("prefetch", [0, 1, 10])
def test_small_prefetch_leaves_messages_to_other_consumers(connect: Connect, queue: Queue, prefetch: int) -> None:
    context = connect()
    context.producer(queue).send_many(map(str, range(40)))
    with context.consumer(queue, prefetch=prefetch) as slow:
        first = slow.receive(SOON_S)
        assert first is not None
        assert first.body == "0"
        with connect().consumer(queue) as other:
            rest = [message.body for message in iter(other.receive_no_wait, None)]
        assert len(rest) >= 40 - 1 - 2 * prefetch
        mine = [message.body for message in iter(slow.receive_no_wait, None)]
    assert sorted([first.body, *rest, *mine], key=int) == list(map(str, range(40)))


def test_selector_filters_messages_and_invalid_selector_is_refused(connect: Connect, queue: Queue) -> None:
    context = connect()
    context.producer(queue).send_many(Message(region, properties={"region": region}) for region in ("EU", "US", "EU"))
    with context.consumer(queue, selector="region = 'US'") as consumer:
        assert all_bodies(consumer, 1) == ["US"]
    assert bodies(context, queue, 2) == ["EU", "EU"]
    with pytest.raises(InvalidSelector):
        context.consumer(queue, selector="region = = 'US'")


def test_browser_of_the_python_client_shows_waiting_messages_and_removes_none(connect: Connect, queue: Queue) -> None:
    context = connect()
    context.producer(queue).send_many(Message(str(number), properties={"n": number}) for number in range(250))
    assert [message.body for message in context.browse(queue)] == list(map(str, range(250)))
    assert [message.body for message in context.browse(queue, selector="n > 247")] == ["248", "249"]
    assert bodies(context, queue, 250) == list(map(str, range(250)))


def test_closed_consumer_returns_its_prefetched_messages_in_order(connect: Connect, queue: Queue) -> None:
    context = connect()
    context.producer(queue).send_many(map(str, range(10)))
    with context.consumer(queue) as consumer:
        first = consumer.receive(SOON_S)
        assert first is not None
        assert first.body == "0"
    assert bodies(context, queue, 9) == list(map(str, range(1, 10)))


def test_listeners_of_a_context_share_one_thread_and_stop_with_the_context(connect: Connect, name: str) -> None:
    context, sender = connect(), connect()
    seen: list[Any] = []
    threads: set[str] = set()

    def listener(message: Message) -> None:
        threads.add(threading.current_thread().name)
        seen.append(message.body)

    for number in range(2):
        context.consumer(Queue(f"{name}.{number}")).listener = listener
        sender.producer(Queue(f"{name}.{number}")).send_many(f"{number}.{each}" for each in range(20))
    wait_for(lambda: len(seen) == 40, "40 messages")
    assert len(threads) == 1
    context.stop()
    sender.send(Queue(f"{name}.0"), "late")
    assert not [each for each in seen if each == "late"]
    context.start()
    wait_for(lambda: seen[-1] == "late", "the message after the start")


def test_message_is_redelivered_and_marked_after_its_listener_raised(
    connect: Connect, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[bool, int]] = []

    def listener(message: Message) -> None:
        seen.append((message.redelivered, message.delivery_count))
        if len(seen) == 1:
            raise ValueError("the first time")

    caplog.set_level("CRITICAL", "bascule")
    context = connect()
    context.consumer(queue).listener = listener
    connect().send(queue, "x")
    wait_for(lambda: len(seen) == 2, "the second delivery")
    assert seen == [(False, 1), (True, 2)]


@pytest.mark.parametrize("end", ["close", "stop"])
@pytest.mark.parametrize("mode", [Acknowledge.AUTO, Acknowledge.CLIENT, Acknowledge.DUPS_OK, Acknowledge.TRANSACTED])
def test_close_or_stop_waits_for_the_running_listener_which_can_still_use_its_context(
    connect: Connect, queue: Queue, name: str, mode: Acknowledge, end: str
) -> None:
    done, service = Queue(f"{name}.done"), Queue(f"{name}.service")
    context, answering, other = connect(mode), connect(), connect()
    ended = threading.Event()
    ending = threading.Thread(target=lambda: (getattr(context, end)(), ended.set()))

    def listener(message: Message) -> None:
        ending.start()
        assert not ended.wait(WAITS_S)
        if mode is Acknowledge.TRANSACTED:
            context.send(done, message.body)
            context.commit()
        else:
            context.send(done, context.request(service, message.body, timeout_s=SOON_S).body)
            message.acknowledge()

    answering.consumer(service).listener = lambda request: answering.reply(request, request.body)
    other.producer(queue).send_many(["first", "second"])
    context.consumer(queue).listener = listener
    assert ended.wait(SOON_S)
    context.close()
    assert bodies(other, done, 1) == ["first"]
    assert bodies(other, queue, 1) == ["second"]
    assert nothing_in(other, queue)


def test_a_receive_in_another_thread_ends_when_its_consumer_is_closed(connect: Connect, queue: Queue) -> None:
    consumer = connect().consumer(queue)
    received: list[Any] = ["nothing yet"]

    def receive() -> None:
        received[0] = consumer.receive(math.inf)

    thread = threading.Thread(target=receive)
    thread.start()
    wait_for(lambda: consumer.state.waiting, "a receive that waits")
    consumer.close()
    thread.join(SOON_S)
    assert received == [None]
    with pytest.raises(IllegalState, match="closed"):
        consumer.receive(0)
