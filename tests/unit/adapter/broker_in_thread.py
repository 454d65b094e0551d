"""A broker on Kafka in memory that runs in a thread beside a blocking test, and a shop that uses the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from bascule.adapter.outbound import JmsConnectionFactory, PoolLimits
from bascule.client import Context, Queue
from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import TransactionManager
from bascule.xa.jms import JmsResource
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import SOON_S, Broker, kafka, serving

__all__ = ["JmsShop", "broker", "broker_beside", "consumers", "kafka", "shop"]
LIMITS = PoolLimits(most=2, wait_s=0.05)


@contextmanager
def broker_beside(kafka: KafkaInMemory, directory: Path) -> Iterator[Broker]:
    """Run a broker with its event loop in another thread."""
    started: Future[tuple[Broker, asyncio.Event, asyncio.AbstractEventLoop]] = Future()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for name in ("add_signal_handler", "remove_signal_handler"):  # only the main thread can handle signals
            setattr(loop, name, lambda *_: None)
        async with serving(kafka, directory) as broker:
            over = asyncio.Event()
            started.set_result((broker, over, loop))
            await over.wait()

    running = in_background(lambda: asyncio.run(run()), "test-broker")
    running.add_done_callback(lambda ended: started.done() or started.set_exception(ended.exception() or RuntimeError("ended")))
    broker, over, loop = started.result(SOON_S)
    try:
        yield broker
    finally:
        loop.call_soon_threadsafe(over.set)
        running.result(SOON_S)


class JmsShop:
    """A transaction manager over the broker and a model of a database, and a connection factory that uses the manager."""

    def __init__(self, url: str, limits: PoolLimits = LIMITS, **options: object) -> None:
        self.url = url
        self.broker = JmsResource("broker", url, timeout_s=SOON_S, **options)
        self.database = ModelResource("db")
        self.manager = TransactionManager("shop", ModelLog(), [self.broker, self.database])
        self.factory = JmsConnectionFactory(self.broker, self.manager, limits=limits)

    def __enter__(self) -> JmsShop:
        self.manager.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()
        self.factory.close()
        self.broker.close()

    def other_client(self) -> Context:
        """Return a context of another client."""
        return JmsConnectionFactory(JmsResource("other", self.url, timeout_s=SOON_S)).connect()

    def send(self, queue: Queue, *bodies: str) -> None:
        with self.factory.connect() as context:
            for body in bodies:
                context.send(queue, body)

    def browse(self, queue: Queue) -> list[object]:
        """Return the bodies of the messages that a browser finds in a queue."""
        with self.factory.connect() as context:
            return [message.body for message in context.browse(queue)]


def consumers(broker: Broker) -> dict[str, int]:
    """Return the number of consumers of each queue of the broker, including temporary queues."""
    return {queue.name: len(queue.consumers) for queue in list(broker.epoch.engine.addresses.queues.values())}


@pytest.fixture
def broker(kafka: KafkaInMemory, tmp_path: Path) -> Iterator[Broker]:
    with broker_beside(kafka, tmp_path) as running:
        yield running


@pytest.fixture
def shop(broker: Broker) -> Iterator[JmsShop]:
    with JmsShop(f"amqp://127.0.0.1:{broker.ready[-1]}", client_id="shop") as shop:
        yield shop
