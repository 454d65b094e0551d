"""Commits that are planned in pieces and decide by the bindings at the time of the commit."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest

from bascule.broker import branches, local_transactions, planned_sends
from bascule.broker.addresses import Diverts, ExclusiveDivert
from bascule.broker.branch_entries import PreparePlan
from bascule.broker.commit_plan import CommitPlan
from bascule.broker.containment import ErrorContainment
from bascule.broker.errors import JournalUnavailable
from bascule.broker.planned_sends import PIECE_PLACES
from bascule.broker.transactions import LocalTransaction
from bascule.broker.turns import TURN_STEPS
from bascule.core.errors import TransactionRolledBack
from bascule.core.xid import Xid
from bascule.jms.sections import scan
from bascule.journal.branches import Ending
from bascule.journal.records import MESSAGES_PER_RECORD_MAX
from tests.support.costs import quiet
from tests.support.speed import SLOWNESS
from tests.unit.broker.conftest import Bench

#: Processor time of one turn for the largest possible transaction. Usual ones have a hundredth of it.
TURN_S_MAX = 0.05 * SLOWNESS
XID = Xid(7, b"g", b"b")
MANY = 60


def transaction_of(bench: Bench, *contents: Any, to: str = "q", **options: Any) -> LocalTransaction:
    transaction = bench.engine.begin(b"1")
    for content in contents:
        bench.put(content, to=to, transaction=transaction, **options)
    bench.broker.settle()
    return transaction


@pytest.fixture(autouse=True)
def _every_commit_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_transactions, "PLANNED_STEPS", -1)


def planned(bench: Bench, transaction: LocalTransaction) -> LocalTransaction:
    while not bench.engine.plan_commit(transaction):
        bench.engine.go_on()
    return transaction


def half_planned(bench: Bench, transaction: LocalTransaction) -> LocalTransaction:
    """Plan a part of a commit."""
    bench.engine.turns.steps = 300
    bench.engine.turns.begin_turn()
    assert not bench.engine.plan_commit(transaction)
    assert isinstance(transaction.plan, CommitPlan)
    assert 0 < transaction.plan.count < len(transaction.drafts)
    return transaction


def commit(bench: Bench, transaction: LocalTransaction) -> list[Any]:
    answers: list[Any] = []
    bench.engine.commit(transaction, answers.append)
    bench.broker.settle()
    return answers


def test_plan_evaluates_selectors_and_commit_does_not_evaluate_them_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    wants = bench.engine.deliveries.wants
    monkeypatch.setattr(bench.engine.deliveries, "wants", lambda queue, *rest: asked.append(queue.name) or wants(queue, *rest))
    red = bench.subscription("red", selector="colour = 'red'")
    transaction = planned(bench, transaction_of(bench, 1, 2, to="t", properties={"colour": "red"}))
    assert asked == ["red", "red"]
    assert commit(bench, transaction) == [None]
    assert asked == ["red", "red"]
    assert bench.waiting(red) == [1, 2]


def test_subscription_created_between_plan_and_commit_gets_the_messages(bench: Bench) -> None:
    first = bench.subscription("first")
    transaction = planned(bench, transaction_of(bench, 1, 2, to="t"))
    second = bench.subscription("second")
    commit(bench, transaction)
    assert (bench.waiting(first), bench.waiting(second)) == ([1, 2], [1, 2])
    bench.crash()
    assert [bench.waiting(queue) for queue in bench.engine.addresses.subscriptions.values()] == [[1, 2], [1, 2]]


def test_queue_deleted_between_plan_and_commit_is_recreated(bench: Bench) -> None:
    transaction = planned(bench, transaction_of(bench, 1, 2))
    bench.engine.delete_queue(bench.queue())
    bench.broker.settle()
    commit(bench, transaction)
    assert bench.waiting(bench.queue()) == [1, 2]
    bench.crash()
    assert bench.waiting(bench.queue()) == [1, 2]


def test_queue_deleted_before_the_plan_is_recreated_by_the_commit(bench: Bench) -> None:
    transaction = transaction_of(bench, 1, 2)
    bench.engine.delete_queue(bench.queue())
    bench.broker.settle()
    planned(bench, transaction)
    assert "q" not in bench.engine.addresses.anycast
    commit(bench, transaction)
    bench.crash()
    assert bench.waiting(bench.queue()) == [1, 2]


def test_divert_added_between_plan_and_commit_takes_the_messages(bench: Bench) -> None:
    transaction = planned(bench, transaction_of(bench, 1, 2))
    bench.use(Diverts(exclusive=(ExclusiveDivert("away", "q", lambda _: True),), patterns=("q",)))
    commit(bench, transaction)
    assert bench.waiting(bench.queue()) == []


def test_non_persistent_message_is_committed_if_the_journal_stalls_after_the_plan(bench: Bench) -> None:
    bench.use(Diverts(patterns=("q",)))
    transaction = planned(bench, transaction_of(bench, 1, durable=False))
    bench.engine.stalled = JournalUnavailable("Kafka is away")
    bench.engine.commit(transaction, lambda _: None)
    assert bench.waiting(bench.queue()) == [1]
    assert bench.engine.journaling.batch.empty


def test_duplicate_sent_between_plan_and_commit_is_recognised(bench: Bench) -> None:
    options: dict[str, Any] = {"properties": {"_AMQ_DUPL_ID": "x"}}
    transaction = planned(bench, transaction_of(bench, "in the transaction", **options))
    bench.fill("before its commit", **options)
    assert commit(bench, transaction) == [None]
    assert bench.waiting(bench.queue()) == ["before its commit"]
    assert bench.engine.counters.duplicates == 1


def test_repeated_transaction_of_many_messages_is_dropped_before_its_commit(bench: Bench) -> None:
    def sent() -> LocalTransaction:
        transaction = bench.engine.begin(b"1")
        for number in range(MANY):
            bench.put(number, transaction=transaction, properties={"_AMQ_DUPL_ID": str(number)})
        return transaction

    commit(bench, planned(bench, sent()))
    transaction = planned(bench, sent())
    assert isinstance(transaction.plan, CommitPlan)
    assert transaction.plan.pieces == []
    assert commit(bench, transaction) == [None]
    assert bench.waiting(bench.queue()) == list(range(MANY))
    assert bench.engine.counters.duplicates == MANY


def test_id_that_a_transaction_repeats_is_committed_once(bench: Bench) -> None:
    transaction = planned(bench, transaction_of(bench, 1, 2, properties={"_AMQ_DUPL_ID": "x"}))
    assert commit(bench, transaction) == [None]
    assert bench.waiting(bench.queue()) == [1]
    assert bench.engine.counters.duplicates == 1


@pytest.mark.interpreted
def test_outdated_pieces_are_planned_again_in_further_turns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_sends, "AT_ONCE_STEPS", 0)
    transaction = planned(bench, transaction_of(bench, *range(MANY), to="t"))
    subscription = bench.subscription("late")
    bench.engine.turns.steps = 50
    bench.engine.turns.begin_turn()
    assert not bench.engine.plan_commit(transaction)
    assert commit(bench, planned(bench, transaction)) == [None]
    assert bench.waiting(subscription) == list(range(MANY))
    assert (subscription.incoming, subscription.incoming_bytes) == (0, 0)


@pytest.mark.interpreted
def test_queue_recreated_for_a_commit_that_is_rolled_back_is_deleted_when_unused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_sends, "AT_ONCE_STEPS", 0)
    transaction = planned(bench, transaction_of(bench, *range(MANY)))
    settings = bench.queue().settings
    bench.engine.delete_queue(bench.queue())
    while not bench.engine.plan_commit(transaction):
        bench.engine.go_on()
    assert "q" in bench.engine.addresses.anycast
    bench.engine.rollback(transaction)
    bench.now_ms += settings.auto_delete_ms + 1
    bench.engine.tick()
    assert "q" not in bench.engine.addresses.anycast


def test_large_commit_that_the_journal_does_not_store_enters_its_queues_over_turns(bench: Bench) -> None:
    transaction = planned(bench, transaction_of(bench, *range(3 * PIECE_PLACES), durable=False))
    bench.engine.turns.steps = 50
    bench.engine.turns.begin_turn()
    answers: list[Any] = []
    records = len(bench.values())
    bench.engine.commit(transaction, answers.append)
    assert 0 < len(bench.waiting(bench.queue())) < 3 * PIECE_PLACES
    assert answers == []
    while bench.engine.pending:
        bench.engine.go_on()
    assert answers == [None]
    assert bench.waiting(bench.queue()) == list(range(3 * PIECE_PLACES))
    assert (len(bench.values()), bench.queue().incoming) == (records, 0)


def test_duplicate_does_not_recreate_a_queue_deleted_between_plan_and_commit(bench: Bench) -> None:
    options: dict[str, Any] = {"properties": {"_AMQ_DUPL_ID": "x"}}
    transaction = planned(bench, transaction_of(bench, "in the transaction", **options))
    bench.fill("before its commit", **options)
    bench.engine.delete_queue(bench.queue())
    assert commit(bench, transaction) == [None]
    assert "q" not in bench.engine.addresses.anycast


def test_failed_commit_after_plan_leaves_no_messages_bytes_or_duplicate_id(bench: Bench) -> None:
    options: dict[str, Any] = {"properties": {"_AMQ_DUPL_ID": "x"}}
    transaction = planned(bench, transaction_of(bench, "x" * 1_000, **options))
    limit, bench.engine.journaling.record_bytes_max = bench.engine.journaling.record_bytes_max, 1_100
    (error,) = commit(bench, transaction)
    assert error is not None
    bench.engine.journaling.record_bytes_max = limit
    queue = bench.queue()
    assert (queue.incoming, queue.incoming_bytes, queue.held_messages) == (0, 0, 0)
    assert bench.engine.memory.plans_bytes == 0
    bench.fill("again", **options)
    assert bench.waiting(queue) == ["again"]


def test_plan_is_counted_as_used_memory_until_transaction_ends(bench: Bench) -> None:
    transaction = transaction_of(bench, "x" * 1_000)
    before = bench.engine.memory.used_bytes
    planned(bench, transaction)
    assert bench.engine.memory.used_bytes > before + 1_000
    bench.engine.rollback(transaction)
    assert bench.engine.memory.plans_bytes == 0


def test_branch_rolled_back_after_its_plan_sends_nothing(bench: Bench) -> None:
    transaction = transaction_of(bench, 1, 2)
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.broker.settle()
    plan = branches.plan_end(bench.engine, XID, Ending.COMMITTED)
    assert plan is not None
    bench.broker.settle()
    assert plan.over
    branches.end(bench.engine, XID, Ending.ROLLED_BACK, lambda: None, plan=plan)
    plan.close()
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == []
    assert (bench.engine.branches.use.size_bytes, bench.engine.memory.plans_bytes) == (0, 0)


def test_plan_of_ended_branch_does_not_apply_to_new_branch_with_same_xid(bench: Bench) -> None:
    def prepare(*contents: Any) -> None:
        branches.prepare(bench.engine, transaction_of(bench, *contents), XID, "client", lambda _: None)
        bench.broker.settle()

    prepare("first")
    plan = branches.plan_end(bench.engine, XID, Ending.COMMITTED)
    branches.end(bench.engine, XID, Ending.FORCED_ROLLBACK, lambda: None)
    bench.broker.settle()
    branches.forget(bench.engine, XID, lambda: None)
    bench.broker.settle()
    prepare("second")
    branches.end(bench.engine, XID, Ending.COMMITTED, lambda: None, plan=plan)
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["second"]


def test_queue_deleted_while_a_commit_is_planned_is_recreated(bench: Bench) -> None:
    transaction = half_planned(bench, transaction_of(bench, *range(MANY)))
    bench.engine.delete_queue(bench.queue())
    assert commit(bench, planned(bench, transaction)) == [None]
    assert bench.waiting(bench.queue()) == list(range(MANY))
    bench.crash()
    assert bench.waiting(bench.queue()) == list(range(MANY))


def test_two_commits_planned_concurrently_are_atomic_and_in_order(bench: Bench) -> None:
    first, second = bench.engine.begin(b"1"), bench.engine.begin(b"2")
    for number in range(MANY):
        bench.put(number, transaction=first)
        bench.put(MANY + number, transaction=second)
    half_planned(bench, first)
    half_planned(bench, second)
    bench.put("between")
    for transaction in (second, first):
        commit(bench, planned(bench, transaction))
    assert bench.waiting(bench.queue()) == ["between", *range(MANY, 2 * MANY), *range(MANY)]
    assert (bench.queue().incoming, bench.engine.memory.plans_bytes) == (0, 0)


def test_message_sent_after_the_plan_is_part_of_the_commit(bench: Bench) -> None:
    transaction = planned(bench, transaction_of(bench, 1))
    bench.put(2, transaction=transaction)
    commit(bench, transaction)
    assert bench.waiting(bench.queue()) == [1, 2]


@pytest.mark.interpreted
def test_error_during_planning_rolls_transaction_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    contained: list[Exception] = []
    monkeypatch.setattr(bench.engine.journaling, "errors", ErrorContainment(lambda _, error, __: contained.append(error)))
    bench.fill("received")
    consumer = bench.consumer(credit=1)
    transaction = transaction_of(bench, *range(MANY))
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    half_planned(bench, transaction)
    failure = ValueError("a fault of the broker")
    with monkeypatch.context() as faulty:
        faulty.setattr(bench.engine.sending, "_plan", Mock(side_effect=failure))
        planned(bench, transaction)
    (error,) = commit(bench, transaction)
    assert isinstance(error, TransactionRolledBack)
    assert contained == [failure]
    queue = bench.queue()
    assert (queue.incoming, queue.held_messages, bench.engine.memory.plans_bytes) == (0, 1, 0)
    assert bench.engine.transactions == {}


def test_transaction_that_times_out_during_planning_is_rolled_back(bench: Bench) -> None:
    transaction = half_planned(bench, transaction_of(bench, *range(MANY)))
    bench.now_ms += bench.engine.local_transactions.ms_max + 1
    bench.engine.tick()
    assert bench.engine.memory.plans_bytes == 0
    (error,) = commit(bench, planned(bench, transaction))
    assert isinstance(error, TransactionRolledBack)
    assert bench.waiting(bench.queue()) == []


def largest(bench: Bench) -> LocalTransaction:
    transaction = bench.engine.begin(b"1")
    body = bench.encode("x")
    facts = scan(body)
    for number in range(MESSAGES_PER_RECORD_MAX):
        bench.broker.send("q", body, bench.sender, number, transaction=transaction, facts=facts)
    bench.broker.settle()
    return transaction


def planning(bench: Bench, over: bool) -> bool:
    """Run a turn if a plan is not complete."""
    if not over:
        bench.engine.go_on()
    return over


def longest_s(work: Any) -> float:
    """Return the processor time of the longest call, until a call returns a true value."""
    longest, done = 0.0, False
    with quiet():
        while not done:
            begun_s = time.thread_time()
            done = work()
            longest = max(longest, time.thread_time() - begun_s)
    return longest


def test_largest_commit_has_no_long_turn(bench: Bench) -> None:
    transaction, answers = largest(bench), []
    bench.engine.turns.steps = TURN_STEPS
    bench.engine.turns.begin_turn()
    assert longest_s(lambda: planning(bench, bench.engine.plan_commit(transaction))) < TURN_S_MAX
    assert longest_s(lambda: bench.engine.commit(transaction, answers.append)) < TURN_S_MAX
    bench.broker.settle()
    assert answers == [None]
    assert bench.queue().held_messages == MESSAGES_PER_RECORD_MAX


def test_largest_branch_has_no_long_turn(bench: Bench) -> None:
    transaction, answers = largest(bench), []
    bench.engine.turns.steps = TURN_STEPS
    bench.engine.turns.begin_turn()
    assert longest_s(lambda: planning(bench, bench.engine.plan_prepare(transaction))) < TURN_S_MAX
    assert longest_s(lambda: branches.prepare(bench.engine, transaction, XID, "client", answers.append) or True) < TURN_S_MAX
    bench.broker.settle()
    bench.engine.turns.begin_turn()
    plan = branches.plan_end(bench.engine, XID, Ending.COMMITTED)
    assert plan is not None
    assert longest_s(lambda: planning(bench, plan.over)) < TURN_S_MAX
    ended = partial(answers.append, "ended")
    assert longest_s(lambda: branches.end(bench.engine, XID, Ending.COMMITTED, ended, plan=plan) or True) < TURN_S_MAX
    bench.broker.settle()
    assert answers == [True, "ended"]
    assert bench.queue().held_messages == MESSAGES_PER_RECORD_MAX


def test_messages_that_a_branch_has_received_are_gathered_while_it_is_planned(bench: Bench) -> None:
    count, answers = 10_000, list[bool]()
    for number in range(count):
        bench.put(number)
    bench.broker.settle()
    consumer = bench.consumer(credit=count)
    transaction = bench.engine.begin(b"1")
    for message in consumer.messages:
        bench.engine.acknowledge_in(transaction, consumer.consumer, message)
    bench.engine.turns.steps = 1_000
    bench.engine.turns.begin_turn()
    gathered = [0]
    while not bench.engine.plan_prepare(transaction):
        assert isinstance(transaction.plan, PreparePlan)
        gathered.append(len(transaction.plan.acks))
        bench.engine.go_on()
    assert max(after - before for before, after in pairwise([*gathered, count])) < count // 4
    assert isinstance(transaction.plan, PreparePlan)
    planned = transaction.plan.acks
    branches.prepare(bench.engine, transaction, XID, "client", answers.append)
    bench.broker.settle()
    assert answers == [True]
    assert bench.engine.branches.prepared[XID].acks is planned
    assert [message.position for _, message in planned] == [message.position for message in consumer.messages]
