"""The asyncio face against a server that does what each test says."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.events import Attached, Detached, Discharged, Dispositioned, Flowed, Transferred
from bascule.amqp.events import DeclareReceived as DeclareAsked
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, Declared, Modified, TransactionalState
from bascule.client import (
    Acknowledge,
    ConnectionLost,
    IllegalState,
    InvalidDestination,
    Message,
    Queue,
    TimedOut,
    TransactionRolledBack,
    connect_async,
    sends,
)
from bascule.client.message import encode
from bascule.core.errors import BasculeError
from bascule.jms.message import JmsMessage
from tests.unit.client.server import BODIES, ending_the_first_consumer, obliging, server, serving

QUEUE = Queue("q")


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A coroutine as a test, on a loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@run_async
async def test_messages_are_sent_received_and_browsed() -> None:
    with server(obliging) as url:
        async with connect_async(url) as context:
            assert await context.producer(QUEUE).send_many(map(str, range(1_200))) == 1_200
            assert (await context.send(QUEUE, "x")).message_id
            async with await context.consumer(QUEUE, prefetch=0) as consumer:  # else a pause would end them
                assert [message.body async for message in consumer.messages(0.2)] == list(BODIES)
            assert [message.body async for message in context.browse(QUEUE)] == list(BODIES)


@run_async
async def test_a_context_that_is_awaited_is_closed_by_hand() -> None:
    with server(obliging) as url:
        context = await connect_async(url)
        await context.send(QUEUE, "x")
        await context.close()
        with pytest.raises(IllegalState, match="closed"):
            await context.send(QUEUE, "x")


@run_async
async def test_a_listener_may_be_a_coroutine_function_and_a_stop_waits_for_it() -> None:
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
async def test_a_message_on_which_a_listener_raises_that_something_was_cancelled_is_given_back_as_failed(
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
async def test_several_tasks_share_a_context() -> None:
    with server(obliging) as url:
        async with connect_async(url) as context:
            consumer = await context.consumer(QUEUE)
            first, *rest = await asyncio.gather(consumer.receive(5), *(context.send(Queue(f"q{number}"), "x") for number in range(40)))
            assert first is not None
            assert len(rest) == 40


@run_async
async def test_two_tasks_in_one_transaction_declare_it_once() -> None:
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
async def test_requests_of_several_tasks_each_get_their_own_answer_in_whatever_order_they_come() -> None:
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
async def test_time_limits_hold_and_a_lost_connection_is_told() -> None:
    def silent(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            if event.payload.endswith(b"cut"):
                raise ConnectionResetError
        else:
            obliging(connection, event)

    with server(silent) as url:
        async with connect_async(url, timeout_s=5.0) as context:
            with pytest.raises(TimedOut, match="not known"):
                await context.send(QUEUE, "x", timeout_s=1.0)
            with pytest.raises(ConnectionLost):
                await context.send(QUEUE, "cut")


@run_async
async def test_a_context_belongs_to_its_loop() -> None:
    with server(obliging) as url:
        async with connect_async(url) as context:
            with pytest.raises(IllegalState, match="another event loop"):
                await asyncio.to_thread(asyncio.run, context.send(QUEUE, "x"))


@run_async
async def test_listeners_go_on_in_the_next_transaction_after_the_connection_took_one_with_it() -> None:
    bodies: list[Any] = []
    told: list[BasculeError] = []

    def cut(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned):
            raise ConnectionResetError
        obliging(connection, event)
        if isinstance(event, Attached) and isinstance(event.link, SenderLink):
            event.link.context = iter([encode(Message(BODIES[0]))])

    with server(cut, obliging) as url:
        async with connect_async(f"failover:({url})", acknowledge=Acknowledge.TRANSACTED, on_exception=told.append) as context:
            done = asyncio.Event()

            async def listener(message: Message) -> None:
                bodies.append(message.body)
                if message.body == BODIES[-1]:
                    await context.commit()
                    done.set()

            (await context.consumer(QUEUE)).listener = listener
            await asyncio.wait_for(done.wait(), 10)
    assert bodies == [BODIES[0], *BODIES]
    assert list(map(type, told)) == [TransactionRolledBack]


# --- cancelled -------------------------------------------------------------------------------------------------------------------


class Reluctant:
    """Like ``obliging``, but sends in a transaction get no answer, and drains none where it is told so, until a coordinator link ends."""

    def __init__(self, *, drains: bool = True) -> None:
        self.drains = drains
        self.asked = asyncio.Event()  # for what it does not answer
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


async def cancelled(work: Coroutine[Any, Any, Any], when: asyncio.Event) -> None:
    """Do the work until something happens, and cancel it then."""
    task = asyncio.create_task(work)
    await asyncio.wait_for(when.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@run_async
async def test_a_block_whose_commit_is_cancelled_is_rolled_back_at_once_and_the_next_one_is_committed() -> None:
    broker = Reluctant()

    async def work() -> None:
        async with context.transaction():
            await context.send(QUEUE, "x")  # the commit waits for its answer

    with server(broker) as url:
        async with connect_async(url, timeout_s=10.0) as context:
            await cancelled(work(), broker.asked)
            await work()
    assert broker.ended[:2] == ["link", "txn-2 committed"]


@run_async
async def test_a_rollback_that_is_cancelled_happens_all_the_same_and_its_consumers_go_on() -> None:
    broker = Reluctant(drains=False)
    with server(broker) as url:
        async with connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            assert await consumer.receive(10)
            await cancelled(context.rollback(), broker.asked)
            assert [message and message.body for message in [await consumer.receive(10) for _ in range(3)]] == ["two", "three", "again"]
            await context.commit()
    assert broker.ended[:2] == ["link", "txn-2 committed"]


class LateToDrain:
    """A broker whose first drain is answered when the test says so: with the next disposition that comes."""

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
async def test_consumers_go_on_after_a_recover_that_is_cancelled() -> None:
    broker = LateToDrain()
    with server(broker) as url:
        async with connect_async(url, acknowledge=Acknowledge.CLIENT, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            first = await consumer.receive(10)
            assert first is not None
            await cancelled(context.recover(), broker.asked)
            first.acknowledge()
            assert [message and message.body for message in [await consumer.receive(10) for _ in range(3)]] == ["two", "three", "new"]


@run_async
async def test_a_consumer_whose_close_is_cancelled_is_closed_with_its_last_acknowledgement() -> None:
    broker = LateToDrain()
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
            await cancelled(consumer.close(), broker.asked)
            with pytest.raises(IllegalState, match="the consumer is closed"):
                await consumer.receive(10)
            first.acknowledge()
            while "SenderLink" not in ended:
                await asyncio.sleep(0.005)
    assert ended == ["Released", "Accepted", "SenderLink"]


@run_async
async def test_a_close_that_is_cancelled_says_so_and_closes() -> None:
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
        await context.close()  # waits for the answer

    with server(silent) as url:
        context = await connect_async(url, timeout_s=10.0)
        await cancelled(work(), asked)
        with pytest.raises(IllegalState, match="closed"):
            await context.send(QUEUE, "x")
        with pytest.raises(ConnectionLost):
            await sends[0]


@run_async
async def test_a_listener_whose_consumer_the_broker_ends_is_told_why_and_a_receive_raises_it() -> None:
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


class SlowToBegin:
    """A broker that begins no transaction before the test says so, once for each."""

    def __init__(self) -> None:
        self.asked, self.goes_on = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, connection: Connection, event: Any) -> None:
        if isinstance(event, DeclareAsked):
            self._loop.call_soon_threadsafe(self.asked.set)
            assert self.goes_on.wait(10)
        obliging(connection, event)


@run_async
async def test_a_stop_while_a_transaction_begins_leaves_its_message_until_the_start() -> None:
    broker = SlowToBegin()
    bodies: list[Any] = []
    with server(broker) as url:
        async with connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=10.0) as context:
            (await context.consumer(QUEUE)).listener = lambda message: bodies.append(message.body)
            await asyncio.wait_for(broker.asked.wait(), 10)
            await context.stop()
            broker.goes_on.set()
            await context.send(Queue("another"), "x")  # whose link is answered after that
            assert bodies == []
            context.start()
            while bodies != list(BODIES):
                await asyncio.sleep(0.005)


@run_async
async def test_a_consumer_that_loses_its_listener_while_a_transaction_begins_keeps_its_message() -> None:
    broker = SlowToBegin()
    with server(broker) as url:
        async with connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            consumer.listener = print
            await asyncio.wait_for(broker.asked.wait(), 10)
            consumer.listener = None
            broker.goes_on.set()
            assert [message and message.body for message in [await consumer.receive(10) for _ in BODIES]] == list(BODIES)


@run_async
async def test_a_listener_ends_with_its_task_where_that_is_cancelled() -> None:
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
        await context.close()  # waits for it
        assert context._task._task.done()
    assert seen == [BODIES[0]]


@run_async
async def test_a_close_waits_for_the_listener_at_work_which_has_its_context_until_then() -> None:
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
        with pytest.raises(IllegalState, match="wait for itself"):
            await context.close()
        closing.append(asyncio.create_task(close()))
        await asyncio.wait(closing, timeout=0.2)  # it does not end
        await context.send(QUEUE, message.body)
        happened.append("sent")
        at_work.set()

    with server(react) as url:
        context = await connect_async(url, timeout_s=10.0)
        (await context.consumer(QUEUE)).listener = listener
        await asyncio.wait_for(at_work.wait(), 10)
        await asyncio.wait_for(closing[0], 10)
    assert happened == ["sent", "closed"]
    assert outcomes == [ACCEPTED]


@run_async
async def test_a_close_waits_so_long_for_a_listener_and_no_longer() -> None:
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
            with pytest.raises(TimedOut, match="a listener is still at work"):
                await asyncio.wait_for(close(timeout_s=0.1), 20)
        assert context._task._task.done()
        enough.set()
        assert context._listener_task is not None
        await asyncio.wait_for(context._listener_task, 10)


@run_async
async def test_a_future_of_a_send_is_told_when_its_context_closes_without_the_answer() -> None:
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
async def test_error_of_a_send_is_told_to_on_done_and_needs_no_await_of_its_future() -> None:
    def silent(connection: Connection, event: Any) -> None:
        if not isinstance(event, Transferred):
            obliging(connection, event)

    told: list[BasculeError | None] = []
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    with server(silent) as url:
        context = await connect_async(url)
        await context.producer(QUEUE).send_async("x", on_done=lambda _, error: told.append(error))
        with pytest.raises(TimedOut):
            await context.close(timeout_s=0.1)
    gc.collect()
    assert [type(error) for error in told] == [ConnectionLost]
    assert unheard == []


@run_async
async def test_a_send_that_waits_for_room_when_its_context_closes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
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


class Lazy:
    """A broker whose messages come when the test says so. ``events`` has the credit that consumers give, and what they do with messages."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def __call__(self, connection: Connection, event: Any) -> None:
        match event:
            case Flowed() if isinstance(event.link, SenderLink):
                self.told(f"{'drain' if event.link.drain else 'credit'} {event.link.credit}")
                if event.link.drain:  # a message was on its way
                    event.link.send(encode(Message("late")))
            case Dispositioned():
                self.told(type(event.state).__name__.lower())
            case _:
                obliging(connection, event)

    def told(self, what: str) -> None:
        self.events.append(what)
        self.loop.call_soon_threadsafe(self.changed.set)


