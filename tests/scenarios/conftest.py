"""Brokers that tests kill. Each test leaves its broker running."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from tests.scenarios.sparkless import workers_end
from tests.support.postgres import item_table
from tests.support.qpid import Connection
from tests.support.system import System

Connect = Callable[..., Connection]
CONFIG = """
[[address]]
match = "full.#"
max_messages = 1
"""


@pytest.fixture(scope="session")
def _shared_system(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("scenarios"), prefix="scenarios", config=CONFIG) as running:
        yield running


@pytest.fixture
def system(_shared_system: System) -> System:
    """Return the broker that the tests of a process share. If a failed test has left it dead, start it again."""
    if not _shared_system.broker.running:
        _shared_system.broker.start()
    return _shared_system


@pytest.fixture
def table(postgres: EmbeddedPostgres, name: str) -> Iterator[str]:
    """Return an empty table ``(item text UNIQUE)`` that no other test of the run uses."""
    with item_table(postgres, name) as table:
        yield table


@pytest.fixture(autouse=True)
def _no_worker_goes_on() -> Iterator[None]:
    """Clear what the tasks of an earlier test have left in this process: they may have used another Kafka."""
    yield
    workers_end()
