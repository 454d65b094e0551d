"""One broker for all tests with the Java client; each test uses its own destinations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bascule.embedded.kafka import EmbeddedKafka
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
def system(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("interop"), prefix="interop", config=CONFIG) as running:
        yield running


@pytest.fixture
def connect(connect_to: Connect, system: System) -> Connect:
    def connect(url: str = system.url, **options: Any) -> Connection:
        return connect_to(url, **options)

    return connect
