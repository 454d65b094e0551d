"""Cancelled tasks and closing contexts of the asyncio API, with a server that has the reactions of each test."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.events import DeclareReceived as DeclareAsked
from bascule.amqp.events import Detached, Discharged, Dispositioned, Flowed, Transferred
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, RELEASED, Declared, TransactionalState
from bascule.client import (
    Acknowledge,
    ConnectionLost,
    IllegalState,
    InvalidDestination,
    Message,
    Queue,
    TimedOut,
    connect_async,
    sends,
)
from bascule.client.message import encode
from bascule.core.errors import BasculeError
from tests.unit.client.coroutines import QUEUE, cancel_when, run_async
from tests.unit.client.server import BODIES, ending_the_first_consumer, obliging, server


class PartlySilent:
    """Reacts like ``obliging``, but does not answer sends in a transaction until a coordinator link ends, nor drains unless ``drains``."""

    def __init__(self, *, drains: bool = True) -> None:
        self.drains = drains
        self.asked = asyncio.Event()  # set when a request stays unanswered
        self.ended: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._unanswered: list[Transferred] = []
        self._draining: list[SenderLink] = []
        self._transactions = 0

    def __call__(self, connection: Connection, event: Any) -> None:
        match event:
            case DeclareAsked():
                self._transactions += 1
                event.link.settle(event.delivery_id, Declared(b"txn-%d" % self._transactions))
            case Discharged():
                self.ended.append(f"{event.txn_id.decode()} {'rolled back' if event.fail else 'committed'}")
                obliging(connection, event)
            case Transferred() if event.txn_id == b"txn-1":
                self._unanswered.append(event)
                self._loop.call_soon_threadsafe(self.asked.set)
            case Flowed() if event.link.drain and not self.drains:
                self._draining.append(event.link)
                self._loop.call_soon_threadsafe(self.asked.set)
            case Detached() if getattr(event.link, "is_coordinator", False):
                self.ended.append("link")
                self.drains = True
                for each in self._unanswered:
                    each.link.settle(each.delivery_id, TransactionalState(b"txn-1", ACCEPTED))
                for link in self._draining:
                    link.context = iter([encode(Message("again"))])
                    link.drained()
            case _:
                obliging(connection, event)


@run_async
async def test_transaction_block_with_cancelled_commit_is_rolled_back_and_next_block_commits() -> None:
    broker = PartlySilent()

    async def work() -> None:
        async with context.transaction():
            await context.send(QUEUE, "x")  # the commit waits for its answer

    with server(broker) as url:
        async with connect_async(url, timeout_s=10.0) as context:
            await cancel_when(work(), broker.asked)
            await work()
    assert broker.ended[:2] == ["link", "txn-2 committed"]


@run_async
async def test_cancelled_rollback_is_completed_and_consumers_continue() -> None:
    broker = PartlySilent(drains=False)
    with server(broker) as url:
        async with connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            assert await consumer.receive(10)
            await cancel_when(context.rollback(), broker.asked)
            assert [message and message.body for message in [await consumer.receive(10) for _ in range(3)]] == ["two", "three", "again"]
            await context.commit()
    assert broker.ended[:2] == ["link", "txn-2 committed"]


class LateDrain:
    """A broker that answers the first drain late, with the next disposition."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._late: SenderLink | None = None

    def __call__(self, connection: Connection, event: Any) -> None:
        match event:
            case Flowed() if event.link.drain and not self.asked.is_set():
                self._late = event.link
                self._loop.call_soon_threadsafe(self.asked.set)
            case Dispositioned() if self._late is not None:
                self._late.drained()
                self._late.context, self._late = iter([encode(Message("new"))]), None
            case _:
                obliging(connection, event)


