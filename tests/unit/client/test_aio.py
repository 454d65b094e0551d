"""The asyncio API, with a server that has the reactions of each test."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.events import Attached, Discharged, Dispositioned, Flowed, Transferred
from bascule.amqp.events import DeclareReceived as DeclareAsked
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, Declared, Modified
from bascule.client import (
    Acknowledge,
    ConnectionLost,
    IllegalState,
    Message,
    Queue,
    TimedOut,
    TransactionRolledBack,
    connect_async,
)
from bascule.client.message import encode
from bascule.core.errors import BasculeError
from bascule.jms.message import JmsMessage
from tests.support.speed import SLOWNESS
from tests.unit.client.coroutines import QUEUE, cancel_when, run_async
from tests.unit.client.server import BODIES, obliging, server, serving


@run_async
async def test_async_context_sends_receives_and_browses_messages() -> None:
    with server(obliging) as url:
        async with connect_async(url) as context:
            assert await context.producer(QUEUE).send_many(map(str, range(1_200))) == 1_200
            assert (await context.send(QUEUE, "x")).message_id
            async with await context.consumer(QUEUE, prefetch=0) as consumer:  # with a prefetch, a pause would end the iteration
                assert [message.body async for message in consumer.messages(2.0 * SLOWNESS)] == list(BODIES)
            assert [message.body async for message in context.browse(QUEUE)] == list(BODIES)


@run_async
async def test_awaited_async_context_is_closed_explicitly() -> None:
    with server(obliging) as url:
        context = await connect_async(url)
        await context.send(QUEUE, "x")
        await context.close()
        with pytest.raises(IllegalState, match="closed"):
            await context.send(QUEUE, "x")


@run_async
async def test_coroutine_listener_is_supported_and_stop_waits_for_it() -> None:
    bodies: list[Any] = []

    async def listener(message: Message) -> None:
        await asyncio.sleep(0.02)
        bodies.append(message.body)

    with server(obliging) as url:
        async with connect_async(url) as context:
            consumer = await context.consumer(QUEUE)
            consumer.listener = listener
            with pytest.raises(IllegalState, match="listener"):
                await consumer.receive(0)
            while not bodies:
                await asyncio.sleep(0.005)
            await context.stop()
            stopped_at = len(bodies)
            await asyncio.sleep(0.05)
            assert len(bodies) == stopped_at < 3
            context.start()
            while len(bodies) < 3:
                await asyncio.sleep(0.005)
    assert bodies == list(BODIES)


@run_async
async def test_message_is_returned_as_failed_when_listener_raises_cancelled_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcomes: list[Any] = []

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned):
            outcomes.extend([event.state] * len(event.deliveries))
        obliging(connection, event)

    async def listener(message: Message) -> None:
        if message.body == "two":
            helper = asyncio.create_task(asyncio.sleep(10))
            helper.cancel()
            await helper

    with caplog.at_level(logging.CRITICAL, "bascule"), server(react) as url:
        async with connect_async(url) as context:
            (await context.consumer(QUEUE)).listener = listener
            while len(outcomes) < 3:
                await asyncio.sleep(0.005)
    assert outcomes == [ACCEPTED, Modified(delivery_failed=True), ACCEPTED]


@run_async
async def test_several_tasks_share_async_context() -> None:
    with server(obliging) as url:
        async with connect_async(url) as context:
            consumer = await context.consumer(QUEUE)
            first, *rest = await asyncio.gather(consumer.receive(5), *(context.send(Queue(f"q{number}"), "x") for number in range(40)))
            assert first is not None
            assert len(rest) == 40


@run_async
async def test_concurrent_sends_in_transaction_declare_it_once() -> None:
    asked: list[str] = []
    sent: list[bytes | None] = []

    def count(connection: Connection, event: Any) -> None:
        match event:
            case DeclareAsked():
                asked.append("declare")
                event.link.settle(event.delivery_id, Declared(b"txn-%d" % len(asked)))
                return
            case Discharged():
                asked.append("discharge")
            case Transferred():
                sent.append(event.txn_id)
        obliging(connection, event)

    with server(count) as url:
        async with connect_async(url, acknowledge=Acknowledge.TRANSACTED) as context:
            await asyncio.gather(*(context.send(Queue(f"q{number}"), "x") for number in range(5)))
            await context.commit()
    assert asked[:2] == ["declare", "discharge"]
    assert sent == [b"txn-1"] * 5


@run_async
async def test_concurrent_requests_get_their_own_answers_in_any_order() -> None:
    requests: list[JmsMessage] = []

    def answer(link: SenderLink, request: JmsMessage) -> None:
        requests.append(request)
        if len(requests) == 3:
            for each in reversed(requests):
                link.send(encode(Message(each.message_id, correlation_id=each.message_id)))

    with server(serving(answer)) as url:
        async with connect_async(url, timeout_s=10.0) as context:
            asked = [Message("?") for _ in range(3)]
            answers = await asyncio.gather(*(context.request(QUEUE, message) for message in asked))
    assert [message.body for message in answers] == [message.message_id for message in asked]


@run_async
async def test_async_send_raises_timeout_and_connection_lost() -> None:
    def silent(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            if event.payload.endswith(b"cut"):
                raise ConnectionResetError
        else:
            obliging(connection, event)

    with server(silent) as url:
        async with connect_async(url, timeout_s=5.0) as context:
            with pytest.raises(TimedOut, match="may or may not be stored"):
                await context.send(QUEUE, "x", timeout_s=1.0)
            with pytest.raises(ConnectionLost):
                await context.send(QUEUE, "cut")


@run_async
async def test_async_context_refuses_use_from_other_event_loop() -> None:
    with server(obliging) as url:
        async with connect_async(url) as context:
            with pytest.raises(IllegalState, match="another event loop"):
                await asyncio.to_thread(asyncio.run, context.send(QUEUE, "x"))


@run_async
async def test_listeners_continue_in_next_transaction_after_connection_loss() -> None:
    bodies: list[Any] = []
    errors: list[BasculeError] = []

    def cut(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned):
            raise ConnectionResetError
        obliging(connection, event)
        if isinstance(event, Attached) and isinstance(event.link, SenderLink):
            event.link.context = iter([encode(Message(BODIES[0]))])

    with server(cut, obliging) as url:
        async with connect_async(f"failover:({url})", acknowledge=Acknowledge.TRANSACTED, on_exception=errors.append) as context:
            done = asyncio.Event()

            async def listener(message: Message) -> None:
                bodies.append(message.body)
                if message.body == BODIES[-1]:
                    await context.commit()
                    done.set()

            (await context.consumer(QUEUE)).listener = listener
            await asyncio.wait_for(done.wait(), 10)
    assert bodies == [BODIES[0], *BODIES]
    assert list(map(type, errors)) == [TransactionRolledBack]


class SendsOnDemand:
    """A broker that sends messages when the test tells it to. ``events`` has the consumers' credit and their outcomes of messages."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def __call__(self, connection: Connection, event: Any) -> None:
        match event:
            case Flowed() if isinstance(event.link, SenderLink):
                self.note(f"{'drain' if event.link.drain else 'credit'} {event.link.credit}")
                if event.link.drain:  # a message that was on its way
                    event.link.send(encode(Message("late")))
            case Dispositioned():
                self.note(type(event.state).__name__.lower())
            case _:
                obliging(connection, event)

    def note(self, what: str) -> None:
        self.events.append(what)
        self.loop.call_soon_threadsafe(self.changed.set)


@run_async
async def test_cancelled_receive_without_prefetch_releases_its_message() -> None:
    broker = SendsOnDemand()
    with server(broker) as url:
        async with connect_async(url, prefetch=0, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            await cancel_when(consumer.receive(10), broker.changed)
            while len(broker.events) < 3:
                broker.changed.clear()
                await asyncio.wait_for(broker.changed.wait(), 10)
    assert broker.events == ["credit 1", "drain 1", "released"]


@run_async
async def test_receive_drains_broker_before_it_returns_none() -> None:
    broker = SendsOnDemand()
    with server(broker) as url:
        async with connect_async(url, prefetch=1, timeout_s=10.0) as context:
            message = await (await context.consumer(QUEUE)).receive(0.01)
            assert message is not None
            assert message.body == "late"
    assert broker.events[:2] == ["credit 1", "drain 1"]


@run_async
async def test_concurrent_receives_without_prefetch_each_get_message() -> None:
    with server(obliging) as url:
        async with connect_async(url, prefetch=0, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            messages = await asyncio.gather(consumer.receive(10), consumer.receive(10))
    assert [message and message.body for message in messages] == ["one", "two"]
