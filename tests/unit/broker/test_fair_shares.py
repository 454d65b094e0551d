"""One user cannot use up the selectors and patterns of all others."""

from __future__ import annotations

import tracemalloc

import pytest

from bascule.broker.addresses import PATTERN_STEPS_MAX, PATTERN_WORDS_PER_STEP, SELECTOR_STEPS_MAX
from bascule.broker.errors import ResourceLimit
from bascule.broker.fair_shares import Beyond, beyond
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.broker.selector_use import SELECTOR_CHAR_BYTES, counted_chars
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


def test_a_user_gets_half_of_the_steps_while_others_have_some(bench: Bench) -> None:
    subscribe(bench, "alice", "hers", "region = 'eu'")
    queues = fill(bench, "mallory", many(200))
    steps = sum(queue.wanting_steps for queue in queues)
    assert SELECTOR_STEPS_MAX * 0.4 < steps <= SELECTOR_STEPS_MAX / 2
    with pytest.raises(ResourceLimit, match=f"of user 'mallory', while others have some, of 'news' may take {SELECTOR_STEPS_MAX // 2}"):
        subscribe(bench, "mallory", "more", many(200))
    for queue in [*queues, bench.engine.addresses.subscriptions["hers"]]:
        bench.engine.delete_queue(queue)
    assert len(fill(bench, "mallory", many(200))) > len(queues)


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
    while memory.selectors.chars <= memory.selectors.chars_max / 4:
        consume(bench, "mallory", text)
    with pytest.raises(ResourceLimit, match="those of user 'mallory'"):
        consume(bench, "mallory", text)


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
        (100, 0, 0, None), (101, 0, 0, Beyond.ALL), (1, 50, 60, Beyond.SHARE), (10, 40, 60, None), (1, 0, 100, None), (25, 0, 100, None),
        (26, 0, 100, Beyond.ALL), (10, 20, 100, Beyond.ALL), (5, 20, 121, Beyond.ALL), (1, 100, 100, Beyond.ALL), (50, 50, 50, None),
    ],
)  # fmt: skip
def test_what_a_user_may_have(wanted: int, of_user: int, total: int, found: Beyond | None) -> None:
    assert beyond(wanted, of_user, total, 100, 0.5) is found


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