@run_async
async def test_consumers_continue_after_cancelled_recover() -> None:
    broker = LateDrain()
    with server(broker) as url:
        async with connect_async(url, acknowledge=Acknowledge.CLIENT, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            first = await consumer.receive(10)
            assert first is not None
            await cancel_when(context.recover(), broker.asked)
            first.acknowledge()
            assert [message and message.body for message in [await consumer.receive(10) for _ in range(3)]] == ["two", "three", "new"]


@run_async
async def test_consumer_with_cancelled_close_is_closed_after_last_acknowledgement() -> None:
    broker = LateDrain()
    ended: list[str] = []

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Detached):
            ended.append(type(event.link).__name__)
        elif isinstance(event, Dispositioned):
            ended.append(type(event.state).__name__)
        broker(connection, event)

    with server(react) as url:
        async with connect_async(url, acknowledge=Acknowledge.CLIENT, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            first = await consumer.receive(10)
            assert first is not None
            await cancel_when(consumer.close(), broker.asked)
            with pytest.raises(IllegalState, match="the consumer is closed"):
                await consumer.receive(10)
            first.acknowledge()
            while "SenderLink" not in ended:
                await asyncio.sleep(0.005)
    assert ended == ["Released", "Accepted", "SenderLink"]


@run_async
async def test_cancelled_close_raises_and_context_is_closed() -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def silent(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            loop.call_soon_threadsafe(asked.set)
        else:
            obliging(connection, event)

    sends: list[asyncio.Future[Message]] = []

    async def work() -> None:
        sends.append(await context.producer(QUEUE).send_async("x"))
        await context.close()  # waits for the answer to the send

    with server(silent) as url:
        context = await connect_async(url, timeout_s=10.0)
        await cancel_when(work(), asked)
        with pytest.raises(IllegalState, match="closed"):
            await context.send(QUEUE, "x")
        with pytest.raises(ConnectionLost):
            await sends[0]


@run_async
async def test_consumer_ended_by_broker_is_reported_to_on_exception_and_receive() -> None:
    told: asyncio.Future[BasculeError] = asyncio.get_running_loop().create_future()
    with server(ending_the_first_consumer("amqp:resource-deleted"), ending_the_first_consumer("amqp:resource-deleted")) as url:
        async with connect_async(url, on_exception=told.set_result) as context:
            consumer = await context.consumer(QUEUE, prefetch=0)
            consumer.listener = print
            assert isinstance(await asyncio.wait_for(told, 10), InvalidDestination)
        async with connect_async(url) as context:
            consumer = await context.consumer(QUEUE, prefetch=0)
            with pytest.raises(InvalidDestination, match="queue 'q' has been deleted"):
                await consumer.receive()


class SlowBegin:
    """A broker that begins a transaction only when the test releases it."""

    def __init__(self) -> None:
        self.asked, self.released = asyncio.Event(), threading.Event()
        self.begun = self.ended = 0
        self._loop = asyncio.get_running_loop()

    def __call__(self, connection: Connection, event: Any) -> None:
        self.ended += isinstance(event, Discharged)
        if isinstance(event, DeclareAsked):
            self.begun += 1
            self._loop.call_soon_threadsafe(self.asked.set)
            assert self.released.wait(10)
        obliging(connection, event)


@run_async
async def test_stop_during_transaction_begin_keeps_message_until_start() -> None:
    broker = SlowBegin()
    bodies: list[Any] = []
    with server(broker) as url:
        async with connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=10.0) as context:
            (await context.consumer(QUEUE)).listener = lambda message: bodies.append(message.body)
            await asyncio.wait_for(broker.asked.wait(), 10)
            await context.stop()
            broker.released.set()
            await context.send(Queue("another"), "x")  # the broker answers the attach of this producer after the message
            assert bodies == []
            context.start()
            while bodies != list(BODIES):
                await asyncio.sleep(0.005)


@run_async
async def test_consumer_keeps_message_when_listener_is_removed_during_transaction_begin() -> None:
    broker = SlowBegin()
    with server(broker) as url:
        async with connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            consumer.listener = print
            await asyncio.wait_for(broker.asked.wait(), 10)
            consumer.listener = None
            broker.released.set()
            assert [message and message.body for message in [await consumer.receive(10) for _ in BODIES]] == list(BODIES)


@run_async
async def test_transaction_with_cancelled_begin_is_used_by_next_send_and_not_leaked() -> None:
    broker = SlowBegin()
    with server(broker) as url:
        async with connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=10.0) as context:
            await cancel_when(context.send(QUEUE, "x"), broker.asked)
            await context.rollback()
            broker.released.set()
            for _ in range(2):
                await context.send(QUEUE, "y")
                await context.commit()
    assert (broker.begun, broker.ended) == (2, 2)


