"""One user cannot use up the selectors, patterns and transactions of all others."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest

from bascule.broker import ready
from bascule.broker.addresses import PATTERN_STEPS_MAX, PATTERN_WORDS_PER_STEP, SELECTOR_STEPS_MAX
from bascule.broker.errors import ResourceLimit
from bascule.broker.fair_shares import Beyond, beyond
from bascule.broker.memory import QUEUE_BYTES
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.broker.selector_use import SELECTOR_CHAR_BYTES, counted_chars
from bascule.broker.transactions import LocalTransaction
from bascule.core.destination import Routing
from bascule.jms.selector import Selector, compile_selector
from bascule.testing.broker import Receiver
from tests.unit.broker.conftest import Bench

EURO, FACE = "\u20ac", "\U0001f600"


def stringed(length: int, character: str = "x", before: str = "a = ") -> str:
    return f"{before}'{character * length}'"


def subscribe(bench: Bench, user: str, name: str, selector: str = "", address: str = "news") -> BrokerQueue:
    destinations = bench.engine.destinations
    return destinations.create_queue(name, address, Routing.MULTICAST, durable=False, selector=selector, user=user)


def consume(bench: Bench, user: str, selector: str) -> QueueConsumer:
    return bench.engine.attach(bench.queue(), Receiver(0), compile_selector(selector), user)


def many(count: int, name: str = "p") -> str:
    return " OR ".join(f"{name}{number} = 1" for number in range(count))


def fill(bench: Bench, user: str, selector: str, address: str = "news") -> list[BrokerQueue]:
    """Subscribe until a subscription is refused."""
    queues: list[BrokerQueue] = []
    with pytest.raises(ResourceLimit):
        queues.extend(subscribe(bench, user, f"{user} {number}", selector, address) for number in range(10_000))
    return [queue for queue in bench.engine.addresses.queues.values() if queue.user == user]


@pytest.mark.parametrize("address", ["news", "news.*"])
def test_selectors_of_one_user_on_an_address_leave_steps_for_others(bench: Bench, address: str) -> None:
    queues = fill(bench, "mallory", many(200), address)
    assert sum(queue.wanting_steps for queue in queues) > SELECTOR_STEPS_MAX * 0.9
    subscribe(bench, "alice", "hers", "region = 'eu'", address)
    with pytest.raises(ResourceLimit, match="while others have some"):
        subscribe(bench, "mallory", "more", "a = 1", address)


def test_a_user_leaves_a_quarter_of_the_steps_while_others_have_some(bench: Bench) -> None:
    subscribe(bench, "monitor", "its", "region = 'eu'")
    queues = fill(bench, "app", many(200))
    steps = sum(queue.wanting_steps for queue in queues)
    assert SELECTOR_STEPS_MAX * 0.7 < steps <= SELECTOR_STEPS_MAX * 0.75
    text = f"of user 'app', while others have some and less than a quarter is free, of 'news' may take {SELECTOR_STEPS_MAX // 2}"
    with pytest.raises(ResourceLimit, match=text):
        subscribe(bench, "app", "more", many(200))
    fill(bench, "monitor", many(200))
    assert bench.engine.addresses._selector_steps.total["news"] > SELECTOR_STEPS_MAX * 0.95
    for queue in list(bench.engine.addresses.subscriptions.values()):
        bench.engine.delete_queue(queue)
    assert len(fill(bench, "app", many(200))) > len(queues)


def test_patterns_of_one_user_leave_room_for_others(bench: Bench) -> None:
    words = 200
    limit = PATTERN_STEPS_MAX // (words // PATTERN_WORDS_PER_STEP)
    for number in range(limit):
        subscribe(bench, "mallory", str(number), address=".".join(["*"] * (words - 1) + [str(number)]))
    with pytest.raises(ResourceLimit, match="all subscriptions"):
        subscribe(bench, "mallory", "more", address=".".join(["*"] * words))
    subscribe(bench, "alice", "hers", address=".".join(["*"] * words))


def test_selectors_of_the_consumers_of_one_user_leave_room_for_others(bench: Bench) -> None:
    memory = bench.engine.memory
    memory.limit(1 << 20)
    text = many(7)
    for number in range(1_000):
        if memory.selectors.chars + len(text) > memory.selectors.chars_max:
            break
        consume(bench, "mallory", text) if number % 2 else subscribe(bench, "mallory", str(number), text)
    with pytest.raises(ResourceLimit, match="all selectors together"):
        consume(bench, "mallory", text)
    hers = consume(bench, "alice", text)
    subscribe(bench, "alice", "hers", text)
    for consumer in list(bench.queue().consumers):
        if consumer is not hers:
            bench.engine.detach(consumer)
    for queue in list(bench.engine.addresses.subscriptions.values()):
        bench.engine.delete_queue(queue)
    bench.broker.settle()
    assert memory.selectors.chars == len(text)
    while memory.selectors.chars + len(text) <= memory.selectors.chars_max * 0.75:
        consume(bench, "mallory", text)
    with pytest.raises(ResourceLimit, match="the selectors of user 'mallory', while others have some"):
        consume(bench, "mallory", text)


def transact(bench: Bench, user: str, count: int) -> list[LocalTransaction]:
    """Send 4 KB in each of several transactions. Return those that were not refused."""
    found = [bench.engine.begin(f"{user} {number}".encode(), user) for number in range(count)]
    for transaction in found:
        bench.put("x" * 4_000, transaction=transaction, user=user)
    return [transaction for transaction in found if transaction.doomed is None]


def test_open_transactions_of_one_user_leave_memory_for_those_of_others(bench: Bench) -> None:
    memory = bench.engine.memory
    memory.limit(1 << 20)
    hers = transact(bench, "mallory", 100)
    assert 0.9 < memory.transactions_bytes / memory.transactions_max_bytes <= 1
    assert len(transact(bench, "alice", 4)) == 4
    for transaction in hers:
        bench.engine.rollback(transaction)
    assert len(hers) > len(transact(bench, "app", 100)) > len(hers) * 0.6
    refusal = next(str(error) for _, error in reversed(bench.sender.answers) if error)
    assert "the open transactions of user 'app', while others have some" in refusal
    for transaction in list(bench.engine.local_transactions.open.values()):
        bench.engine.rollback(transaction)
    assert (memory.transactions_bytes, memory.transactions_of) == (0, {})


def create(bench: Bench, user: str, count: int) -> int:
    """Create queues with long names until one is refused. Return their number."""
    created = 0
    with suppress(ResourceLimit):
        for created in range(1, count + 1):
            bench.engine.queue(f"{user} {created:03} ".ljust(1_000, FACE), user)
        return created
    return created - 1


def test_queues_of_one_user_leave_memory_for_others_also_after_a_restart(bench: Bench) -> None:
    memory = bench.engine.memory
    memory.limit(1 << 20)
    most = create(bench, "mallory", 1_000)
    assert 0.9 < most * (QUEUE_BYTES + 4_000) / memory.queues_max_bytes < 1
    bench.broker.settle()
    bench.broker.memory_bytes = 1 << 20
    bench.crash()
    assert create(bench, "mallory", 1_000) == most
    with pytest.raises(ResourceLimit, match="queues and subscriptions use"):
        bench.engine.queue("one more".ljust(1_000, FACE), "mallory")
    assert create(bench, "alice", 10) == 10
    assert create(bench, "", 100) == 100, "the owner creates what the configuration names"
    for queue in [queue for queue in bench.engine.addresses.queues.values() if queue.user == "mallory"]:
        bench.engine.delete_queue(queue)
    bench.broker.settle()
    assert most * 0.6 < create(bench, "app", 1_000) < most * 0.8


def test_groups_that_consumers_hold_are_counted(bench: Bench) -> None:
    bench.consumer(credit=100)
    for number in range(100):
        bench.put(number, group=f"g{number}")
    bench.broker.settle()
    assert bench.queue().indexed_entries > 90


@pytest.mark.interpreted  # replaces a constant
def test_different_selectors_of_one_user_on_a_queue_leave_some_for_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "SELECTORS_MAX", 8)
    consumers = [consume(bench, "mallory", f"a = {number}") for number in range(8)]
    with pytest.raises(ResourceLimit, match="the consumers of the queue may have 8 different selectors"):
        consume(bench, "mallory", "a = 8")
    for number in range(2):
        consume(bench, "alice", f"b = {number}")
    for consumer in consumers[4:]:
        bench.engine.detach(consumer)
    with pytest.raises(ResourceLimit, match="the consumers of user 'mallory', while others have some"):
        consume(bench, "mallory", "a = 8")
    consume(bench, "mallory", "a = 0")
    consume(bench, "alice", "b = 2")


def test_a_subscription_that_gets_another_user_counts_for_that_user(bench: Bench) -> None:
    queue = subscribe(bench, "anonymous", "s", "a = 1")
    use, address = bench.engine.memory.selectors, bench.engine.addresses
    address.change_user(queue, "ann")
    assert (use._chars_of, use.chars) == ({"ann": 5}, 5)
    assert list(address._selector_steps._of_user) == [("news", "ann")]
    bench.engine.delete_queue(queue)
    assert (use._chars_of, use.chars, address._selector_steps._of_user) == ({}, 0, {})


@pytest.mark.parametrize(
    ("wanted", "of_user", "total", "found"),
    [
        (100, 0, 0, None), (101, 0, 0, Beyond.ALL), (15, 50, 60, None), (16, 50, 60, Beyond.SHARE), (10, 40, 80, None),
        (11, 40, 80, Beyond.SHARE), (1, 0, 100, None), (25, 0, 100, None), (26, 0, 100, Beyond.ALL), (10, 20, 100, Beyond.ALL),
        (5, 20, 121, Beyond.ALL), (1, 100, 100, Beyond.ALL), (50, 50, 50, None),
    ],
)  # fmt: skip
def test_what_a_user_may_have(wanted: int, of_user: int, total: int, found: Beyond | None) -> None:
    assert beyond(wanted, of_user, total, 100) is found


@pytest.mark.parametrize(
    ("text", "chars"),
    [
        ("a = 1", 5), (stringed(64), 70), (stringed(15_000), 6 + 300), (stringed(1_500, EURO), 6 + 60),
        (stringed(1_500, FACE), 6 + 120), (stringed(500, before="a LIKE "), 509), (stringed(500, before="a lIkE  ") + " OR b", 515),
        ("a = 'it''s " + "x" * 300 + "' AND b = 'y'", 18 + 7),
    ],
)  # fmt: skip
def test_long_strings_of_a_selector_count_by_their_bytes(text: str, chars: int) -> None:
    assert counted_chars(text) == chars


@pytest.mark.parametrize("character", ["x", EURO, FACE])
@pytest.mark.parametrize("length", [65, 1_000, 60_000])
def test_the_counted_size_of_a_selector_with_a_long_string_covers_its_memory(character: str, length: int) -> None:
    compile_selector("warm = 'up'")
    text = stringed(length, character)
    tracemalloc.start()
    try:
        before_bytes = tracemalloc.get_traced_memory()[0]
        selector = Selector(text)
        taken_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    finally:
        tracemalloc.stop()
    assert selector.text == text
    assert taken_bytes + len(text.encode()) < SELECTOR_CHAR_BYTES * counted_chars(text) + 2_000
