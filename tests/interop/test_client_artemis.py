"""The Python client, the same cases against Bascule and against Apache Artemis: what differs is the broker's, and said where it is."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from bascule.client import (
    Acknowledge,
    Byte,
    ConnectionFactory,
    Context,
    Float,
    IllegalState,
    InvalidClientId,
    InvalidDestination,
    InvalidSelector,
    Long,
    Message,
    Queue,
    Refused,
    Short,
    TemporaryQueue,
    Topic,
    connect_async,
)
from bench.artemis import Artemis
from tests.support.client import all_bodies, all_bodies_async
from tests.support.system import System, wait_for

#: Within this a message that is there arrives.
SOON_S = 30.0
#: For so long nobody is seen to end who waits.
WAITS_S = 0.3
Connect = Callable[..., Context]


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A coroutine as a test, on a loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture(scope="module")
def artemis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artemis]:
    with Artemis(tmp_path_factory.mktemp("artemis") / "broker") as running:
        yield running


@pytest.fixture(params=["bascule", "artemis"])
def url(request: pytest.FixtureRequest) -> str:
    found: System | Artemis = request.getfixturevalue("system" if request.param == "bascule" else "artemis")
    return found.url


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    opened: list[Context] = []

    def connect(acknowledge: Acknowledge = Acknowledge.AUTO, **options: Any) -> Context:
        opened.append(ConnectionFactory(url, **options).connect(acknowledge))
        return opened[-1]

    yield connect
    for context in opened:
        context.close()


@pytest.fixture
def queue(name: str) -> Queue:
    return Queue(name)


@pytest.fixture
def topic(name: str) -> Topic:
    return Topic(name)


def bodies(context: Context, queue: Queue, count: int) -> list[Any]:
    """The next messages of a queue, taken."""
    with context.consumer(queue) as consumer:
        return [message and message.body for message in (consumer.receive(SOON_S) for _ in range(count))]


def nothing_in(context: Context, queue: Queue) -> bool:
    with context.consumer(queue) as consumer:
        return consumer.receive_no_wait() is None


# --- messages --------------------------------------------------------------------------------------------------------------------


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
def test_every_kind_of_body_arrives_as_it_was(connect: Connect, queue: Queue, kind: str, body: Any) -> None:
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


def test_higher_priorities_come_first(connect: Connect, queue: Queue) -> None:
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


def test_a_message_is_sent_on_with_its_types_and_a_new_id(connect: Connect, queue: Queue, name: str) -> None:
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


def test_delivery_delay_is_kept_or_refused(connect: Connect, queue: Queue) -> None:
    context = connect()
    if "DELAYED_DELIVERY" not in context._thread.core.offered:
        with pytest.raises(Refused, match="does not offer delivery delay"):
            context.producer(queue, delivery_delay_s=0.5).send("later")
        return
    sent = context.producer(queue, delivery_delay_s=0.5).send("later")
    with context.consumer(queue) as consumer:
        received = consumer.receive(SOON_S)
    assert received is not None
    assert time.time() * 1000 >= sent.delivery_time_ms == received.delivery_time_ms


# --- sending ---------------------------------------------------------------------------------------------------------------------


def test_many_messages_are_sent_at_once_in_order(connect: Connect, queue: Queue) -> None:
    context = connect()
    assert context.producer(queue).send_many(map(str, range(2_500))) == 2_500
    assert bodies(context, queue, 2_500) == list(map(str, range(2_500)))


def test_async_sends_are_told_when_they_are_done_and_a_close_waits_for_them(connect: Connect, queue: Queue) -> None:
    context = connect()
    futures = [context.producer(queue).send_async(str(number)) for number in range(50)]
    context.close()
    assert [future.result(SOON_S).body for future in futures] == list(map(str, range(50)))
    assert bodies(connect(), queue, 50) == list(map(str, range(50)))


def test_a_producer_without_destination_sends_where_it_is_told(connect: Connect, name: str) -> None:
    context = connect()
    producer = context.producer()
    names = [Queue(f"{name}.{number}") for number in range(40)]  # more than links are kept for
    for each in names:
        producer.send(each.name, to=each)
    assert [bodies(context, each, 1) for each in names] == [[each.name] for each in names]


# --- receiving -------------------------------------------------------------------------------------------------------------------


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
def test_few_messages_ahead_leave_the_rest_to_others(connect: Connect, queue: Queue, prefetch: int) -> None:
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


def test_selectors_choose_and_wrong_ones_are_refused(connect: Connect, queue: Queue) -> None:
    context = connect()
    context.producer(queue).send_many(Message(region, properties={"region": region}) for region in ("EU", "US", "EU"))
    with context.consumer(queue, selector="region = 'US'") as consumer:
        assert all_bodies(consumer, 1) == ["US"]
    assert bodies(context, queue, 2) == ["EU", "EU"]
    with pytest.raises(InvalidSelector):
        context.consumer(queue, selector="region = = 'US'")


def test_a_browser_shows_what_waits_and_takes_nothing(connect: Connect, queue: Queue) -> None:
    context = connect()
    context.producer(queue).send_many(Message(str(number), properties={"n": number}) for number in range(250))
    assert [message.body for message in context.browse(queue)] == list(map(str, range(250)))
    assert [message.body for message in context.browse(queue, selector="n > 247")] == ["248", "249"]
    assert bodies(context, queue, 250) == list(map(str, range(250)))


def test_a_closed_consumer_gives_back_what_it_had_prefetched_in_order(connect: Connect, queue: Queue) -> None:
    context = connect()
    context.producer(queue).send_many(map(str, range(10)))
    with context.consumer(queue) as consumer:
        first = consumer.receive(SOON_S)
        assert first is not None
        assert first.body == "0"
    assert bodies(context, queue, 9) == list(map(str, range(1, 10)))


def test_listeners_take_turns_on_one_thread_and_stop_when_told(connect: Connect, name: str) -> None:
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


def test_a_message_on_which_a_listener_raises_comes_again_marked(connect: Connect, queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
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
def test_a_listener_at_work_has_its_context_until_it_returns_and_its_message_is_done(
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


# --- acknowledging ---------------------------------------------------------------------------------------------------------------


def test_client_acknowledge_covers_all_received_before_and_recover_brings_the_rest_again(connect: Connect, queue: Queue) -> None:
    context = connect(Acknowledge.CLIENT)
    context.producer(queue).send_many(map(str, range(5)))
    with context.consumer(queue) as consumer:
        first, second, third = (consumer.receive(SOON_S) for _ in range(3))
        assert first is not None
        assert second is not None
        assert third is not None
        third.acknowledge()
        fourth = consumer.receive(SOON_S)
        assert fourth is not None
        context.recover()
        again = [consumer.receive(SOON_S) for _ in range(2)]
        assert [(each.body, each.redelivered) for each in again if each] == [("3", True), ("4", False)]
        context.acknowledge()
    assert nothing_in(connect(), queue)


def test_individual_acknowledge_is_for_one_message(connect: Connect, queue: Queue) -> None:
    context = connect(Acknowledge.INDIVIDUAL)
    context.producer(queue).send_many(map(str, range(3)))
    with context.consumer(queue) as consumer:
        received = [consumer.receive(SOON_S) for _ in range(3)]
        assert received[1] is not None
        received[1].acknowledge()
    context.close()
    assert bodies(connect(), queue, 2) == ["0", "2"]


def test_what_a_closed_consumer_received_can_still_be_acknowledged(connect: Connect, queue: Queue) -> None:
    context = connect(Acknowledge.CLIENT)
    context.producer(queue).send_many(["a", "b"])
    consumer = context.consumer(queue)
    assert consumer.receive(SOON_S) is not None
    consumer.close()
    context.acknowledge()
    context.close()
    assert bodies(connect(), queue, 1) == ["b"]


def test_what_was_not_acknowledged_comes_again_and_what_was_lazily_acknowledged_does_not(connect: Connect, queue: Queue) -> None:
    context = connect(Acknowledge.DUPS_OK)
    context.producer(queue).send_many(map(str, range(10)))
    with context.consumer(queue) as consumer:
        for _ in range(5):
            consumer.receive(SOON_S)
    context.close()
    unacknowledging = connect(Acknowledge.CLIENT)
    assert bodies(unacknowledging, queue, 5) == ["5", "6", "7", "8", "9"]
    unacknowledging.close()
    assert bodies(connect(), queue, 5) == ["5", "6", "7", "8", "9"]


# --- transactions ----------------------------------------------------------------------------------------------------------------


def test_a_block_is_whole_or_not_there_in_any_mode(connect: Connect, queue: Queue, name: str) -> None:
    context, target = connect(), Queue(f"{name}.target")
    context.producer(queue).send_many(["a", "b", "c"])

    def transfer(fail: bool) -> None:
        with context.transaction(), context.consumer(queue) as consumer:
            message = consumer.receive(SOON_S)
            assert message is not None
            context.send(target, f"{message.body} {message.delivery_count}")
            if fail:
                raise ZeroDivisionError

    transfer(fail=False)
    with pytest.raises(ZeroDivisionError):
        transfer(fail=True)
    transfer(fail=False)
    assert bodies(context, target, 2) == ["a 1", "b 2"]
    assert nothing_in(context, target)
    assert bodies(context, queue, 1) == ["c"]


def test_a_transacted_context_commits_and_rolls_back_with_order_kept(connect: Connect, queue: Queue) -> None:
    context, other = connect(Acknowledge.TRANSACTED), connect()
    context.producer(queue).send_many(map(str, range(6)))
    assert nothing_in(other, queue)
    context.commit()
    with context.consumer(queue) as consumer:
        received = [consumer.receive(SOON_S) for _ in range(3)]
        context.rollback()
        again = [consumer.receive(SOON_S) for _ in range(6)]
        assert [each.body for each in again if each] == list(map(str, range(6)))
        assert [each.redelivered for each in again if each] == [True] * 3 + [False] * 3
        context.commit()
    assert [each.body for each in received if each] == ["0", "1", "2"]
    assert nothing_in(other, queue)


def test_a_context_that_closes_rolls_back_and_its_neighbour_on_the_connection_does_not(connect: Connect, queue: Queue) -> None:
    first = connect(Acknowledge.TRANSACTED)
    second = first.create_context(Acknowledge.TRANSACTED)
    first.send(queue, "first")
    second.send(queue, "second")
    first.close()
    second.commit()
    second.close()
    context = connect()
    assert bodies(context, queue, 1) == ["second"]
    assert nothing_in(context, queue)


# --- topics and subscriptions ----------------------------------------------------------------------------------------------------


def test_every_subscriber_gets_a_copy_and_no_local_leaves_out_ones_own(connect: Connect, topic: Topic) -> None:
    context, other = connect(), connect()
    with context.consumer(topic) as first, other.consumer(topic) as second, context.consumer(topic, no_local=True) as foreign:
        context.send(topic, "mine")
        other.send(topic, "theirs")
        for consumer in (first, second):
            assert sorted(all_bodies(consumer, 2)) == ["mine", "theirs"]
        assert all_bodies(foreign, 1) == ["theirs"]


def test_a_durable_subscription_gathers_while_nobody_is_there(connect: Connect, topic: Topic, name: str) -> None:
    client_id = f"client.{name}"
    context = connect(client_id=client_id)
    with context.durable_consumer(topic, name) as consumer:
        with pytest.raises(Refused):
            context.unsubscribe(name)
        context.send(topic, "a")
        assert consumer.receive(SOON_S) is not None
    context.close()
    connect().send(topic, "b")
    context = connect(client_id=client_id)
    with pytest.raises(InvalidClientId):
        connect(client_id=client_id)
    with context.durable_consumer(topic, name) as consumer:
        received = consumer.receive(SOON_S)
        assert received is not None
        assert received.body == "b"
    context.unsubscribe(name)
    with pytest.raises(InvalidDestination):
        context.unsubscribe(name)
    with pytest.raises(IllegalState, match="client id"):
        connect().durable_consumer(topic, name)


@pytest.mark.parametrize("client_id", [None, "shared"])
@pytest.mark.parametrize("durable", [False, True])
def test_shared_subscriptions_hand_each_message_to_one(
    connect: Connect, topic: Topic, name: str, client_id: str | None, durable: bool
) -> None:
    context = connect(client_id=client_id and f"{client_id}.{name}")

    def subscribe() -> Any:
        return context.shared_durable_consumer(topic, name) if durable else context.shared_consumer(topic, name)

    with subscribe() as first, subscribe() as second:
        connect().producer(topic).send_many(map(str, range(10)))
        taken = [message.body for consumer in (first, second) for message in iter(consumer.receive_no_wait, None)]
    assert sorted(taken) == list(map(str, range(10)))
    connect().send(topic, "offline")
    with subscribe() as consumer:
        assert all_bodies(consumer, int(durable)) == ["offline"] * durable
    if durable:
        context.unsubscribe(name)


# --- temporary destinations, requests --------------------------------------------------------------------------------------------


def test_a_request_is_answered_over_a_temporary_queue(connect: Connect, queue: Queue) -> None:
    service = connect()

    def answer(message: Message) -> None:
        service.reply(message, f"{message.body}!")

    service.consumer(queue).listener = answer
    context = connect()
    assert [context.request(queue, Message(str(number))).body for number in range(3)] == ["0!", "1!", "2!"]


def test_a_temporary_queue_is_for_its_connection_and_goes_with_it(connect: Connect, queue: Queue) -> None:
    owner, other = connect(), connect()
    temporary = owner.temporary_queue()
    other.send(queue, Message("?", reply_to=temporary))
    request = owner.consumer(queue).receive(SOON_S)
    assert request is not None
    assert isinstance(request.reply_to, TemporaryQueue)
    assert request.reply_to == temporary
    with pytest.raises(InvalidDestination, match="only the one that made it"):
        other.consumer(request.reply_to)
    other.send(request.reply_to, "!")
    consumer = owner.consumer(temporary)
    received = consumer.receive(SOON_S)
    assert received is not None
    with pytest.raises(IllegalState, match="close it first"):
        owner.delete(temporary)
    consumer.close()
    owner.delete(temporary)
    with pytest.raises(InvalidDestination):
        owner.consumer(temporary)


# --- asyncio: the same core, so only its own face ---------------------------------------------------------------------------------


@run_async
async def test_the_asyncio_face_sends_receives_browses_and_asks(url: str, queue: Queue, name: str) -> None:
    async with connect_async(url) as context, connect_async(url) as service:
        assert await context.producer(queue).send_many(map(str, range(300))) == 300
        assert [message.body async for message in context.browse(queue)] == list(map(str, range(300)))
        async with await context.consumer(queue) as consumer:
            assert await all_bodies_async(consumer, 300) == list(map(str, range(300)))
        futures = [await context.producer(queue).send_async(str(number)) for number in range(3)]
        assert [message.body for message in await asyncio.gather(*futures)] == ["0", "1", "2"]

        async def answer(message: Message) -> None:
            await service.reply(message, f"{message.body}!")

        (await service.consumer(Queue(f"{name}.questions"))).listener = answer
        assert (await context.request(Queue(f"{name}.questions"), "what")).body == "what!"


@run_async
async def test_a_transaction_of_the_asyncio_face_is_whole_or_not_there(url: str, queue: Queue) -> None:
    async with connect_async(url) as context:
        async with context.transaction():
            await context.send(queue, "kept")

        async def undone() -> None:
            async with context.transaction():
                await context.send(queue, "undone")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await undone()
        async with await context.consumer(queue) as consumer:
            assert await all_bodies_async(consumer, 1) == ["kept"]


@run_async
async def test_a_receive_that_is_cancelled_takes_no_message(url: str, queue: Queue) -> None:
    async with connect_async(url, acknowledge=Acknowledge.CLIENT) as context:
        consumer = await context.consumer(queue)
        task = asyncio.create_task(consumer.receive(math.inf))
        while not consumer.state.waiting:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await context.send(queue, "x")
        message = await consumer.receive(SOON_S)
        assert message is not None
        message.acknowledge()
