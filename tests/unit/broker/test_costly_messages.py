"""A turn stays short whatever a message consists of, because the real cost of each message is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bascule.amqp.types import Symbol, ULong
from bascule.broker import administration
from bascule.broker.message import PRIORITY_MAX, Bodies, BodyOwner, BrokerMessage
from bascule.broker.policy import DROP, AddressPolicy, Policy
from bascule.broker.turns import TURN_STEPS
from bascule.core.destination import Routing
from bascule.jms.annotate import DELIVERIES, MOVED_AT, ORIGINAL_ADDRESS, ORIGINAL_QUEUE, ORIGINAL_ROUTING, REASON
from bascule.jms.checks import ANNOTATION_ITEMS_MAX, APPLICATION_PROPERTIES_MAX, BODY_SECTIONS_MAX
from bascule.jms.lookup import selector_lookup
from bascule.jms.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    MESSAGE_ANNOTATIONS,
    VALUE,
    head_of,
    header_bytes,
    scan,
    section_bytes,
)
from bascule.jms.selector import compile_selector
from bascule.testing.broker import Receiver, message_bytes
from tests.support.costs import calls_of
from tests.unit.broker.conftest import START_MS, Bench

COUNT = 200
PROPERTIES = {f"p{number}": number for number in range(APPLICATION_PROPERTIES_MAX)}
ANNOTATIONS = {Symbol(f"x-opt-{number}"): ULong(number) for number in range(ANNOTATION_ITEMS_MAX // 2)}
ANNOTATED = section_bytes(MESSAGE_ANNOTATIONS, ANNOTATIONS) + section_bytes(VALUE, "x")
SECTIONS = header_bytes(False) + section_bytes(APPLICATION_PROPERTIES, {"a": 1}) + section_bytes(DATA, b"x") * BODY_SECTIONS_MAX


class Store:
    """A body store that counts the bytes that are read."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.read_bytes = 0

    def put(self, body: bytes, owner: BodyOwner) -> int:
        self.bodies.append(body)
        return len(self.bodies) - 1

    def get(self, handle: int, size_bytes: int) -> bytes:
        self.read_bytes += size_bytes
        return self.bodies[handle]

    def free(self, handle: int, size_bytes: int) -> None:
        self.bodies[handle] = b""


def fill(bench: Bench, body: bytes, count: int = COUNT) -> None:
    for number in range(count):
        bench.broker.send("q", body, bench.sender, number)
    bench.broker.settle()


def most_in_a_turn(bench: Bench, count: Callable[[], int]) -> int:
    """Run turns of a broker process until nothing is left to do. Return the largest increase of the count in one turn."""
    bench.engine.turns.steps = TURN_STEPS
    bench.engine.turns.begin_turn()
    most, turns = 0, 0
    while bench.engine.pending or bench.broker.in_flight or not turns:
        before = count()
        bench.broker.flush()
        bench.broker.confirm(len(bench.broker.in_flight))
        most, turns = max(most, count() - before), turns + 1
    return most


def test_search_examines_fewer_messages_in_a_turn_if_they_have_many_properties(bench: Bench) -> None:
    fill(bench, message_bytes("x", properties=PROPERTIES))
    bench.broker.attach(bench.queue(), 10, selector=compile_selector("a = 1"))
    (view,) = bench.queue().ready.views.values()
    seen: list[BrokerMessage] = []
    matches = view.matches
    view.matches = lambda message, allowance: seen.append(message) or matches(message, allowance)  # type: ignore[func-returns-value]
    assert most_in_a_turn(bench, lambda: len(seen)) < 60
    assert len(seen) == COUNT


def test_search_and_purge_read_few_large_spilled_bodies_in_turn(policy: object) -> None:
    store = Store()
    bench = Bench(policy, bodies=lambda size: Bodies(store, size), memory_bytes=64 << 10)  # type: ignore[arg-type]
    fill(bench, message_bytes("x" * 1_000_000, durable=False), 50)
    bench.broker.attach(bench.queue(), 10, selector=compile_selector("a = 1"))
    assert most_in_a_turn(bench, lambda: store.read_bytes) < 20_000_000
    assert store.read_bytes >= 50_000_000
    store.read_bytes = 0
    steps = list(administration.purge(bench.engine, bench.queue(), compile_selector("a = 1")))
    assert len(steps) > 3
    assert store.read_bytes >= 50_000_000


