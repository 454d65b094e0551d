"""Endpoints of an adapter that share a worker pool, from their start, on Kafka in memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bascule.adapter.inbound import ActivationSpec, Record, ResourceAdapter, WorkerPool, activation
from bascule.core.errors import Unavailable
from bascule.kafka.consumer import GroupConsumer
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.support.system import wait_for

#: The groups in the pool when each endpoint begins to consume.
Found = list[tuple[str, ...]]


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaInMemory:
    cluster = KafkaInMemory(monkeypatch)
    cluster.create("slow")
    cluster.create("quick")
    return cluster


def watched(monkeypatch: pytest.MonkeyPatch, pool: WorkerPool, fails: str = "") -> Found:
    """Record the groups in the pool when each endpoint begins to consume. ``fails`` is a group that cannot start."""
    found: Found = []

    class Watched(GroupConsumer):
        def __init__(self, kafka: Any, group: str, *rest: Any, **options: Any) -> None:
            found.append(pool.status().groups)
            if group == fails:
                raise Unavailable("no group")
            super().__init__(kafka, group, *rest, **options)

    monkeypatch.setattr(activation, "GroupConsumer", Watched)
    return found


def adapter_of(pool: WorkerPool, slow: Any, quick: Any) -> ResourceAdapter:
    adapter = ResourceAdapter(SETTINGS)
    for group, endpoint in (("slow", slow), ("quick", quick)):
        adapter.activate(ActivationSpec(topics=(group,), group=group, workers=4, pool=pool), endpoint)
    return adapter


def test_first_endpoint_of_pool_leaves_thread_to_second_from_start(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun, pool = threading.Event(), threading.Semaphore(0), WorkerPool(4)
    found = watched(monkeypatch, pool)
    slow_done: list[Record] = []
    quick_done: list[Record] = []

    def slow(record: Record) -> None:
        begun.release()
        go_on.wait()
        slow_done.append(record)

    for _ in range(10):
        kafka.put("slow", b"record")
    with adapter_of(pool, slow, quick_done.append) as adapter:
        try:
            for _ in range(3):
                assert begun.acquire(timeout=60)
            kafka.put("quick", b"record")
            wait_for(lambda: len(quick_done) == 1, "the record of the quick endpoint", 60)
            assert (slow_done, pool.status().at_work) == ([], 3)
        finally:
            go_on.set()
        wait_for(lambda: len(slow_done) == 10, "the records of the slow endpoint", 60)
    assert found == [("quick", "slow")] * 2
    found.clear()
    with adapter:
        pass
    assert found == [("quick", "slow")] * 2  # also when the adapter starts again


@pytest.mark.parametrize("fails", ["slow", "quick"])
def test_failed_start_removes_all_endpoints_from_pool(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    pool, done = WorkerPool(4), list[Record]()
    with monkeypatch.context() as patch:
        watched(patch, pool, fails)
        adapter = adapter_of(pool, done.append, done.append)
        with pytest.raises(Unavailable, match="no group"):
            adapter.start()
    assert pool.status().groups == ()
    assert [status.running for status in adapter.status()] == [False, False]
    kafka.put("slow", b"record")
    with adapter:
        wait_for(lambda: len(done) == 1, "a record after the next start", 60)
