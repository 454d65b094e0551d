"""One broker for all tests with the Java client; each test uses its own destinations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import free_port
from tests.support.qpid import Connection
from tests.support.system import System

Connect = Callable[..., Connection]
MAX_MESSAGE_BYTES = 3 << 20
MAX_DELIVERY_ATTEMPTS = 4
CONFIG = f"""
[broker]
max_message_bytes = {MAX_MESSAGE_BYTES}
max_delivery_attempts = {MAX_DELIVERY_ATTEMPTS}
allow_anonymous = true
users = {{ ann = "hush" }}

[[address]]
match = "full.#"
max_messages = 1
when_full = "reject"
"""


@pytest.fixture(scope="session")
def websocket_port() -> int:
    """Return the port on which the broker accepts AMQP over WebSocket."""
    return free_port()


@pytest.fixture(scope="session")
def system(kafka: EmbeddedKafka, websocket_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    env = {"BASCULE_BROKER__WEBSOCKET__PORT": str(websocket_port)}
    with System(kafka.bootstrap, tmp_path_factory.mktemp("interop"), prefix="interop", config=CONFIG, env=env) as running:
        yield running


@pytest.fixture
def connect(connect_to: Connect, system: System) -> Connect:
    def connect(url: str = system.url, **options: Any) -> Connection:
        return connect_to(url, **options)

    return connect
