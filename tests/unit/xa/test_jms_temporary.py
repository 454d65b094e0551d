"""Temporary destinations that a context of a transaction has created: they end with the transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from bascule.client import Context, IllegalState, Message, Queue
from bascule.xa.aio import AsyncTransactionManager
from tests.unit.adapter.broker_in_thread import JmsShop, broker, consumers, kafka, shop
from tests.unit.server.broker_process import SOON_S, Broker

__all__ = ["broker", "kafka", "shop"]
ORDERS = Queue("orders")


class Undone(Exception):
    """The application fails."""


def read_only(_shop: JmsShop, _context: Context) -> None:
    """Leave the branch without work."""


def one_phase(_shop: JmsShop, context: Context) -> None:
    context.send(ORDERS, "sent")


def two_phase(shop: JmsShop, context: Context) -> None:
    context.send(ORDERS, "sent")
    shop.manager.enlist(shop.database).append("row")


def undone(shop: JmsShop, context: Context) -> None:
    two_phase(shop, context)
    raise Undone


def no_vote(shop: JmsShop, context: Context) -> None:
    shop.database.vote = "no"
    two_phase(shop, context)


def temporary(broker: Broker) -> set[str]:
    return {name for name in consumers(broker) if name.startswith("temp.")}


@pytest.mark.parametrize("work", [read_only, one_phase, two_phase, undone, no_vote], ids=lambda work: work.__name__)
def test_temporary_destinations_of_a_branch_are_deleted_when_it_ends(
    shop: JmsShop, broker: Broker, work: Callable[[JmsShop, Context], None]
) -> None:
    with shop.manager.begin():
        shop.manager.enlist(shop.broker).send(ORDERS, "first")  # the session of the manager's requests has its own queue of answers
    before = temporary(broker)
    with suppress(Exception), shop.manager.begin() as transaction:
        context = transaction.enlist(shop.broker)
        made = context.temporary_queue()
        context.delete(context.temporary_topic())
        context.consumer(context.temporary_topic())
        assert context.consumer(made).receive_no_wait() is None
        assert made.name in temporary(broker)
        work(shop, context)
    assert temporary(broker) == before
    assert not {name for name, count in consumers(broker).items() if count and name not in before}
    with shop.manager.begin() as transaction:
        context = transaction.enlist(shop.broker)
        context.send(ORDERS, "next")  # the session is not disturbed


def test_temporary_destination_of_a_branch_is_refused_as_reply_to(shop: JmsShop) -> None:
    with shop.manager.begin() as transaction:
        context = transaction.enlist(shop.broker)
        with pytest.raises(IllegalState, match="by a context outside of the transaction"):
            context.send(ORDERS, Message("?", reply_to=context.temporary_queue()))


def test_temporary_destinations_of_an_asyncio_branch_are_deleted_when_it_ends(shop: JmsShop, broker: Broker) -> None:
    manager = AsyncTransactionManager(shop.manager)

    async def main() -> None:
        async with manager.begin() as transaction:
            context = await transaction.enlist(shop.broker)
            await context.send(ORDERS, "first")
        before = temporary(broker)
        async with manager.begin() as transaction:
            context = await transaction.enlist(shop.broker)
            made = await context.temporary_queue()
            await context.send(ORDERS, "second")
            assert made.name in temporary(broker)
            assert await (await context.consumer(made)).receive_no_wait() is None
        assert temporary(broker) == before

    asyncio.run(asyncio.wait_for(main(), SOON_S))
