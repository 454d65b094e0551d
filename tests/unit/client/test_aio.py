"""The asyncio face against a server that does what each test says."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.client.server import BODIES, obliging, server

from bascule.amqp.connection import Connection
from bascule.amqp.events import Transferred
from bascule.client import Acknowledge, ConnectionLost, IllegalState, Message, Queue, TimedOut, connect_async

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
            async with await context.consumer(QUEUE) as consumer:
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
async def test_several_tasks_share_a_context() -> None:
    with server(obliging) as url:
        async with connect_async(url) as context:
            consumer = await context.consumer(QUEUE)
            first, *rest = await asyncio.gather(consumer.receive(5), *(context.send(Queue(f"q{number}"), "x") for number in range(40)))
            assert first is not None
            assert len(rest) == 40


@run_async
async def test_two_tasks_in_one_transaction_declare_it_once() -> None:
    with server(obliging) as url:
        async with connect_async(url, acknowledge=Acknowledge.TRANSACTED) as context:
            await asyncio.gather(*(context.send(Queue(f"q{number}"), "x") for number in range(5)))
            await context.commit()


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
                await context.send(QUEUE, "x", timeout_s=0.1)
            with pytest.raises(ConnectionLost):
                await context.send(QUEUE, "cut")


@run_async
async def test_a_context_belongs_to_its_loop() -> None:
    with server(obliging) as url:
        async with connect_async(url) as context:
            with pytest.raises(IllegalState, match="another event loop"):
                await asyncio.to_thread(asyncio.run, context.send(QUEUE, "x"))
