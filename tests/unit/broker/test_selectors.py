from __future__ import annotations

import pytest

from bascule.broker import addresses
from bascule.broker.addresses import PATTERN_STEPS_MAX, PATTERN_WORDS_PER_STEP, SELECTOR_STEPS_MAX
from bascule.broker.errors import ResourceLimit
from bascule.broker.message import BrokerMessage
from bascule.broker.turns import Allowance
from bascule.core.destination import Routing
from bascule.jms.sections import APPLICATION_PROPERTIES, VALUE, header_bytes, scan, section_bytes
from bascule.jms.selector import compile_selector
from bascule.jms.selector.parser import STEPS_MAX
from tests.unit.broker.conftest import Bench


def fill_with_colours(bench: Bench, *contents: int) -> None:
    for content in contents:
        bench.put(content, properties={"colour": "red" if content % 2 else "blue"})
    bench.broker.settle()


def test_a_consumer_gets_only_messages_that_its_selector_matches(bench: Bench) -> None:
    fill_with_colours(bench, 1, 2, 3, 4)
    assert bench.got(bench.consumer(selector="colour = 'red'")) == [1, 3]
    assert bench.waiting(bench.queue()) == [2, 4]


def test_a_message_taken_by_a_selector_is_delivered_to_nobody_else(bench: Bench) -> None:
    fill_with_colours(bench, 1, 2, 3, 4)
    bench.consumer(selector="colour = 'red'")
    assert bench.got(bench.consumer()) == [2, 4]


def test_a_message_taken_by_another_consumer_is_not_delivered_to_a_selector(bench: Bench) -> None:
    picky = bench.consumer(credit=0, selector="colour = 'red'")
    fill_with_colours(bench, 1, 2, 3, 4)
    bench.consumer(credit=2)
    bench.broker.give(picky, 10)
    bench.broker.settle()
    assert bench.got(picky) == [3]


