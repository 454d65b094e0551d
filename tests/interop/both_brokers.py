"""The Python client on Bascule, and on Apache Artemis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bascule.client import (
    Acknowledge,
    ConnectionFactory,
    Context,
    Queue,
)
from bench.artemis import Artemis
from tests.support.client import SOON_S
from tests.support.system import System

Connect = Callable[..., Context]


@pytest.fixture(scope="session")
def artemis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artemis]:
    with Artemis(tmp_path_factory.mktemp("artemis") / "broker") as running:
        yield running


@pytest.fixture(params=["bascule", "artemis"])
def url(request: pytest.FixtureRequest) -> str:
    found: System | Artemis = request.getfixturevalue("system" if request.param == "bascule" else "artemis")
    return found.url


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    opened: list[Context] = []

    def connect(acknowledge: Acknowledge = Acknowledge.AUTO, **options: Any) -> Context:
        opened.append(ConnectionFactory(url, **options).connect(acknowledge))
        return opened[-1]

    yield connect
    for context in opened:
        context.close()


@pytest.fixture
def queue(name: str) -> Queue:
    return Queue(name)


def bodies(context: Context, queue: Queue, count: int) -> list[Any]:
    """Receive the next messages of a queue."""
    with context.consumer(queue) as consumer:
        return [message and message.body for message in (consumer.receive(SOON_S) for _ in range(count))]


def nothing_in(context: Context, queue: Queue) -> bool:
    with context.consumer(queue) as consumer:
        return consumer.receive_no_wait() is None
