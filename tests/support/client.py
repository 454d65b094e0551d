"""Helpers to receive with the Python client: all expected messages, and then one more if the broker has it.

A receive with a prefetch that finds nothing in its time has not asked the broker, so its result depends on the speed of the machine.
receive_no_wait does ask (AMQP 2.6.7, drain). Therefore these functions wait long for the expected messages, and ask the broker for one
more.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from bascule.client import AsyncConsumer, Consumer, Context, Queue
from tests.support.speed import SLOWNESS

#: An existing message arrives within this time, on a loaded machine and after a restart of the broker too.
SOON_S = 30.0 * SLOWNESS


def all_bodies(consumer: Consumer, count: int) -> list[Any]:
    """Return the bodies of the ``count`` expected messages, and of one more if the broker has it."""
    found = list(islice(consumer.messages(SOON_S), count))
    beyond = consumer.receive_no_wait()
    return [message.body for message in (*found, beyond) if message is not None]


def all_in(context: Context, queue: Queue, count: int) -> list[Any]:
    """Return all bodies as ``all_bodies`` does, with a consumer of its own."""
    with context.consumer(queue) as consumer:
        return all_bodies(consumer, count)


async def all_bodies_async(consumer: AsyncConsumer, count: int) -> list[Any]:
    """Return all bodies as ``all_bodies`` does, with the asyncio API."""
    found = [await consumer.receive(SOON_S) for _ in range(count)]
    return [message.body for message in (*found, await consumer.receive_no_wait()) if message is not None]
