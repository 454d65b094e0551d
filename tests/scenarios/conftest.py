"""A broker that tests kill; they leave it running."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.sparkless import workers_end
from tests.support.qpid import Connection
from tests.support.system import System

Connect = Callable[..., Connection]
#: Nobody stands by: a session may be longer than a busy machine ever leaves broker or Kafka without a turn.
CONFIG = """
[broker]
session_timeout_s = 120

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
    """The broker that the tests of a process share. A test that failed may have left it dead: the next one starts it again."""
    if not _shared_system.broker.running:
        _shared_system.broker.start()
    return _shared_system


@pytest.fixture(autouse=True)
def _no_worker_goes_on() -> Iterator[None]:
    """The tasks of one test know nothing of those of another: theirs may have been on another Kafka."""
    yield
    workers_end()
