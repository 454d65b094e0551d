"""The users of the durable subscriptions of each client id."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.subscription_names import subscription_queue
from tests.unit.broker.conftest import Bench

EXPIRY_MS = 100_000


@pytest.fixture
def policy() -> Policy:
    return Policy(AddressPolicy(subscription_expiry_ms=EXPIRY_MS))


def subscribed(bench: Bench, client: str | None, name: str, user: str, **options: Any) -> BrokerQueue:
    return bench.subscription(subscription_queue(client, name, durable=True), subscription=name, user=user, **options)


def users(bench: Bench) -> dict[str, dict[str, int]]:
    return {client: dict(count) for client, count in bench.engine.addresses.subscribers.items()}


def test_each_client_id_has_the_users_of_its_durable_subscriptions(bench: Bench) -> None:
    queues = [
        subscribed(bench, client, name, user)
        for client, name, user in (("shop", "one", "ann"), ("shop", "two", "ann"), ("shop", "three", "bob"), ("a.b", "c.d", ""))
    ]
    assert users(bench) == {"shop": {"ann": 2, "bob": 1}, "a.b": {"": 1}}
    bench.engine.delete_queue(queues[0])
    bench.engine.delete_queue(queues[2])
    assert users(bench) == {"shop": {"ann": 1}, "a.b": {"": 1}}
    bench.engine.delete_queue(queues[1])
    bench.engine.delete_queue(queues[3])
    assert users(bench) == {}


def test_other_queues_give_no_client_id_to_a_user(bench: Bench) -> None:
    bench.queue("shop.orders")
    subscribed(bench, None, "shop.global", "ann", shared=True)
    bench.subscription("shop.former", subscription="shop.former", user="ann")  # of an earlier version
    bench.subscription("shop.news|volatile", subscription="news", user="ann", durable=False)
    assert users(bench) == {}


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_users_of_a_client_id_are_the_same_after_a_restart(bench: Bench, from_snapshot: bool) -> None:
    subscribed(bench, "shop", "one", "ann")
    deleted = subscribed(bench, "desk", "two", "ann")
    bench.broker.settle()
    if from_snapshot:
        bench.broker.take_snapshot()
        bench.broker.settle()
        assert bench.broker.snapshots
    bench.engine.delete_queue(deleted)
    subscribed(bench, "till", "three", "bob")
    bench.broker.settle()
    before = users(bench)
    bench.crash()
    assert users(bench) == before == {"shop": {"ann": 1}, "till": {"bob": 1}}


def test_subscription_that_is_lost_in_a_crash_gives_no_client_id_to_its_user(bench: Bench) -> None:
    subscribed(bench, "shop", "one", "ann")
    bench.broker.flush()
    bench.crash(stored=0)
    assert users(bench) == {}


def test_subscription_that_another_user_replaces_moves_its_client_id(bench: Bench) -> None:
    former = subscribed(bench, "shop", "one", "")
    subscribed(bench, "shop", "one", "ann", replaces=former)
    assert users(bench) == {"shop": {"ann": 1}}


def test_expired_subscription_releases_its_client_id(bench: Bench) -> None:
    queue = subscribed(bench, "shop", "one", "ann")
    bench.engine.detach(bench.consumer(queue).consumer)
    bench.now_ms += EXPIRY_MS
    bench.engine.tick()
    bench.broker.settle()
    assert users(bench) == {}
