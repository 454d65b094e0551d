"""A reload of settings with thousands of queues and rules: in short turns of the event loop, and partly in another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bascule.broker.errors import ResourceLimit
from bascule.broker.policy_change import CREATE_STEPS, LOOK_STEPS, change_policy
from bascule.broker.turns import TURN_STEPS
from bascule.core.address_index import AddressIndex
from bascule.testing.broker import BrokerInMemory
from tests.support.speed import SLOWNESS
from tests.unit.server.served import run_async
from tests.unit.server.test_reload import Reloading

#: Limit on a turn of the event loop, in processor time.
TURN_S = 0.05 * SLOWNESS


def turns_until_done(broker: BrokerInMemory) -> int:
    turns = 1
    while broker.engine.pending:
        broker.engine.go_on()
        turns += 1
    return turns


def test_new_queues_of_the_settings_are_created_over_several_turns() -> None:
    broker = BrokerInMemory(turn_steps=TURN_STEPS)
    names = tuple(f"q{number}" for number in range(5 * TURN_STEPS // CREATE_STEPS))
    change_policy(broker.engine, replace(broker.engine.policy, queues=names))
    assert len(broker.engine.addresses.anycast) <= TURN_STEPS // CREATE_STEPS + 1
    assert turns_until_done(broker) >= 5
    assert set(names) <= broker.engine.addresses.anycast.keys()


def test_queues_of_settings_that_are_replaced_meanwhile_are_not_created() -> None:
    broker = BrokerInMemory(turn_steps=TURN_STEPS)
    policy = broker.engine.policy
    names = tuple(f"q{number}" for number in range(5 * TURN_STEPS // CREATE_STEPS))
    change_policy(broker.engine, replace(policy, queues=names))
    begun = len(broker.engine.addresses.anycast)
    change_policy(broker.engine, replace(policy, queues=("other",)))
    turns_until_done(broker)
    assert "other" in broker.engine.addresses.anycast
    assert len(broker.engine.addresses.anycast) == begun + 1


def test_queue_that_cannot_be_created_any_more_is_reported() -> None:
    broker = BrokerInMemory()
    policy = replace(broker.engine.policy, queues=("one", "two"), queues_max=len(broker.engine.addresses.queues) + 1)
    refused: dict[str, ResourceLimit] = {}
    change_policy(broker.engine, policy, refused.__setitem__)
    turns_until_done(broker)
    assert list(refused) == ["two"]


def test_existing_queues_follow_other_rules_over_several_turns() -> None:
    broker = BrokerInMemory(turn_steps=TURN_STEPS)
    queues = [broker.engine.queue(f"q{number}") for number in range(5 * TURN_STEPS // LOOK_STEPS)]
    broker.settle()
    change_policy(broker.engine, replace(broker.engine.policy, rules=(("q1", {"max_messages": 7}),)))
    assert turns_until_done(broker) >= 5
    assert [queue.settings.max_messages for queue in queues[:3]] == [0, 7, 0]


def test_no_turn_is_long_while_thousands_of_queues_follow_thousands_of_rules() -> None:
    """Finding the settings of a queue takes 50 microseconds; a turn has 10,000."""
    broker = BrokerInMemory(turn_steps=TURN_STEPS)
    for number in range(3_000):
        broker.engine.queue(f"orders.{number}.new")
    broker.settle()
    policy = replace(broker.engine.policy, rules=tuple((f"orders.{number}.#", {"max_messages": 7}) for number in range(3_000)))
    policy.make_index()
    begun_s = time.thread_time()
    change_policy(broker.engine, policy)
    turns = turns_until_done(broker)
    assert turns > 10
    assert (time.thread_time() - begun_s) / turns < TURN_S


@run_async
async def test_indexes_of_rules_are_made_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Reloading(tmp_path, "")
    threads: list[threading.Thread] = []
    init = AddressIndex.__init__

    def noted(self: AddressIndex[Any], patterns: Iterable[tuple[str, Any]] = ()) -> None:
        threads.append(threading.current_thread())
        init(self, patterns)

    monkeypatch.setattr(AddressIndex, "__init__", noted)
    await broker.reload('[[permission]]\nmatch = "a"\nsend = ["*"]\n[[address]]\nmatch = "a"\nmax_messages = 7\n[[queue]]\nname = "a"\n')
    assert broker.node.engine.queue("a").settings.max_messages == 7
    assert len(threads) >= 2
    assert threading.main_thread() not in threads
