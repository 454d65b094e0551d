from __future__ import annotations

from typing import Any

import pytest

from bascule.broker import branches, local_transactions
from bascule.broker.errors import JournalUnavailable
from bascule.broker.journaling import RECORD_BYTES_SOFT
from bascule.broker.policy import REJECT, Policy
from bascule.core.errors import BasculeError, TransactionRolledBack
from bascule.core.xa_codes import Code
from bascule.core.xid import Xid
from bascule.journal.records import Op, entries
from tests.support.costs import calls_of
from tests.unit.broker.conftest import Bench


@pytest.fixture
def outcome() -> list[Any]:
    return []


def test_sends_of_a_transaction_are_accepted_at_once_and_visible_after_the_commit(bench: Bench, outcome: list[Any]) -> None:
    consumer = bench.consumer()
    transaction = bench.engine.begin(b"1")
    bench.put(1, transaction=transaction)
    bench.broker.settle()
    assert bench.sender.accepted_tokens == [1]
    assert bench.got(consumer) == []
    bench.engine.commit(transaction, outcome.append)
    bench.broker.flush()
    assert outcome == []
    bench.broker.settle()
    assert outcome == [None]
    assert bench.got(consumer) == [1]


def test_a_transaction_over_several_destinations_is_one_record(bench: Bench, outcome: list[Any]) -> None:
    bench.fill("in", to="q1")
    bench.subscription("s")
    consumer = bench.consumer(bench.queue("q1"))
    bench.queue("q2")
    bench.broker.settle()
    records = len(bench.broker.log.records)
    transaction = bench.engine.begin(b"1")
    bench.put("out", to="q2", transaction=transaction)
    bench.put("news", to="t", transaction=transaction)
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    bench.engine.commit(transaction, outcome.append)
    bench.broker.settle()
    assert len(bench.broker.log.records) == records + 1


@pytest.mark.parametrize("stored", [0, 1])
def test_a_transfer_killed_at_its_commit_leaves_the_message_in_exactly_one_queue(bench: Bench, outcome: list[Any], stored: int) -> None:
    bench.fill("order", to="q1")
    bench.queue("q2")
    consumer = bench.consumer(bench.queue("q1"))
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    bench.put("order", to="q2", transaction=transaction)
    bench.engine.commit(transaction, outcome.append)
    bench.broker.flush()
    assert len(bench.broker.in_flight) == 1
    bench.crash(stored)
    where = [bench.waiting(bench.queue(name)) for name in ("q1", "q2")]
    assert where == ([[], ["order"]] if stored else [["order"], []])
    assert outcome == []


def test_a_large_transaction_stays_in_one_record(bench: Bench, outcome: list[Any]) -> None:
    transaction = bench.engine.begin(b"1")
    for number in range(40):
        bench.put(bytes([number]) * 20_000, transaction=transaction)
    bench.put("a neighbour")
    bench.engine.commit(transaction, outcome.append)
    bench.broker.flush()
    assert [len(batch.actions) for batch in bench.engine.journaling.in_flight] == [3, 2]
    bench.crash(stored=2)
    assert len(bench.waiting(bench.queue())) == 41