@run_async
async def test_a_receive_without_prefetch_that_is_cancelled_keeps_no_message_from_others() -> None:
    broker = Lazy()
    with server(broker) as url:
        async with connect_async(url, prefetch=0, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            await cancelled(consumer.receive(10), broker.changed)
            while len(broker.events) < 3:
                broker.changed.clear()
                await asyncio.wait_for(broker.changed.wait(), 10)
    assert broker.events == ["credit 1", "drain 1", "released"]


@run_async
async def test_the_broker_is_asked_before_a_receive_says_that_there_is_nothing() -> None:
    broker = Lazy()
    with server(broker) as url:
        async with connect_async(url, prefetch=1, timeout_s=10.0) as context:
            message = await (await context.consumer(QUEUE)).receive(0.01)
            assert message is not None
            assert message.body == "late"
    assert broker.events[:2] == ["credit 1", "drain 1"]


@run_async
async def test_two_tasks_that_receive_from_one_consumer_without_prefetch_each_get_a_message() -> None:
    with server(obliging) as url:
        async with connect_async(url, prefetch=0, timeout_s=10.0) as context:
            consumer = await context.consumer(QUEUE)
            messages = await asyncio.gather(consumer.receive(10), consumer.receive(10))
    assert [message and message.body for message in messages] == ["one", "two"]
