"""Clients that wait for their next transaction, on the mock cluster: their debug lines are read, and nothing keeps them alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from bascule.core.effects import run_blocking
from bascule.core.log import get_log
from bascule.kafka import incarnation
from bascule.kafka.incarnation import ProducerLog, TransactionalClients
from bascule.kafka.waiting import WaitingClients
from bascule.writer.incarnation import Attempt
from tests.support.mock_cluster import MockCluster
from tests.support.system import wait_for


@pytest.fixture
def kafka() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        yield cluster


def test_lines_of_a_client_that_waits_are_read_until_it_is_dropped(kafka: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(ProducerLog, "_count", lambda _, line: lines.append(line))
    waiting = WaitingClients(0.01)
    monkeypatch.setattr(incarnation, "_waiting", waiting)
    kafka.create("t", 1)
    settings = {**kafka.kafka, "transactional.id": "id", "topic.metadata.refresh.interval.ms": 20}
    effects = TransactionalClients({}, settings, "t", get_log("test"), "test")
    producer = run_blocking(effects.init(Attempt()))
    first = len(lines)
    wait_for(lambda: len(lines) > first + 10, "lines of a client that nobody calls")
    alive = weakref.ref(producer)
    del producer
    gc.collect()
    wait_for(lambda: alive() is None and not waiting._runs, "the end of the client and of the thread")
