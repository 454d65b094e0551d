"""The asyncio API of a JmsConnectionFactory, with a whole broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from bascule.adapter.outbound import PoolExhausted, PoolLimits
from bascule.client import Acknowledge, AsyncContext, IllegalState, Message, Queue, TemporaryQueue, Topic
from bascule.core.errors import InvalidInput
from bascule.xa.aio import AsyncTransactionManager
from tests.unit.adapter.broker_in_thread import JmsShop, broker, kafka, shop
from tests.unit.server.broker_process import SOON_S, Broker

__all__ = ["broker", "kafka", "shop"]
ORDERS, BILLS, PRICES = Queue("orders"), Queue("bills"), Topic("prices")


class ApplicationError(Exception):
    """An error of the application."""


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SOON_S):
            await main()

    asyncio.run(bounded())


def names(broker: Broker) -> set[str]:
    return {queue.name for queue in list(broker.epoch.engine.addresses.queues.values())}


def test_received_message_returns_on_rollback_and_is_consumed_once_on_commit(shop: JmsShop) -> None:
    manager = AsyncTransactionManager(shop.manager)

    async def work(*, fails: bool) -> None:
        async with manager.begin(), shop.factory.connect_async() as context:
            order = await (await context.consumer(ORDERS)).receive(SOON_S)
            assert order is not None
            future = await context.producer(BILLS, priority=7).send_async(f"bill of {order.body}")
            assert (await future).priority == 7
            (await manager.enlist(shop.database)).append("row")
            if fails:
                raise ApplicationError

    async def main() -> None:
        with suppress(ApplicationError):
            await work(fails=True)
        assert await asyncio.to_thread(shop.browse, ORDERS) == ["one"]
        await work(fails=False)

    shop.send(ORDERS, "one")
    run(main)
    assert (shop.browse(ORDERS), shop.browse(BILLS), shop.database.durable.committed) == ([], ["bill of one"], ["row"])


def test_async_context_outside_of_transaction_acknowledges_at_once_and_leaves_no_resources(shop: JmsShop, broker: Broker) -> None:
    made: list[TemporaryQueue] = []

    async def main() -> None:
        async with shop.factory.connect_async() as context:
            await context.send(ORDERS, "one")
            consumer = await context.consumer(ORDERS, prefetch=10)
            assert (await consumer.receive(SOON_S)) is not None
            assert [message async for message in context.browse(ORDERS)] == []
            made.append(await context.temporary_queue())
            await context.delete(await context.temporary_topic())
            async with shop.factory.connect_async() as other:
                with pytest.raises(PoolExhausted, match="main"):
                    await shop.factory.connect_async()
                await other.send(ORDERS, "two")
            assert made[0].name in names(broker)
        for call in (partial(context.send, ORDERS, "late"), partial(consumer.receive, 0.0), partial(context.consumer, ORDERS)):
            with pytest.raises(IllegalState, match="the context is closed"):
                await call()
        await context.close()

    run(main)
    assert made[0].name not in names(broker)
    assert (shop.browse(ORDERS), shop.factory.leases()) == (["two"], [])


REFUSED: list[tuple[str, Callable[[AsyncContext], object]]] = [
    ("commit", lambda context: context.commit()),
    ("rollback", lambda context: context.rollback()),
    ("transaction", lambda context: context.transaction()),
    ("create_context", lambda context: context.create_context(Acknowledge.CLIENT)),
    ("stop", lambda context: context.stop()),
]


def test_calls_reserved_for_the_container_are_refused_inside_and_outside_of_transactions(shop: JmsShop) -> None:
    async def check() -> None:
        async with shop.factory.connect_async() as context:
            for name, call in REFUSED:
                with pytest.raises(IllegalState, match=rf"{name}\(\) is refused"):
                    call(context)
            consumer = await context.consumer(ORDERS)
            with pytest.raises(IllegalState, match="cannot have listeners"):
                consumer.listener = print
            assert consumer.listener is None
            context.start()
            context.acknowledge()

    async def main() -> None:
        await check()
        async with AsyncTransactionManager(shop.manager).begin():
            await check()
        with pytest.raises(InvalidInput, match="acknowledge="):
            await shop.factory.connect_async(Acknowledge.CLIENT)

    run(main)


def test_objects_of_finished_transaction_are_refused_in_the_next_transaction(shop: JmsShop, broker: Broker) -> None:
    manager = AsyncTransactionManager(shop.manager)

    async def main() -> None:
        async with manager.begin():
            context = await shop.factory.connect_async()
            producer, consumer = context.producer(ORDERS), await context.consumer(ORDERS)
            subscriber = await context.shared_durable_consumer(PRICES, "all")
            queue = await context.temporary_queue()
            with pytest.raises(IllegalState, match="by a context outside of the transaction"):
                await producer.send(Message("?", reply_to=queue))
            await producer.send("in time")
        assert queue.name not in names(broker)
        calls: list[Callable[[], Awaitable[object]]] = [
            partial(producer.send, "late"),
            partial(producer.send_async, "late"),
            producer.flush,
            partial(consumer.receive, 0.0),
            partial(subscriber.receive, 0.0),
            partial(context.durable_consumer, PRICES, "mine"),
            context.temporary_topic,
        ]
        async with manager.begin(), shop.factory.connect_async() as following:
            await following.unsubscribe("all")
            for call in calls:
                with pytest.raises(IllegalState, match="transaction has ended"):
                    await call()
            with pytest.raises(IllegalState, match="transaction has ended"):
                consumer.prefetch = 10

    run(main)
    assert shop.browse(ORDERS) == ["in time"]


def test_async_context_works_only_in_its_transaction_and_one_call_style(shop: JmsShop) -> None:
    manager = AsyncTransactionManager(shop.manager)

    async def main() -> None:
        async with shop.factory.connect_async() as outside:
            async with manager.begin():
                async with shop.factory.connect_async() as inside:
                    with pytest.raises(IllegalState, match="taken outside of transactions"):
                        await outside.send(ORDERS, "no")
                    with manager.suspended(), pytest.raises(IllegalState, match="not the current transaction"):
                        await inside.send(ORDERS, "no")
                    with pytest.raises(IllegalState, match="uses the broker through asyncio"):
                        shop.factory.connect()
                    await asyncio.create_task(_send(inside, "by a task of the transaction"))
                with pytest.raises(IllegalState, match="the context is closed"):
                    await inside.send(ORDERS, "no")
            await outside.send(ORDERS, "afterwards")
        async with manager.begin():
            await asyncio.to_thread(shop.factory.connect)
            with pytest.raises(IllegalState, match="uses the broker through blocking calls"):
                await shop.factory.connect_async()

    run(main)
    assert shop.browse(ORDERS) == ["by a task of the transaction", "afterwards"]


async def _send(context: AsyncContext, body: str) -> None:
    await context.send(ORDERS, body)


def test_session_for_cancelled_task_returns_to_pool(broker: Broker) -> None:
    async def main() -> None:
        first = await shop.factory.connect_async()
        waiting = asyncio.ensure_future(shop.factory.connect_async())
        taking = [each for each in threading.enumerate() if each.name == "bascule-xa-async"]
        while not taking:
            await asyncio.sleep(0)
            taking = [each for each in threading.enumerate() if each.name == "bascule-xa-async"]
        waiting.cancel()
        await first.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert shop.factory.leases() == []
        async with shop.factory.connect_async() as following:
            await following.send(ORDERS, "one")

    with JmsShop(f"amqp://127.0.0.1:{broker.ready[-1]}", PoolLimits(most=1, wait_s=SOON_S / 2)) as shop:
        run(main)
        assert shop.browse(ORDERS) == ["one"]


def test_session_in_use_by_task_is_not_lent_to_others(shop: JmsShop) -> None:
    async def main() -> None:
        context = await shop.factory.connect_async()
        consumer = await context.consumer(ORDERS)
        receiving = asyncio.create_task(consumer.receive(SOON_S))
        while not consumer.state.waiting:
            await asyncio.sleep(0)
        await context.close()
        assert await receiving is None
        async with shop.factory.connect_async() as following:
            assert following._session is not context._session
            await following.send(ORDERS, "one")

    run(main)
    assert shop.browse(ORDERS) == ["one"]
