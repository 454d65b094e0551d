"""Old messages that were moved to the store are loaded from the store."""

from __future__ import annotations

import pytest

from bascule.broker.policy import AddressPolicy, Policy
from bascule.journal.errors import DamagedRecord
from tests.unit.broker.conftest import Bench
from tests.unit.broker.store_moves import load, moved, traffic


def test_an_old_message_is_loaded_from_the_store_and_only_the_needed_part_of_the_journal_is_read(bench: Bench) -> None:
    bench.fill("old", group="g", priority=7)
    bench.fill("older than its time", delivery_delay_ms=1_000)
    traffic(bench, 20)
    bench.fill("young", priority=7)
    taken, stored = moved(bench)
    assert len(stored) == 2
    assert taken.first_offset() > 20
    engine = load(bench, taken, stored).engine
    assert [bench.content(message) for message in engine.queue("q").ready] == ["old", "young"]
    assert [message.group for message in engine.queue("q").ready] == ["g", None]
    assert [bench.content(message) for message in engine.queue("q").delayed] == ["older than its time"]


def test_message_of_several_subscriptions_is_stored_once_and_loaded_into_each(bench: Bench) -> None:
    bench.subscription("one")
    bench.subscription("two")
    bench.fill("news", to="t")
    traffic(bench, 20)
    taken, stored = moved(bench)
    assert len(stored) == 1
    engine = load(bench, taken, stored).engine
    for name in ("one", "two"):
        assert [bench.content(message) for message in engine.addresses.subscriptions[name].ready] == ["news"]


def failed_once(bench: Bench, subscription: str) -> None:
    """Let one subscription's delivery fail and wait for its next try; the other's message waits for a consumer."""
    for name in ("one", "two"):
        bench.subscription(name)
    bench.fill("news", to="t")
    consumer = bench.consumer(bench.engine.addresses.subscriptions[subscription])
    bench.engine.give_back(consumer.consumer, consumer.messages[0], failed=True)
    bench.engine.detach(consumer.consumer)
    bench.broker.settle()
    assert len(bench.engine.addresses.subscriptions[subscription].delayed) == 1


@pytest.mark.parametrize("failed", ["one", "two"])
def test_a_message_with_a_redelivery_delay_is_stored_with_its_count_and_delays_no_other_subscription(failed: str) -> None:
    bench = Bench(Policy(AddressPolicy(redelivery_delay_ms=10_000)))
    failed_once(bench, failed)
    traffic(bench, 20)
    taken, stored = moved(bench)
    assert len(stored) == 1
    engine = load(bench, taken, stored).engine
    for name in ("one", "two"):
        queue = engine.addresses.subscriptions[name]
        assert [(bench.content(message), queue.delivery_count(message)) for message in queue.ready] == [("news", int(name == failed))]


def test_a_delayed_message_is_stored_with_its_delivery_time_even_after_a_crash(bench: Bench) -> None:
    bench.fill("later", delivery_delay_ms=1_000)
    traffic(bench, 20)
    bench.fill("young")
    bench.consumer()  # writes a reservation
    bench.crash()
    taken, stored = moved(bench)
    assert stored
    assert [bench.content(message) for message in load(bench, taken, stored).engine.queue("q").delayed] == ["later"]


def test_a_missing_stored_message_stops_the_load_and_is_named(bench: Bench) -> None:
    bench.fill("old")
    traffic(bench, 20)
    taken, stored = moved(bench)
    (mid,) = stored
    with pytest.raises(DamagedRecord, match=f"message {mid} of snapshot {taken.id} is not in the store"):
        load(bench, taken, {})
