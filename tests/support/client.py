"""What tests take with the Python client: as many messages as they expect, and then what the broker says.

A receive with a prefetch that finds nothing in its time has asked nobody: it says how fast the machine is. receive_no_wait does ask (AMQP
2.6.7, drain). So the expected ones are waited for, for long, and the broker is asked for one beyond them.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from bascule.client import AsyncConsumer, Consumer, Context, Queue

#: A message that is there arrives within, on a loaded machine and after a broker's restart too.
SOON_S = 30.0


def all_bodies(consumer: Consumer, count: int) -> list[Any]:
    """The bodies of the ``count`` messages that are expected, and of one beyond them if the broker has it."""
    found = list(islice(consumer.messages(SOON_S), count))
    beyond = consumer.receive_no_wait()
    return [message.body for message in (*found, beyond) if message is not None]


def all_in(context: Context, queue: Queue, count: int) -> list[Any]:
    """As all_bodies, by a consumer of its own."""
    with context.consumer(queue) as consumer:
        return all_bodies(consumer, count)


async def all_bodies_async(consumer: AsyncConsumer, count: int) -> list[Any]:
    """As all_bodies, with the asyncio face."""
    found = [await consumer.receive(SOON_S) for _ in range(count)]
    return [message.body for message in (*found, await consumer.receive_no_wait()) if message is not None]
