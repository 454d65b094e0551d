"""Durable subscriptions without a consumer: shown with the time of their last use, and deleted after the configured time."""

from __future__ import annotations

import pytest

from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from tests.unit.broker.conftest import Bench

EXPIRY_MS = 100_000


@pytest.fixture
def policy() -> Policy:
    return Policy(AddressPolicy(subscription_expiry_ms=EXPIRY_MS))


def found(bench: Bench) -> BrokerQueue | None:
    return bench.engine.addresses.subscriptions.get("s")


def later(bench: Bench, elapsed_ms: int) -> None:
    bench.now_ms += elapsed_ms
    bench.engine.tick()
    bench.broker.settle()


def abandoned(bench: Bench) -> BrokerQueue:
    """Return a durable subscription whose consumer has detached."""
    queue = bench.subscription("s")
    bench.engine.detach(bench.consumer(queue).consumer)
    bench.broker.settle()
    return queue


def test_subscription_without_a_consumer_expires_with_its_messages(bench: Bench) -> None:
    queue = abandoned(bench)
    assert queue.unused_since_ms == bench.now_ms
    bench.fill("news", to="t")
    later(bench, EXPIRY_MS - 1)
    assert found(bench) is queue
    later(bench, 1)
    assert found(bench) is None
    assert bench.engine.counters.expired_subscriptions == 1
    bench.crash()
    assert found(bench) is None


def test_expiry_time_of_subscription_starts_when_last_consumer_leaves(bench: Bench) -> None:
    queue = abandoned(bench)
    later(bench, EXPIRY_MS - 1)
    consumer = bench.consumer(queue)
    assert queue.unused_since_ms == 0
    later(bench, 3 * EXPIRY_MS)
    assert found(bench) is queue
    bench.engine.detach(consumer.consumer)
    later(bench, EXPIRY_MS - 1)
    assert found(bench) is queue
    later(bench, 1)
    assert found(bench) is None


@pytest.mark.parametrize("snapshot", [False, True])
def test_time_of_an_unused_subscription_continues_over_a_restart(bench: Bench, snapshot: bool) -> None:
    since_ms = abandoned(bench).unused_since_ms
    if snapshot:
        bench.broker.take_snapshot()
        bench.broker.settle()
    bench.crash()
    queue = found(bench)
    assert queue is not None
    assert queue.unused_since_ms == since_ms
    bench.engine.create_configured()
    later(bench, EXPIRY_MS)
    assert found(bench) is None


def test_time_of_a_subscription_in_use_at_a_crash_begins_with_the_next_epoch(bench: Bench) -> None:
    queue = abandoned(bench)
    bench.broker.take_snapshot()
    bench.broker.settle()
    bench.consumer(queue)
    later(bench, 10 * EXPIRY_MS)
    bench.crash()
    loaded = found(bench)
    assert loaded is not None
    assert loaded.unused_since_ms == 0
    bench.engine.create_configured()
    assert loaded.unused_since_ms == bench.now_ms
    later(bench, EXPIRY_MS - 1)
    assert found(bench) is loaded


def test_consumers_that_attach_and_detach_leave_one_scheduled_action(bench: Bench) -> None:
    queue = abandoned(bench)
    size = len(bench.engine.schedule._entries)
    for _ in range(100):
        bench.engine.detach(bench.consumer(queue).consumer)
    assert len(bench.engine.schedule._entries) <= size + 1


def test_without_the_setting_an_unused_subscription_never_expires_and_shows_its_last_use() -> None:
    bench = Bench(Policy())
    queue = abandoned(bench)
    later(bench, 1_000 * EXPIRY_MS)
    assert found(bench) is queue
    assert queue.unused_since_ms == bench.now_ms - 1_000 * EXPIRY_MS
