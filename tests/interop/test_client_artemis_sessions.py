"""Acknowledgement, transactions, subscriptions and asyncio of the Python client, in the same cases against Bascule and Apache Artemis."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bascule.client import (
    Acknowledge,
    IllegalState,
    InvalidClientId,
    InvalidDestination,
    Message,
    Queue,
    Refused,
    TemporaryQueue,
    Topic,
    connect_async,
)
from tests.interop.both_brokers import Connect, artemis, bodies, connect, nothing_in, queue, url
from tests.support.client import SOON_S, all_bodies, all_bodies_async

__all__ = ["artemis", "connect", "queue", "url"]  # fixtures


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine as a test, on its own event loop."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture
def topic(name: str) -> Topic:
    return Topic(name)


def test_client_acknowledge_covers_earlier_messages_and_recover_redelivers_the_rest(connect: Connect, queue: Queue) -> None:
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


def test_individual_acknowledge_of_the_python_client_covers_one_message(connect: Connect, queue: Queue) -> None:
    context = connect(Acknowledge.INDIVIDUAL)
    context.producer(queue).send_many(map(str, range(3)))
    with context.consumer(queue) as consumer:
        received = [consumer.receive(SOON_S) for _ in range(3)]
        assert received[1] is not None
        received[1].acknowledge()
    context.close()
    assert bodies(connect(), queue, 2) == ["0", "2"]


def test_message_received_by_a_closed_consumer_can_still_be_acknowledged(connect: Connect, queue: Queue) -> None:
    context = connect(Acknowledge.CLIENT)
    context.producer(queue).send_many(["a", "b"])
    consumer = context.consumer(queue)
    assert consumer.receive(SOON_S) is not None
    consumer.close()
    context.acknowledge()
    context.close()
    assert bodies(connect(), queue, 1) == ["b"]


def test_unacknowledged_messages_are_redelivered_and_lazily_acknowledged_messages_are_not(connect: Connect, queue: Queue) -> None:
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


def test_transaction_block_of_a_non_transacted_context_commits_all_or_nothing(connect: Connect, queue: Queue, name: str) -> None:
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


def test_transacted_context_keeps_message_order_over_commit_and_rollback(connect: Connect, queue: Queue) -> None:
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


def test_closing_context_rolls_back_only_its_own_transaction(connect: Connect, queue: Queue) -> None:
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


def test_every_subscriber_gets_a_copy_and_no_local_excludes_own_messages(connect: Connect, topic: Topic) -> None:
    context, other = connect(), connect()
    with context.consumer(topic) as first, other.consumer(topic) as second, context.consumer(topic, no_local=True) as foreign:
        context.send(topic, "mine")
        other.send(topic, "theirs")
        for consumer in (first, second):
            assert sorted(all_bodies(consumer, 2)) == ["mine", "theirs"]
        assert all_bodies(foreign, 1) == ["theirs"]


def test_durable_subscription_keeps_messages_while_its_client_is_away(connect: Connect, topic: Topic, name: str) -> None:
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
def test_shared_subscription_delivers_each_message_to_one_consumer(
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


def test_a_request_is_answered_over_a_temporary_queue(connect: Connect, queue: Queue) -> None:
    service = connect()

    def answer(message: Message) -> None:
        service.reply(message, f"{message.body}!")

    service.consumer(queue).listener = answer
    context = connect()
    assert [context.request(queue, Message(str(number))).body for number in range(3)] == ["0!", "1!", "2!"]


def test_temporary_queue_is_consumed_only_by_its_connection_and_can_be_deleted(connect: Connect, queue: Queue) -> None:
    owner, other = connect(), connect()
    temporary = owner.temporary_queue()
    other.send(queue, Message("?", reply_to=temporary))
    request = owner.consumer(queue).receive(SOON_S)
    assert request is not None
    assert isinstance(request.reply_to, TemporaryQueue)
    assert request.reply_to == temporary
    with pytest.raises(InvalidDestination, match="only the connection that created it"):
        other.consumer(request.reply_to)
    other.send(request.reply_to, "!")
    consumer = owner.consumer(temporary)
    received = consumer.receive(SOON_S)
    assert received is not None
    with pytest.raises(IllegalState, match="close the consumer first"):
        owner.delete(temporary)
    consumer.close()
    owner.delete(temporary)
    with pytest.raises(InvalidDestination):
        owner.consumer(temporary)


@run_async
async def test_asyncio_client_sends_receives_browses_and_requests(url: str, queue: Queue, name: str) -> None:
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
async def test_transaction_of_the_asyncio_client_commits_all_or_nothing(url: str, queue: Queue) -> None:
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
async def test_cancelled_receive_takes_no_message_from_the_queue(url: str, queue: Queue) -> None:
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
