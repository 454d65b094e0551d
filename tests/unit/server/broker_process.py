"""The code of a complete broker process on Kafka in memory: listener, epochs, housekeeping, ingress tail, admin server."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bascule.broker import node as protocol
from bascule.client import ConnectionFactory, Queue
from bascule.client.blocking import Context
from bascule.config import Settings
from bascule.core.errors import BasculeError
from bascule.embedded.service_manager import NO_SERVICE_MANAGER, ServiceManager
from bascule.kafka import election
from bascule.server import life, topics
from bascule.server.node import Node
from bascule.server.reload import ReloadSource
from bascule.threads.background import in_background
from tests.support.kafka_in_memory import KafkaInMemory
from tests.support.speed import SLOWNESS

T = TypeVar("T")
SOON_S = 20.0 * SLOWNESS
PREFIX = "test"


async def called(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking function off the loop."""
    return await asyncio.wrap_future(in_background(functools.partial(function, *arguments), "test"))


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition is true."""
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s, f"condition not true in time: {what}"
        await asyncio.sleep(0.01)


class Broker:
    """A broker that runs in the loop of the test."""

    def __init__(
        self, kafka: KafkaInMemory, directory: Path, *, service_manager: ServiceManager = NO_SERVICE_MANAGER,
        reload_source: ReloadSource | None = None, **sections: Any,
    ) -> None:  # fmt: skip
        self.kafka = kafka
        given: dict[str, Any] = {
            "kafka": {"bootstrap_servers": "memory"},
            "broker": {"port": 0, "session_timeout_s": 6, **sections.pop("broker", {})},
            "admin": {"port": 0, **sections.pop("admin", {})},
            "journal": {"prefix": PREFIX, "retention_s": 0, **sections.pop("journal", {})},
            "embedded": {"data_dir": directory},
        }
        self.settings = Settings(**given, **sections) if reload_source is None else reload_source.configuration.settings
        self.node = Node(self.settings, service_manager, reload_source)
        self.ready: list[int] = []
        self.standing_by: list[int] = []
        self.task = asyncio.get_running_loop().create_task(
            self.node.run(lambda port, _: self.ready.append(port), lambda port, _: self.standing_by.append(port))
        )

    @property
    def life(self) -> life.BrokerLife:
        assert self.node._life is not None
        return self.node._life

    @property
    def epoch(self) -> Any:
        return self.life._epoch

    async def serves(self, times: int = 1) -> None:
        await until(lambda: len(self.ready) >= times or self.task.done(), "the broker serves")
        if self.task.done():
            self.task.result()

    def connect(self) -> Context:
        return ConnectionFactory(f"amqp://127.0.0.1:{self.ready[-1]}", timeout_s=SOON_S).connect()

    async def send(self, queue: str, *bodies: str) -> None:
        def send() -> None:
            with self.connect() as context:
                for body in bodies:
                    context.send(Queue(queue), body)

        await called(send)

    async def receive(self, queue: str, count: int) -> list[Any]:
        def receive() -> list[Any]:
            with self.connect() as context, context.consumer(Queue(queue)) as consumer:
                found = [consumer.receive(SOON_S) for _ in range(count)]
                return [message.body for message in found if message is not None]

        return await called(receive)

    async def stop(self, error: BasculeError | None = None) -> None:
        self.life._stop(error)
        await asyncio.wait_for(self.task, SOON_S)


@asynccontextmanager
async def serving(kafka: KafkaInMemory, directory: Path, **sections: Any) -> AsyncIterator[Broker]:
    """Yield a broker that serves; stop it afterwards."""
    broker = Broker(kafka, directory, **sections)
    try:
        await broker.serves()
        yield broker
    finally:
        if not broker.task.done():
            await broker.stop()


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaInMemory:
    monkeypatch.setattr(topics, "WATCH_S", 0.05)
    monkeypatch.setattr(protocol, "STANDBY_AFTER_S", 0.5)
    monkeypatch.setattr(protocol, "RETRY_S", 0.05)
    monkeypatch.setattr(election, "LEAVE_S", 0.2)
    return KafkaInMemory(monkeypatch)