@run_async
async def test_cancelled_listener_task_ends_listener() -> None:
    at_work = asyncio.Event()
    seen: list[Any] = []

    async def listener(message: Message) -> None:
        seen.append(message.body)
        at_work.set()
        await asyncio.sleep(10)

    with server(obliging) as url:
        context = await connect_async(url, timeout_s=10.0)
        (await context.consumer(QUEUE)).listener = listener
        await asyncio.wait_for(at_work.wait(), 10)
        assert context._listener_task is not None
        context._listener_task.cancel()
        await context.close()  # waits for the listener's task
        assert context._task._task.done()
    assert seen == [BODIES[0]]


@run_async
async def test_close_waits_for_running_listener_which_can_use_context_until_end() -> None:
    happened: list[str] = []
    outcomes: list[Any] = []
    closing: list[asyncio.Task[None]] = []
    at_work = asyncio.Event()

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned):
            outcomes.extend([event.state] * len(event.deliveries))
        obliging(connection, event)

    async def close() -> None:
        await context.close()
        happened.append("closed")

    async def listener(message: Message) -> None:
        with pytest.raises(IllegalState, match="waits for it"):
            await context.close()
        closing.append(asyncio.create_task(close()))
        await asyncio.wait(closing, timeout=0.2)  # the close must not end yet
        await context.send(QUEUE, message.body)
        happened.append("sent")
        at_work.set()

    with server(react) as url:
        context = await connect_async(url, timeout_s=10.0)
        (await context.consumer(QUEUE)).listener = listener
        await asyncio.wait_for(at_work.wait(), 10)
        await asyncio.wait_for(closing[0], 10)
    assert happened == ["sent", "closed"]
    assert outcomes == [ACCEPTED, RELEASED, RELEASED]  # messages that the application has not seen are released


@run_async
async def test_close_stop_and_consumer_close_wait_for_listener_up_to_timeout() -> None:
    at_work, enough = asyncio.Event(), asyncio.Event()

    async def listener(_: Message) -> None:
        at_work.set()
        await enough.wait()
        with pytest.raises(IllegalState, match="closed"):
            await context.send(QUEUE, "x")

    with server(obliging) as url:
        context = await connect_async(url, timeout_s=10.0)
        consumer = await context.consumer(QUEUE)
        consumer.listener = listener
        await asyncio.wait_for(at_work.wait(), 10)
        for close in (context.stop, consumer.close, context.close):
            with pytest.raises(TimedOut, match="a listener is still running"):
                await asyncio.wait_for(close(timeout_s=0.1), 20)
        assert context._task._task.done()
        enough.set()
        assert context._listener_task is not None
        await asyncio.wait_for(context._listener_task, 10)


@run_async
async def test_send_future_fails_when_context_closes_without_answer() -> None:
    def silent(connection: Connection, event: Any) -> None:
        if not isinstance(event, Transferred):
            obliging(connection, event)

    with server(silent) as url:
        context = await connect_async(url)
        sent = await context.producer(QUEUE).send_async("x")
        with pytest.raises(TimedOut):
            await context.close(timeout_s=0.1)
        with pytest.raises(ConnectionLost, match="closed before the broker's answer"):
            await asyncio.wait_for(sent, 10)


@run_async
async def test_send_error_is_passed_to_on_done_without_unretrieved_future_warning() -> None:
    def silent(connection: Connection, event: Any) -> None:
        if not isinstance(event, Transferred):
            obliging(connection, event)

    told: list[BasculeError | None] = []
    loop_errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
    with server(silent) as url:
        context = await connect_async(url)
        await context.producer(QUEUE).send_async("x", on_done=lambda _, error: told.append(error))
        with pytest.raises(TimedOut):
            await context.close(timeout_s=0.1)
    gc.collect()
    assert [type(error) for error in told] == [ConnectionLost]
    assert loop_errors == []


@run_async
async def test_send_waiting_for_window_raises_when_context_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(connection: Connection, event: Any) -> None:
        if not isinstance(event, Transferred):
            obliging(connection, event)

    monkeypatch.setattr(sends, "SEND_WINDOW", 1)
    with server(silent) as url:
        context = await connect_async(url, timeout_s=10.0)
        sent = await context.producer(QUEUE).send_async("x")
        waiting = [asyncio.create_task(context.send(queue, "x")) for queue in (Queue("another"), QUEUE)]
        await asyncio.sleep(0)
        with pytest.raises(TimedOut):
            await context.close(timeout_s=0.1)
        for each in waiting:
            with pytest.raises(IllegalState, match="the context is closed"):
                await asyncio.wait_for(each, 20)
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(sent, 20)
