"""Prepared branches: withheld, kept over crashes and snapshots, ended by any client, visible to diverts only with their commit."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.broker import branches, prepared_use
from bascule.broker import snapshot as snapshots
from bascule.broker.branch_requests import NO_XID, Answer, BranchRequest, carry_out, drop, plan
from bascule.broker.errors import BranchForced, JournalUnavailable, ResourceLimit, UnknownBranch
from bascule.broker.policy import AddressPolicy, Policy
from bascule.core.errors import TransactionRolledBack
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.journal.records import KEY_OF_KIND, Kind, Op, entries
from bascule.pipelines.divert import JournalReader
from bascule.pipelines.spec import DivertSpec
from bascule.writer.position import Position
from tests.unit.broker.branch_work import OTHER, XID, Work, work
from tests.unit.broker.conftest import Bench

__all__ = ["work"]  # fixtures


def ops_of(bench: Bench) -> list[list[int]]:
    return [[op for op, _, _ in entries(value)] for value in bench.values()]


def test_a_branch_is_prepared_once_stored_and_nobody_gets_its_messages(work: Work) -> None:
    work.prepare()
    work.bench.broker.flush()
    assert work.answers == []
    assert work.listed() == []
    work.bench.broker.settle()
    assert work.answers == [True]
    assert work.listed() == [XID]
    assert work.bench.got(work.fresh()) == []
    assert work.where() == ([], [])
    assert work.bench.queue("in").delivering_count == 1
    assert work.bench.engine.transactions == {}


@pytest.mark.parametrize("crash", [False, True])
def test_a_commit_by_any_connection_delivers_the_sends_and_removes_the_received_messages(work: Work, crash: bool) -> None:
    work.prepared()
    if crash:
        work.bench.crash()
        assert work.listed() == [XID]
        assert work.where() == ([], [])
    work.end(Ending.COMMITTED)
    work.bench.broker.flush()
    assert work.answers == [True]
    work.bench.broker.settle()
    assert work.answers == [True, Ending.COMMITTED]
    assert work.where() == ([], ["bill"])
    assert work.listed() == []
    work.bench.crash()
    assert work.where() == ([], ["bill"])
    assert work.bench.queue("in").held_messages == 0


@pytest.mark.parametrize("crash", [False, True])
def test_after_a_stored_rollback_the_messages_are_redelivered(work: Work, crash: bool) -> None:
    work.prepared()
    if crash:
        work.bench.crash()
    consumer = work.bench.consumer(work.bench.queue("in"))
    work.end(Ending.ROLLED_BACK)
    work.bench.broker.flush()
    assert work.bench.got(consumer) == []
    work.bench.engine.detach(work.consumer.consumer)
    work.bench.broker.settle()
    assert work.bench.got(consumer) == ["order"]
    assert work.bench.counts(consumer) == [1]
    assert work.where() == ([], [])
    work.bench.crash()
    assert work.where() == (["order"], [])
    assert work.listed() == []


def test_a_commit_is_one_record_and_pipelines_see_the_messages_only_in_it(work: Work) -> None:
    work.prepared()
    found = {key: ops for (key, _), ops in zip(work.bench.broker.log.records, ops_of(work.bench), strict=True) if Op.PREPARED in ops}
    assert found == {KEY_OF_KIND[Kind.STATE]: [Op.PREPARED]}
    work.end(Ending.COMMITTED)
    work.bench.broker.settle()
    assert sorted(ops_of(work.bench)[-1]) == [Op.SEND, Op.ACK, Op.ENDED]
    assert work.bench.broker.log.records[-1][0] == KEY_OF_KIND[Kind.DATA]


def test_divert_takes_messages_of_branch_from_commit_record(work: Work) -> None:
    work.prepared()
    work.end(Ending.COMMITTED)
    work.bench.broker.settle()
    reader = JournalReader(Position("journal", "id", 0, 0), [DivertSpec("d", "out")])
    taken = [reader.take(offset, *record) for offset, record in enumerate(work.bench.broker.log.records)]
    assert [len(each) for each in taken] == [0] * (len(taken) - 1) + [1]


@pytest.mark.parametrize("stored", [0, 1])
@pytest.mark.parametrize("ending", [Ending.COMMITTED, Ending.ROLLED_BACK])
def test_a_branch_killed_at_its_end_is_prepared_or_ended(work: Work, ending: Ending, stored: int) -> None:
    work.prepared()
    work.end(ending)
    work.bench.broker.flush()
    assert len(work.bench.broker.in_flight) == 1
    work.bench.crash(stored)
    over = ([], ["bill"]) if ending is Ending.COMMITTED else (["order"], [])
    assert (work.listed(), work.where()) == (([], over) if stored else ([XID], ([], [])))


@pytest.mark.parametrize("stored", [0, 1])
def test_a_branch_killed_at_its_prepare_is_prepared_or_rolled_back(work: Work, stored: int) -> None:
    work.prepare()
    work.bench.broker.flush()
    work.bench.crash(stored)
    assert (work.listed(), work.where()) == (([XID], ([], [])) if stored else ([], (["order"], [])))


def test_a_snapshot_contains_the_sends_of_branches_and_keeps_no_journal_for_them(bench: Bench) -> None:
    transaction = bench.engine.begin(b"1")
    bench.put("bill", to="out", transaction=transaction)
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.broker.settle()
    bench.broker.take_snapshot()
    bench.broker.settle()
    snapshot = snapshots.decode(next(iter(bench.broker.snapshots.values())))
    assert snapshot.first_offset() == snapshot.next_offset
    bench.crash()
    branches.end(bench.engine, XID, Ending.COMMITTED, lambda: None)
    bench.broker.settle()
    assert bench.waiting(bench.queue("out")) == ["bill"]


@pytest.mark.parametrize("ending", [Ending.COMMITTED, Ending.ROLLED_BACK])
def test_a_snapshot_before_an_outcome_is_stored_has_the_branch_as_prepared(work: Work, ending: Ending) -> None:
    work.prepared()
    work.end(ending)
    work.bench.broker.take_snapshot()
    assert snapshots.decode(next(iter(work.bench.broker.snapshots.values()))).branches
    work.bench.broker.settle()
    work.bench.crash()
    assert work.listed() == []
    assert work.where() == (([], ["bill"]) if ending is Ending.COMMITTED else (["order"], []))


def test_messages_held_by_branch_do_not_expire(bench: Bench) -> None:
    bench.fill("short", to="in", ttl_ms=1_000)
    consumer = bench.consumer(bench.queue("in"))
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.broker.settle()
    bench.crash()
    bench.now_ms += 10_000
    bench.engine.tick()
    bench.broker.settle()
    assert bench.queue("ExpiryQueue").held_messages == 0
    assert bench.queue("in").held_messages == 1


@pytest.mark.parametrize("one_phase", [False, True])
def test_messages_of_a_branch_are_kept_only_by_the_branch(work: Work, one_phase: bool) -> None:
    """The connection remembers the transaction until the next declare; its messages would be missing in the account of memory."""
    if one_phase:
        branches.commit_one_phase(work.bench.engine, work.transaction, XID, work.answers.append)
    else:
        work.prepare()
    work.bench.broker.settle()
    assert work.transaction.handed_over
    assert work.transaction.drafts == work.transaction.acks == []
    if not one_phase:
        work.end(Ending.COMMITTED)
        work.bench.broker.settle()
    assert work.where() == ([], ["bill"])


def test_prepare_of_branch_without_work_votes_read_only_and_writes_nothing(bench: Bench) -> None:
    answers: list[bool] = []
    records = len(bench.values())
    branches.prepare(bench.engine, bench.engine.begin(b"1"), XID, "client", answers.append)
    bench.broker.settle()
    assert answers == [False]
    assert len(bench.values()) == records
    with pytest.raises(UnknownBranch):
        branches.end(bench.engine, XID, Ending.COMMITTED, lambda: None)


def test_sends_of_branch_are_routed_at_commit(work: Work) -> None:
    work.bench.put("news", to="t", transaction=work.transaction)
    work.prepared()
    late = work.bench.subscription("late")
    work.bench.engine.delete_queue(work.bench.queue("out"))
    work.bench.broker.settle()
    work.end(Ending.COMMITTED)
    work.bench.broker.settle()
    assert work.bench.waiting(late) == ["news"]
    assert work.where() == ([], ["bill"])


def test_if_two_branches_send_the_same_id_the_first_commit_counts(bench: Bench) -> None:
    for number, xid in enumerate((XID, OTHER)):
        transaction = bench.engine.begin(b"%d" % number)
        bench.put(f"by {number}", transaction=transaction, properties={"_AMQ_DUPL_ID": "once"})
        branches.prepare(bench.engine, transaction, xid, "client", lambda _: None)
    for xid in (OTHER, XID):
        branches.end(bench.engine, xid, Ending.COMMITTED, lambda: None)
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["by 1"]


def test_an_id_in_a_rolled_back_branch_blocks_no_other_message(bench: Bench) -> None:
    transaction = bench.engine.begin(b"1")
    bench.put("branch", transaction=transaction, properties={"_AMQ_DUPL_ID": "once"})
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.fill("other", properties={"_AMQ_DUPL_ID": "once"})
    branches.end(bench.engine, XID, Ending.ROLLED_BACK, lambda: None)
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["other"]


def test_non_persistent_messages_of_a_branch_survive_a_crash_with_it(bench: Bench) -> None:
    transaction = bench.engine.begin(b"1")
    bench.put("light", durable=False, transaction=transaction)
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.broker.settle()
    bench.crash()
    branches.end(bench.engine, XID, Ending.COMMITTED, lambda: None)
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["light"]
    bench.crash()
    assert bench.waiting(bench.queue()) == []


def test_the_last_allowed_rollback_sends_received_messages_to_the_dead_letters(bench: Bench) -> None:
    bench.fill("poison", to="in")
    for number in range(3):
        consumer = bench.consumer(bench.queue("in"))
        transaction = bench.engine.begin(b"%d" % number)
        bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
        xid = Xid(7, b"%d" % number, b"")
        branches.prepare(bench.engine, transaction, xid, "client", lambda _: None)
        bench.broker.settle()
        bench.crash()
        branches.end(bench.engine, xid, Ending.ROLLED_BACK, lambda: None)
        bench.broker.settle()
    assert bench.waiting(bench.queue("DLQ")) == ["poison"]


@pytest.mark.parametrize("crash", ["none", "replay", "snapshot"])
@pytest.mark.parametrize(("forced", "left"), [(Ending.FORCED_COMMIT, ([], ["bill"])), (Ending.FORCED_ROLLBACK, (["order"], []))])
def test_a_heuristic_outcome_is_reported_until_it_is_forgotten(work: Work, forced: Ending, left: Any, crash: str) -> None:
    work.prepared()
    work.bench.engine.detach(work.consumer.consumer)
    work.end(forced)
    work.bench.broker.settle()
    if crash == "snapshot":
        work.bench.broker.take_snapshot()
        work.bench.broker.settle()
    if crash != "none":
        work.bench.crash()
    assert work.where() == left
    assert [(each.xid, each.ending) for each in branches.listed(work.bench.engine)] == [(XID, forced)]
    for ending in (Ending.COMMITTED, Ending.ROLLED_BACK):
        with pytest.raises(BranchForced) as caught:
            work.end(ending)
        assert caught.value.ending is forced
    branches.forget(work.bench.engine, XID, lambda: work.answers.append("forgotten"))
    work.bench.broker.settle()
    assert work.answers[-1] == "forgotten"
    work.bench.crash()
    assert work.listed() == []
    with pytest.raises(UnknownBranch):
        branches.forget(work.bench.engine, XID, lambda: None)


def refused(work: Work) -> TransactionRolledBack:
    with pytest.raises(TransactionRolledBack) as caught:
        work.prepare()
    assert work.bench.engine.transactions == {}
    assert work.listed() == []
    return caught.value


def test_prepare_of_doomed_transaction_is_refused(work: Work) -> None:
    work.transaction.doomed = ResourceLimit("larger than a record")
    assert "larger than a record" in str(refused(work))


def test_while_the_journal_is_stalled_no_branch_is_prepared_or_ended(work: Work) -> None:
    work.prepared()
    work.bench.engine.stalled = JournalUnavailable("Kafka is away")
    with pytest.raises(JournalUnavailable):
        work.end(Ending.COMMITTED)
    work.bench.engine.stalled = None
    work.end(Ending.COMMITTED)
    work.bench.broker.settle()
    assert work.where() == ([], ["bill"])


@pytest.mark.parametrize("limit", ["PREPARED_MAX", "PREPARED_BYTES_MAX"])
def test_prepared_branches_are_limited_in_number_and_size(work: Work, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(prepared_use, limit, 1)
    work.prepared()
    second = work.bench.engine.begin(b"2")
    work.bench.put("second", to="out", transaction=second)
    with pytest.raises(TransactionRolledBack) as caught:
        branches.prepare(work.bench.engine, second, OTHER, "client", work.answers.append)
    assert caught.value.condition == ResourceLimit.condition
    assert "recover" in str(caught.value)


def test_only_newest_branch_outcomes_are_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "ENDED_MAX", 2)
    for number in range(3):
        branches.commit_one_phase(bench.engine, bench.engine.begin(b"1"), Xid(7, b"%d" % number, b""), lambda _: None)
    bench.broker.settle()
    assert [xid.gtrid for xid in bench.engine.branches.ended] == [b"1", b"2"]


def test_list_of_many_branches_takes_several_turns(bench: Bench) -> None:
    engine = bench.engine
    xids = [Xid(1, b"%d" % number, b"b") for number in range(300)]
    for xid in xids:
        transaction = engine.begin(xid.gtrid)
        bench.put("x", transaction=transaction)
        branches.prepare(engine, transaction, xid, "c", lambda _: None)
    bench.broker.settle()
    answers: list[Answer] = []
    engine.turns.steps = 100
    carry_out(engine, BranchRequest("recover", NO_XID, "c", {}), answers.append)
    bench.broker.flush()
    bench.broker.confirm(len(bench.broker.in_flight))
    assert not answers
    branches.end(engine, xids[-1], Ending.COMMITTED, lambda: None)
    bench.broker.settle()
    (answer,) = answers
    assert answer.text is not None
    assert len(answer.text.splitlines()) == len(xids)


@pytest.mark.parametrize("operation", ["prepare", "commit"])
def test_transaction_with_joined_work_is_rolled_back_if_its_request_is_dropped_while_it_is_planned(operation: str) -> None:
    bench = Bench(Policy(), turn_steps=100)
    engine, held = bench.engine, {name: bench.engine.begin(name) for name in (b"1", b"2")}
    for transaction in held.values():
        for number in range(1000):
            bench.put(number, transaction=transaction)
    request = BranchRequest(operation, XID, "client", held, b"1", joined=(b"2",))
    assert not plan(engine, request)
    drop(engine, request)
    answers: list[Any] = []
    engine.commit(held.pop(b"1"), answers.append)
    bench.broker.settle()
    assert [type(each) for each in answers] == [TransactionRolledBack]
    assert (held, bench.queue().held_messages, engine.memory.transactions_bytes, engine.memory.plans_bytes) == ({}, 0, 0, 0)


def test_queue_that_a_commit_recreates_beyond_the_limit_counts_and_no_other_can_be_created() -> None:
    bench = Bench(Policy(AddressPolicy(auto_delete=False), queues_max=2))
    transaction = bench.engine.begin(b"1")
    bench.put("paid", to="out", transaction=transaction)
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.broker.settle()
    bench.engine.delete_queue(bench.queue("out"))
    for name in ("a", "b"):
        bench.engine.destinations.queue(name, "somebody")
    bench.broker.settle()
    branches.end(bench.engine, XID, Ending.COMMITTED, lambda: None)  # the branch was accepted, so its queue is created
    bench.broker.settle()
    assert set(bench.engine.addresses.anycast) == {"a", "b", "out"}
    assert bench.waiting(bench.queue("out")) == ["paid"]
    bench.engine.delete_queue(bench.queue("a"))
    for _ in range(2):  # also after a restart, which knows the queues from the journal
        with pytest.raises(ResourceLimit, match=r"the limit of 2 queues and subscriptions is reached \(broker.max_queues\)"):
            bench.queue("another")
        bench.broker.settle()
        bench.broker.start()
    bench.engine.delete_queue(bench.queue("b"))
    bench.queue("another")
