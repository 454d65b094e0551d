"""Decisions about many messages stay in short turns if subscriptions change after the messages were sent, whatever they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bascule.broker import addresses, planned_sends
from bascule.broker.addresses import Diverts, ExclusiveDivert
from bascule.broker.errors import BindingsChanged, ResourceLimit
from bascule.broker.matching import EVALUATION_STEPS
from bascule.broker.policy import Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.transactions import LocalTransaction
from bascule.broker.turns import TURN_STEPS
from bascule.core.destination import Routing
from bascule.core.errors import TransactionRolledBack
from bascule.jms.sections import scan
from bascule.testing.broker import message_bytes
from tests.unit.broker.conftest import Bench

MESSAGES = 60
COSTLY = " or ".join(f"p like '%_%a{number}%b%c'" for number in range(25))
#: The first slice of work is done at once, and a turn may overdraw its steps by the last piece.
TURN_STEPS_MOST = 3 * TURN_STEPS


@pytest.fixture
def bench() -> Bench:
    return Bench(Policy(), turn_steps=TURN_STEPS)


def sent(bench: Bench, to: Callable[[int], str], count: int = MESSAGES) -> LocalTransaction:
    transaction = bench.engine.begin(b"1")
    for number in range(count):
        body = message_bytes(number, properties={"p": "x"})
        bench.engine.send(to(number), Routing.MULTICAST, body, scan(body), "client", bench.sender, number, transaction)
    bench.broker.settle()
    return transaction


def costly_subscriptions(bench: Bench, count: int = 10) -> list[BrokerQueue]:
    found = [bench.subscription(f"costly{number}", selector=f"{COSTLY} or p = 'x'") for number in range(count)]
    bench.broker.settle()
    return found


def evaluated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let all selectors match. Return a function that returns the steps of those that were evaluated since the last call."""
    steps: list[int] = []

    def wants(queue: BrokerQueue, *_: object) -> bool:
        steps.append(queue.wanting_steps)
        return True

    monkeypatch.setattr(bench.engine.deliveries, "wants", wants)

    def since() -> int:
        found = sum(steps)
        steps.clear()
        return found

    return since


def most_in_a_turn(bench: Bench, transaction: LocalTransaction, since: Callable[[], int]) -> int:
    """Plan a commit. Return the most steps of a turn by ``since``."""
    since()
    most = 0
    while not bench.engine.plan_commit(transaction):
        bench.engine.go_on()
        most = max(most, since())
    return max(most, since())


def test_short_commit_is_planned_if_costly_subscriptions_came_after_its_messages(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    transaction = sent(bench, lambda _: "t")
    subscriptions = costly_subscriptions(bench)
    since = evaluated(bench, monkeypatch)
    assert most_in_a_turn(bench, transaction, since) < TURN_STEPS_MOST
    answers: list[Any] = []
    bench.engine.commit(transaction, answers.append)
    assert since() == 0
    bench.broker.settle()
    assert answers == [None]
    assert [bench.waiting(each) for each in subscriptions] == [list(range(MESSAGES))] * len(subscriptions)


def test_short_commit_is_planned_if_its_routes_were_forgotten(bench: Bench) -> None:
    bench.subscription("s")
    transaction = sent(bench, lambda _: "t")
    assert bench.engine.plan_commit(transaction)
    assert transaction.plan is None
    bench.engine.addresses.forget_routes()
    assert bench.engine.plan_commit(transaction)  # so short that its first slice is the whole plan
    assert transaction.plan is not None


def test_subscription_without_wildcards_changes_no_route_but_its_own(bench: Bench) -> None:
    book = bench.engine.addresses

    def routes() -> dict[str, tuple[str, ...]]:
        return {address: tuple(queue.name for queue in book.route(address, Routing.MULTICAST).queues) for address in ("t1", "t2")}

    bench.subscription("first", "t1")
    assert routes() == {"t1": ("first",), "t2": ()}
    kept, kept_bytes = book.route("t1", Routing.MULTICAST), book.routes_bytes
    second = bench.subscription("second", "t2")
    assert routes() == {"t1": ("first",), "t2": ("second",)}
    bench.engine.delete_queue(second)
    assert routes() == {"t1": ("first",), "t2": ()}
    assert book.route("t1", Routing.MULTICAST) is kept
    assert book.routes_bytes == kept_bytes
    everything = bench.subscription("everything", "#")
    assert routes() == {"t1": ("first", "everything"), "t2": ("everything",)}
    bench.engine.delete_queue(everything)
    assert routes() == {"t1": ("first",), "t2": ()}


def test_planned_messages_are_planned_again_one_by_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.broker.local_transactions.PLANNED_STEPS", -1)
    transaction = sent(bench, lambda _: "t")
    while not bench.engine.plan_commit(transaction):
        bench.engine.go_on()
    subscriptions = costly_subscriptions(bench)
    since = evaluated(bench, monkeypatch)
    assert most_in_a_turn(bench, transaction, since) < TURN_STEPS_MOST
    bench.engine.commit(transaction, lambda _: None)
    assert since() == 0
    bench.broker.settle()
    assert [bench.waiting(each) for each in subscriptions] == [list(range(MESSAGES))] * len(subscriptions)


def test_commit_is_rolled_back_if_costly_subscriptions_change_in_each_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_sends, "ROUNDS_MAX", 2)
    monkeypatch.setattr(planned_sends, "FAILED_ROUNDS", 4)
    transaction = sent(bench, lambda _: "t", 20)
    subscriptions = costly_subscriptions(bench)
    since, most, changes = evaluated(bench, monkeypatch), 0, 0
    while not bench.engine.plan_commit(transaction):
        bench.engine.go_on()
        most, changes = max(most, since()), changes + 1
        bench.subscription(f"further{changes}")
    assert most < TURN_STEPS_MOST
    assert changes >= 4
    answers: list[Any] = []
    bench.engine.commit(transaction, answers.append)
    assert since() == 0
    bench.broker.settle()
    assert [type(answer) for answer in answers] == [TransactionRolledBack]
    assert isinstance(answers[0].cause, BindingsChanged)
    assert answers[0].cause.retriable
    assert [bench.waiting(each) for each in subscriptions] == [[]] * len(subscriptions)
    assert bench.engine.memory.plans_bytes == bench.engine.memory.transactions_bytes == 0
    assert all(queue.incoming == 0 for queue in bench.engine.addresses.queues.values())


