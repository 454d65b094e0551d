"""One broker for all tests with the Java client: each uses queues of its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.testing.qpid import Connection, JmsError, QpidPeer
from bascule.testing.system import System

Connect = Callable[..., Connection]
MAX_MESSAGE_BYTES = 3 << 20
CONFIG = f"""
[broker]
max_message_bytes = {MAX_MESSAGE_BYTES}
max_delivery_attempts = 4
allow_anonymous = true
users = {{ ann = "hush" }}
"""

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def system(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("interop"), prefix="interop", config=CONFIG) as running:
        yield running


@pytest.fixture
def connect(qpid_peer: QpidPeer, system: System) -> Iterator[Connect]:
    """Opens connections, and closes them after the test."""
    with ExitStack() as opened:

        def connect(url: str = system.url, **options: Any) -> Connection:
            connection = qpid_peer.connect(url, **options)

            def close() -> None:
                with suppress(JmsError):  # the test has done it
                    connection.close()

            opened.callback(close)
            return connection

        yield connect


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of a destination, a subscription, a client: nobody else's."""
    return f"{re.sub(r'[^a-z0-9]+', '.', request.node.name.lower())[5:45]}.{next(_numbers)}"


@pytest.fixture
def queue(name: str) -> str:
    return f"queue:{name}"


@pytest.fixture
def topic(name: str) -> str:
    return f"topic:{name}"