def test_turn_delivers_fewer_messages_if_many_selector_views_are_updated(bench: Bench) -> None:
    fill(bench, message_bytes("x", durable=False))
    for number in range(1_000):
        receiver = Receiver(0)
        receiver.consumer = bench.engine.attach(bench.queue(), receiver, compile_selector(f"a = {number}"))
    consumer = bench.broker.attach(bench.queue(), COUNT)
    assert most_in_a_turn(bench, lambda: len(consumer.messages)) < 60
    assert len(consumer.messages) == COUNT


def many_views(bench: Bench) -> None:
    """Let 1,000 selectors have passed over all messages, so that each returned message goes into 1,000 views."""
    for number in range(1_000):
        receiver = Receiver(0)
        receiver.consumer = bench.engine.attach(bench.queue(), receiver, compile_selector(f"a = {number}"))
    for view in bench.queue().ready.views.values():
        view._seen = [bench.engine.next_position] * (PRIORITY_MAX + 1)


@pytest.mark.parametrize("failed", [False, True])
def test_turn_returns_fewer_messages_if_they_visit_many_selectors(bench: Bench, failed: bool) -> None:
    fill(bench, message_bytes("x", durable=False))
    many_views(bench)
    consumer = bench.broker.attach(bench.queue(), COUNT)
    bench.broker.settle()
    assert len(consumer.messages) == COUNT
    bench.engine.turns.steps = TURN_STEPS
    bench.engine.turns.begin_turn()
    bench.engine.detach(consumer.consumer, failed=failed)
    assert bench.queue().ready.count < 60
    assert most_in_a_turn(bench, lambda: bench.queue().ready.count) < 60
    assert bench.queue().ready.count == COUNT


def test_turn_returns_fewer_messages_of_a_group_if_they_visit_many_selectors(bench: Bench) -> None:
    holder, other = bench.consumer(credit=1), bench.consumer(credit=0)
    for number in range(COUNT + 1):
        bench.put(number, group="g", durable=False)
    bench.broker.give(other, 1)
    bench.broker.settle()
    queue = bench.queue()
    assert queue.groups is not None
    assert queue.groups.count == COUNT
    many_views(bench)
    bench.engine.detach(other.consumer, failed=False)
    bench.engine.turns.steps = TURN_STEPS
    bench.engine.turns.begin_turn()
    bench.engine.detach(holder.consumer, failed=False)
    assert most_in_a_turn(bench, lambda: -queue.groups.count if queue.groups is not None else 0) < 60
    assert queue.groups.count == 0
    assert queue.ready.count == COUNT + 1


def test_send_drops_fewer_messages_if_they_visit_many_selectors() -> None:
    bench = Bench(Policy(AddressPolicy(when_full=DROP, max_bytes=50_000)))
    fill(bench, message_bytes("x", durable=False))
    many_views(bench)
    bench.put("x" * 60_000, durable=False)
    bench.engine.turns.steps = TURN_STEPS
    bench.engine.turns.begin_turn()
    before = bench.engine.counters.dropped
    bench.put("new", durable=False)
    assert 0 < bench.engine.counters.dropped - before < 60
    assert bench.queue().dropping
    assert most_in_a_turn(bench, lambda: bench.engine.counters.dropped) < 120
    assert not bench.queue().full()


@pytest.mark.parametrize("body", [message_bytes("x"), header_bytes(False) + ANNOTATED], ids=["plain", "annotated"])
def test_turn_dead_letters_few_messages_of_a_transaction_that_is_rolled_back(body: bytes) -> None:
    bench = Bench(Policy(AddressPolicy(deliveries_max=1)))
    fill(bench, body)
    consumer = bench.consumer(credit=COUNT)
    transaction = bench.engine.begin(b"1")
    for message in consumer.messages:
        bench.engine.acknowledge_in(transaction, consumer.consumer, message)
    bench.engine.turns.steps = TURN_STEPS
    bench.engine.turns.begin_turn()
    bench.engine.rollback(transaction)
    most = 210 if body is not ANNOTATED and len(body) < 1_000 else 40
    assert bench.engine.counters.dead_lettered < most
    assert most_in_a_turn(bench, lambda: bench.engine.counters.dead_lettered) < most
    assert bench.engine.counters.dead_lettered == COUNT