@pytest.mark.parametrize(
    ("subscriptions", "address", "to", "count"), [(200, "t", "t", 400), (5, "t.#", "t.{}", 3000)], ids=["subscriptions", "topics"]
)
def test_long_commit_is_stored_although_an_unrelated_queue_comes_and_goes_in_each_turn(
    bench: Bench, subscriptions: int, address: str, to: str, count: int
) -> None:
    made = [bench.subscription(f"s{number}", address=address) for number in range(subscriptions)]
    transaction = sent(bench, lambda number: to.format(number), count)
    while not bench.engine.plan_commit(transaction):
        bench.engine.go_on()
        bench.engine.destinations.create_temporary("temp.x", Routing.ANYCAST)
        bench.engine.destinations.delete_temporary("temp.x")
    answers: list[Any] = []
    bench.engine.commit(transaction, answers.append)
    bench.broker.settle()
    assert answers == [None]
    assert [each.held_messages for each in made] == [count] * subscriptions


def test_joined_transactions_are_planned_if_costly_subscriptions_came_after_the_messages_of_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = sent(bench, lambda _: "t")
    subscriptions = costly_subscriptions(bench)
    transaction = sent(bench, lambda _: "t2", 1)
    bench.engine.local_transactions.join(transaction, other)
    since = evaluated(bench, monkeypatch)
    assert most_in_a_turn(bench, transaction, since) < TURN_STEPS_MOST
    bench.engine.commit(transaction, lambda _: None)
    assert since() == 0
    bench.broker.settle()
    assert [bench.waiting(each) for each in subscriptions] == [list(range(MESSAGES))] * len(subscriptions)


def test_evaluations_of_exclusive_diverts_are_steps_of_planning_again(bench: Bench) -> None:
    evaluations = 0

    def matches(_: object) -> bool:
        nonlocal evaluations
        evaluations += 1
        return False

    def since() -> int:
        nonlocal evaluations
        found, evaluations = evaluations * EVALUATION_STEPS, 0
        return found

    bench.use(Diverts(exclusive=tuple(ExclusiveDivert(f"d{number}", "t", matches) for number in range(100)), patterns=("t",), names=()))
    transaction = sent(bench, lambda _: "t")
    while not bench.engine.plan_commit(transaction):
        bench.engine.go_on()
    subscription = bench.subscription("late")
    assert most_in_a_turn(bench, transaction, since) < TURN_STEPS_MOST
    bench.engine.commit(transaction, lambda _: None)
    assert since() == 0
    bench.broker.settle()
    assert bench.waiting(subscription) == list(range(MESSAGES))


def test_searches_for_the_subscriptions_of_many_addresses_are_steps_of_a_plan(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"w{number}" for number in range(30)]
    transaction = sent(bench, lambda number: ".".join(["t", *words, str(number)]))
    for first in words:
        for second in words:
            bench.subscription(f"{first} {second}", address=f"t.#.{first}.#.{second}.#.none", durable=False)
    book = bench.engine.addresses
    before = book.searched

    def since() -> int:
        nonlocal before
        found, before = book.searched - before, book.searched
        return found

    assert most_in_a_turn(bench, transaction, since) < TURN_STEPS_MOST
    bench.engine.commit(transaction, lambda _: None)
    assert since() == 0
    assert book.searched > 5 * TURN_STEPS


def test_patterns_that_one_address_may_all_match_in_part_are_limited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PATTERN_STEPS_MAX", 3)
    for number in range(3):
        bench.subscription(f"s{number}", address=f"t.#.a.#.b{number}")
    with pytest.raises(ResourceLimit, match="fewer wildcards"):
        bench.subscription("one too many", address="t.#.a.*")
    bench.subscription("one wildcard", address="t.#.a")
    bench.subscription("at the end", address="t.*.a.#")
    bench.subscription("words", address="t.*.a.*")