@pytest.mark.parametrize(("address", "other"), [("t", "u"), ("t.*", "t.a")])
def test_selectors_of_all_subscriptions_of_an_address_have_a_limit_of_steps(bench: Bench, address: str, other: str) -> None:
    slow = " OR ".join(f"p{number} = 1" for number in range(900))
    steps = compile_selector(slow).steps + 1
    subscriptions = [bench.subscription(f"s{number}", address, selector=slow) for number in range(SELECTOR_STEPS_MAX // steps)]
    with pytest.raises(ResourceLimit, match=rf"may take {SELECTOR_STEPS_MAX} for each message"):
        bench.subscription("more", address, selector=slow)
    assert "more" not in bench.engine.addresses.subscriptions
    bench.subscription("plain", address)
    bench.subscription("other", other, selector=slow)
    bench.engine.delete_queue(subscriptions[0])
    bench.subscription("more", address, selector=slow)


@pytest.mark.interpreted
def test_subscription_changes_its_selector_although_stored_ones_are_above_the_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, slower = (" OR ".join(f"p{number} = 1" for number in range(count)) for count in (100, 101))
    first = bench.subscription("first", selector=slow)
    wild = bench.subscription("wild", "t.*.*", selector=slow)
    bench.subscription("second", selector=slow)
    monkeypatch.setattr(addresses, "SELECTOR_STEPS_MAX", first.wanting_steps)  # an earlier version stored more
    monkeypatch.setattr(addresses, "PATTERN_STEPS_MAX", 0)
    for refused in (slower, f"{slow} OR a"):
        with pytest.raises(ResourceLimit, match="steps"):
            bench.subscription("first", selector=refused, replaces=first)
    with pytest.raises(ResourceLimit, match="steps"):
        bench.subscription("moved", "t.a", selector=slower, replaces=wild)
    other = bench.subscription("first", selector=slow.replace("1", "2"), replaces=first)
    less = bench.subscription("first", selector="p1 = 1", replaces=other)
    bench.subscription("first", selector="", replaces=less)
    assert [queue.selector_text for queue in bench.engine.addresses.subscriptions.values()].count("") == 1


@pytest.mark.interpreted
def test_subscription_with_a_long_pattern_is_replaced_at_the_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = ".".join(["*"] * 400)
    queue = bench.subscription("s", pattern)
    monkeypatch.setattr(addresses, "PATTERN_STEPS_MAX", 400 // PATTERN_WORDS_PER_STEP - 1)
    bench.subscription("s", pattern, selector="a = 1", replaces=queue)
    with pytest.raises(ResourceLimit, match="400 words"):
        bench.subscription("more", pattern)


def test_the_most_expensive_selector_is_allowed_for_the_only_subscription_of_an_address(bench: Bench) -> None:
    most = " OR ".join(["p LIKE '%ab_c%'"] * 7)
    most += " OR a" * (STEPS_MAX - compile_selector(most).steps)
    assert compile_selector(most).steps == STEPS_MAX == SELECTOR_STEPS_MAX
    bench.subscription("s", selector=most)
    with pytest.raises(ResourceLimit, match=f"has {STEPS_MAX + 1} steps"):
        bench.subscription("more", selector=most)
    with pytest.raises(ResourceLimit, match="has 2 steps"):
        bench.subscription("more", selector="a")


def test_selectors_of_subscriptions_are_counted_as_steps_of_each_message(bench: Bench) -> None:
    slow = " OR ".join(f"p{number} = 1" for number in range(100))
    steps = compile_selector(slow).steps
    for number in range(20):
        bench.subscription(f"s{number}", "t", selector=slow)
        bench.subscription(f"w{number}", "#", selector=slow)
    bench.fill("first", to="t")
    bench.engine.turns.steps = 100_000
    bench.engine.turns.begin_turn()
    bench.put("second", to="t")
    assert 40 * steps < bench.engine.turns.steps - bench.engine.turns.left < 41 * steps


def test_patterns_of_many_words_have_a_limit_for_all_subscriptions(bench: Bench) -> None:
    addresses = bench.engine.addresses
    words = 400
    steps = words // PATTERN_WORDS_PER_STEP
    patterns = [".".join(["*"] * (words - 1) + [str(number)]) for number in range(PATTERN_STEPS_MAX // steps)]
    subscriptions = [bench.subscription(f"s{number}", pattern) for number, pattern in enumerate(patterns)]
    long = ".".join(["#", *["a"] * (words - 1)])
    with pytest.raises(ResourceLimit, match="has 400 words"):
        bench.subscription("more", long)
    assert "more" not in addresses.subscriptions
    bench.subscription("short", "#.a")
    bench.subscription("plain", ".".join("a" * words))
    bench.engine.delete_queue(subscriptions[0])
    bench.subscription("more", long)


def test_selector_evaluates_each_message_of_deep_queue_once(bench: Bench) -> None:
    looked_at: list[BrokerMessage] = []

    def looked_for(message: BrokerMessage, _allowance: Allowance) -> bool:
        looked_at.append(message)
        return b"red" in bench.engine.bodies.read(message)

    picky = bench.consumer(credit=0, selector="colour = 'red'")
    bench.queue().ready.views["colour = 'red'"].matches = looked_for
    fill_with_colours(bench, *range(0, 4000, 2))
    fill_with_colours(bench, 4001)
    for _ in range(5):
        bench.broker.give(picky, 1)
        bench.broker.settle()
    assert bench.got(picky) == [4001]
    assert len(looked_at) == 2001


def test_a_message_released_by_a_consumer_with_a_selector_may_go_to_any_consumer(bench: Bench) -> None:
    fill_with_colours(bench, 1, 2, 3)
    picky = bench.consumer(selector="colour = 'red'")
    bench.engine.detach(picky.consumer)
    assert bench.got(bench.consumer()) == [1, 2, 3]


def test_a_released_message_may_go_to_a_selector_that_attached_meanwhile(bench: Bench) -> None:
    fill_with_colours(bench, 1, 2, 3)
    plain = bench.consumer()
    picky = bench.consumer(selector="colour = 'red'")
    bench.engine.detach(plain.consumer)
    bench.broker.settle()
    assert bench.got(picky) == [1, 3]


def test_a_view_is_removed_with_the_last_consumer_of_its_selector(bench: Bench) -> None:
    queue = bench.queue()
    first, second = (bench.consumer(selector="colour = 'red'") for _ in range(2))
    bench.engine.detach(first.consumer)
    assert set(queue.ready.views) == {"colour = 'red'"}
    bench.engine.detach(second.consumer)
    assert not queue.ready.views


def test_a_view_and_a_queue_forget_messages_that_others_took(bench: Bench) -> None:
    fill_with_colours(bench, 0)  # waits before all messages that the selector takes
    picky, plain = bench.consumer(credit=0, selector="colour = 'red'"), bench.consumer(credit=0)
    for number in range(1, 2001, 2):
        fill_with_colours(bench, number)
        bench.broker.give(picky, 1)
        bench.broker.settle()
        message = picky.messages[-1]
        bench.engine.give_back(picky.consumer, message, failed=False)
        if number % 4 == 1:
            bench.broker.give(plain, 1)
            bench.broker.settle()
            bench.engine.give_back(plain.consumer, plain.messages[-1], failed=False)
        bench.broker.give(picky, 1)
        bench.broker.settle()
        bench.acknowledge(picky, -1)
    assert bench.waiting(bench.queue()) == [0]
    assert not bench.queue().ready.views["colour = 'red'"].kept
    assert len(bench.queue().ready.line(4).head) == 1


def test_selector_delivers_messages_by_priority(bench: Bench) -> None:
    for content, priority in ((1, 4), (3, 9), (5, 4)):
        bench.put(content, priority=priority, properties={"colour": "red"})
    bench.broker.settle()
    assert bench.got(bench.consumer(selector="colour = 'red'")) == [3, 1, 5]


def test_a_message_with_unreadable_properties_matches_no_selector_and_does_no_harm(bench: Bench) -> None:
    good = section_bytes(APPLICATION_PROPERTIES, {"colour": "red"})
    broken = good.replace(b"red", b"\xff\xfe\xfd")
    body = header_bytes(True) + broken + section_bytes(VALUE, "x")
    picky = bench.consumer(selector="colour = 'red'")
    bench.subscription("s", selector="colour = 'red'")
    bench.broker.send("q", body, bench.sender, 1, facts=scan(header_bytes(True)))
    fill_with_colours(bench, 1)
    assert bench.got(picky) == [1]
    assert bench.got(bench.consumer()) == ["x"]


#: Application properties that an earlier version did not examine: a list with an invalid item, and a truncated map.
UNREADABLE = (bytes.fromhex("005374c10402a1ff41"), bytes.fromhex("005374c103023f3f"))


@pytest.mark.parametrize("properties", UNREADABLE)
def test_unreadable_application_properties_match_no_selector_and_affect_no_other_message(bench: Bench, properties: bytes) -> None:
    bad = header_bytes(durable=True, priority=4, ttl_ms=0) + properties + section_bytes(VALUE, "bad")
    facts = scan(header_bytes(durable=True))
    bench.subscription("s", selector="colour = 'red'", subscription="s")
    picky = bench.consumer(selector="colour = 'red'")
    transaction = bench.engine.begin(b"1")
    for where in ("q", "t"):
        bench.broker.send(where, bad, bench.sender, "bad", routing=Routing(where == "t"), facts=facts)
        bench.put("good", to=where, properties={"colour": "red"})
        bench.broker.send(where, bad, bench.sender, "bad", routing=Routing(where == "t"), transaction=transaction, facts=facts)
    ends: list[object] = []
    bench.engine.commit(transaction, ends.append)
    bench.broker.settle()
    assert bench.sender.accepted_tokens.count("bad") == 4
    assert ends == [None]
    assert bench.got(picky) == ["good"]
    assert bench.waiting(bench.engine.addresses.subscriptions["s"]) == ["good"]
    assert bench.waiting(bench.queue()) == ["bad", "bad"]


def test_selector_of_subscription_is_compiled_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr("bascule.broker.queue.compile_selector", lambda text: compiled.append(text) or compile_selector(text))
    text = " OR ".join(["colour = 'red'"] * 100)
    queue = bench.subscription("s", selector=text)
    for content in range(4):
        bench.put(content, to="t", properties={"colour": "red" if content % 2 else "blue"})
    bench.broker.settle()
    assert bench.waiting(queue) == [1, 3]
    assert compiled == [text]