def test_turn_delivers_few_large_messages(bench: Bench) -> None:
    fill(bench, message_bytes("x" * 1_000_000, durable=False))
    consumer = bench.broker.attach(bench.queue(), COUNT)
    assert most_in_a_turn(bench, lambda: len(consumer.messages)) < 60
    assert len(consumer.messages) == COUNT


def test_turn_expires_fewer_messages_when_messages_have_many_annotations(bench: Bench) -> None:
    fill(bench, header_bytes(False, ttl_ms=1_000) + ANNOTATED)
    bench.now_ms = START_MS + 60_000
    bench.engine.turns.steps = TURN_STEPS
    bench.engine.turns.begin_turn()
    bench.engine.tick()
    assert most_in_a_turn(bench, lambda: bench.engine.counters.expired) < 40
    assert bench.engine.counters.expired == COUNT


def test_administration_step_returns_fewer_dead_letters_when_messages_have_many_annotations(bench: Bench) -> None:
    fill(bench, header_bytes(False) + ANNOTATED)
    consumer = bench.consumer(credit=COUNT)
    for message in consumer.messages:
        bench.engine.reject(consumer.consumer, message)
    bench.broker.settle()
    dead = bench.queue(bench.engine.policy.of("q").dead_letter_address)
    assert dead.ready.count == COUNT
    done = [progress.done for progress in map(_copied, administration.return_dead_letters(bench.engine, dead))]
    assert done[0] < 40
    assert done[-1] == COUNT


@pytest.mark.interpreted
def test_annotations_of_a_dead_letter_are_read_in_one_pass(bench: Bench) -> None:
    names = (ORIGINAL_ADDRESS, ORIGINAL_QUEUE, ORIGINAL_ROUTING, REASON, DELIVERIES, MOVED_AT)
    annotations = {**ANNOTATIONS, **{Symbol(name): "x" for name in names}}
    message = BrokerMessage(section_bytes(MESSAGE_ANNOTATIONS, annotations) + section_bytes(VALUE, "x"))
    assert administration.dead_letter(bench.engine, message)["reason"] == "x"
    assert calls_of(lambda: administration.dead_letter(bench.engine, message)) < 5 * len(annotations)


def _copied(progress: administration.Progress) -> administration.Progress:
    return administration.Progress(progress.done)


@pytest.mark.parametrize("read", [lambda: selector_lookup(SECTIONS)("a"), lambda: head_of(SECTIONS)], ids=["selector", "delivery"])
def test_reading_the_head_of_a_message_does_not_examine_its_body_sections(read: Callable[[], object]) -> None:
    assert scan(SECTIONS)
    assert calls_of(read) < 100


@pytest.mark.interpreted
def test_properties_of_a_message_are_read_once_for_all_subscriptions(bench: Bench) -> None:
    body, facts = message_bytes("x", properties=PROPERTIES), scan(message_bytes("x"))

    def send() -> None:
        bench.broker.send("t", body, bench.sender, 1, routing=Routing.MULTICAST, facts=facts)

    bench.subscription("first", durable=False, selector="a = 1")
    send()
    one = calls_of(send)
    for number in range(50):
        bench.subscription(f"s{number}", durable=False, selector="a = 1")
    send()
    assert calls_of(send) < 2 * one


def test_unreadable_message_is_matched_by_none_of_several_subscriptions(bench: Bench) -> None:
    subscriptions = [bench.subscription(f"s{number}", selector="region IS NULL") for number in range(3)]
    facts = scan(message_bytes("x"))
    bench.broker.send("t", b"\x00\x53\x74\xc1\x7f", bench.sender, 1, routing=Routing.MULTICAST, facts=facts)
    bench.broker.settle()
    assert [subscription.held_messages for subscription in subscriptions] == [0, 0, 0]