def test_acknowledgements_and_sends_of_large_commit_share_one_record(bench: Bench, outcome: list[Any]) -> None:
    """A crash between two records would leave the copies and redeliver the source message."""
    bench.fill("order", to="q1")
    bench.queue("q2")
    consumer = bench.consumer(bench.queue("q1"))
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    for _ in range(3):
        bench.put(b"x" * (RECORD_BYTES_SOFT // 2), to="q2", transaction=transaction)
    bench.engine.commit(transaction, outcome.append)
    bench.broker.flush()
    ((_, value),) = bench.broker.in_flight
    ops = [op for op, _, _ in entries(value)]
    assert (ops.count(Op.SEND), ops.count(Op.ACK)) == (3, 1)


def test_a_rollback_drops_the_sends_and_redelivers_with_a_raised_count(bench: Bench) -> None:
    bench.fill(1, 2)
    consumer = bench.consumer()
    transaction = bench.engine.begin(b"1")
    bench.put(3, transaction=transaction)
    for message in consumer.messages:
        bench.engine.acknowledge_in(transaction, consumer.consumer, message)
    bench.engine.rollback(transaction)
    bench.broker.settle()
    assert bench.got(consumer) == [1, 2, 1, 2]
    assert bench.counts(consumer) == [0, 0, 1, 1]


def test_a_message_rolled_back_too_often_goes_to_the_dead_letters(bench: Bench, policy: Policy) -> None:
    bench.fill(1)
    consumer = bench.consumer()
    for number in range(policy.defaults.deliveries_max):
        transaction = bench.engine.begin(b"%d" % number)
        bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[-1])
        bench.engine.rollback(transaction)
        bench.broker.settle()
    assert bench.waiting(bench.queue("DLQ")) == [1]


def test_cost_of_a_repeated_acknowledgement_does_not_grow_with_its_transaction(
    bench: Bench, outcome: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_transactions, "REPEATED_MAX", 10)
    bench.fill(*range(200))
    consumer = bench.consumer(credit=200)
    transaction = bench.engine.begin(b"1")
    for message in consumer.messages:
        bench.engine.acknowledge_in(transaction, consumer.consumer, message)
    newest, oldest = consumer.messages[-10], consumer.messages[0]
    bench.engine.acknowledge_in(transaction, consumer.consumer, newest)
    assert transaction.doomed is None
    assert calls_of(lambda: bench.engine.acknowledge_in(transaction, consumer.consumer, oldest)) < 100
    assert transaction.doomed is not None
    assert calls_of(lambda: bench.engine.acknowledge_in(transaction, consumer.consumer, newest)) < 20
    bench.engine.commit(transaction, outcome.append)
    bench.broker.settle()
    assert isinstance(outcome[0], BasculeError)
    assert bench.queue().held_messages == 200


def test_acknowledgements_of_a_transaction_survive_their_consumer(bench: Bench, outcome: list[Any]) -> None:
    bench.fill(1)
    consumer = bench.consumer()
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    bench.engine.detach(consumer.consumer)
    assert bench.got(bench.consumer()) == []
    bench.engine.commit(transaction, outcome.append)
    bench.broker.settle()
    bench.crash()
    assert bench.waiting(bench.queue()) == []


def test_non_persistent_send_in_transaction_is_delivered_in_order_after_commit(bench: Bench, outcome: list[Any]) -> None:
    consumer = bench.consumer()
    transaction = bench.engine.begin(b"1")
    bench.put("first", transaction=transaction)
    bench.put("light", durable=False, transaction=transaction)
    bench.put("last", transaction=transaction)
    bench.engine.commit(transaction, outcome.append)
    bench.broker.flush()
    assert bench.got(consumer) == []
    bench.broker.settle()
    assert bench.got(consumer) == ["first", "light", "last"]


def test_transaction_with_only_non_persistent_messages_writes_no_record(bench: Bench, outcome: list[Any]) -> None:
    consumer = bench.consumer()
    records = len(bench.broker.log.records)
    transaction = bench.engine.begin(b"1")
    bench.put("light", durable=False, transaction=transaction)
    bench.engine.commit(transaction, outcome.append)
    bench.engine.dispatch()
    assert outcome == [None]
    assert bench.got(consumer) == ["light"]
    assert len(bench.broker.log.records) == records


def test_an_empty_transaction_commits_at_once(bench: Bench, outcome: list[Any]) -> None:
    bench.engine.commit(bench.engine.begin(b"1"), outcome.append)
    assert outcome == [None]


@pytest.mark.parametrize(("limit", "value"), [("bytes", 10_000), ("messages", 4)])
def test_a_transaction_too_large_for_one_record_is_rolled_back(
    bench: Bench, outcome: list[Any], monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    if limit == "bytes":
        bench.engine.local_transactions.bytes_max = value
    else:
        monkeypatch.setattr("bascule.broker.local_transactions.MESSAGES_PER_RECORD_MAX", value)
    transaction = bench.engine.begin(b"1")
    for number in range(20):
        bench.put(f"{number}".rjust(600), transaction=transaction)
    assert transaction.drafts == []
    bench.engine.commit(transaction, outcome.append)
    bench.broker.settle()
    (error,) = outcome
    assert isinstance(error, TransactionRolledBack)
    assert error.condition == "amqp:resource-limit-exceeded"
    assert str(value) in str(error)
    assert bench.waiting(bench.queue()) == []


def test_commit_of_persistent_messages_is_rolled_back_while_journal_is_stalled(bench: Bench, outcome: list[Any]) -> None:
    transaction = bench.engine.begin(b"1")
    bench.put(1, transaction=transaction)
    bench.engine.stalled = JournalUnavailable("Kafka is away")
    bench.engine.commit(transaction, outcome.append)
    assert "Kafka is away" in str(outcome[0])


@pytest.mark.parametrize("one_phase", [True, False])
def test_transaction_with_a_refused_message_journals_nothing_and_returns_its_messages(outcome: list[Any], one_phase: bool) -> None:
    bench = Bench(Policy(rules=(("full", {"max_messages": 1, "when_full": REJECT}),)))
    bench.fill("blocks", to="full")
    bench.fill("order")
    consumer = bench.consumer()
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    bench.put("kept", to="other", transaction=transaction)
    bench.put("refused", to="full", transaction=transaction)
    bench.put("afterwards", to="other", transaction=transaction)
    assert [(token, error is None) for token, error in bench.sender.answers[-3:]] == [
        ("kept", True), ("refused", False), ("afterwards", True),
    ]  # fmt: skip
    assert bench.engine.memory.unsettled == 1
    bench.broker.settle()
    records = len(bench.values())
    if one_phase:
        bench.engine.commit(transaction, outcome.append)
    else:
        with pytest.raises(TransactionRolledBack, match="a message of the transaction was refused") as raised:
            branches.prepare(bench.engine, transaction, Xid(7, b"g", b"b"), "client", lambda _: None)
        outcome.append(raised.value)
    bench.broker.settle()
    (error,) = outcome
    assert isinstance(error, TransactionRolledBack)
    assert (error.condition, error.xa_code) == ("amqp:resource-limit-exceeded", Code.XA_RBROLLBACK)
    assert "queue 'full' is full" in str(error)
    assert {op for value in bench.values()[records:] for op, _, _ in entries(value)} <= {Op.COUNT}
    assert bench.waiting(bench.queue("other")) == []
    assert bench.got(consumer) == ["order", "order"]
    assert bench.counts(consumer) == [0, 1]
    assert (bench.engine.memory.unsettled, bench.engine.memory.transactions_bytes) == (1, 0)
    assert bench.engine.transactions == {}


def test_refused_message_accepted_when_repeated_does_not_save_its_transaction(outcome: list[Any]) -> None:
    bench = Bench(Policy(rules=(("full", {"max_messages": 1, "when_full": REJECT}),)))
    bench.fill("blocks", to="full")
    transaction = bench.engine.begin(b"1")
    bench.put("again", to="full", transaction=transaction)
    bench.acknowledge(bench.consumer(bench.queue("full"), 1))
    bench.broker.settle()
    bench.put("again", to="full", transaction=transaction)
    assert bench.sender.accepted_tokens[-1] == "again"
    bench.engine.commit(transaction, outcome.append)
    bench.broker.settle()
    assert isinstance(outcome[0], TransactionRolledBack)
    assert bench.waiting(bench.queue("full")) == []


def test_more_messages_than_a_record_can_number_go_into_the_next_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.broker.journaling.MESSAGES_PER_RECORD_MAX", 3)
    for number in range(7):
        bench.put(number)
    bench.broker.flush()
    assert [batch.messages for batch in bench.engine.journaling.in_flight] == [3, 3, 1]
    bench.crash(stored=3)
    assert bench.waiting(bench.queue()) == list(range(7))


def test_a_transaction_begins_a_new_record_if_the_open_one_cannot_number_its_messages(
    bench: Bench, outcome: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bascule.broker.journaling.MESSAGES_PER_RECORD_MAX", 3)
    bench.put("single")
    transaction = bench.engine.begin(b"1")
    for number in range(3):
        bench.put(number, transaction=transaction)
    bench.engine.commit(transaction, outcome.append)
    bench.broker.flush()
    assert [batch.messages for batch in bench.engine.journaling.in_flight] == [1, 3]
