"""The broker as a resource: nobody else gets the messages of a prepared branch, across kills, takeovers and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from bascule.client import IllegalState, Message, Queue, Refused, TransactionRolledBack, connect
from bascule.core.errors import InvalidInput
from bascule.core.xid import Xid
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.history import TopicHistory
from bascule.xa import FileLog, TransactionManager, Vote
from bascule.xa.errors import (
    BranchHeuristic,
    BranchRolledBack,
    Code,
    DuplicateXid,
    HeuristicOutcome,
    OutOfOrder,
    ResourceFailed,
    UnknownXid,
)
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid
from tests.scenarios.conftest import Connect
from tests.support.client import SOON_S
from tests.support.system import PYTHON_FAILOVER, SHORT_SESSION, System, wait_for

CONFIG = "[journal]\nsnapshot_records = 100\nretention_s = 0\n"
Make = Callable[..., JmsResource]


def lasting(*systems: System) -> str:
    """Return the URL of a client that survives restarts of its broker."""
    return PYTHON_FAILOVER.format(",".join(system.url for system in systems))


@pytest.fixture(scope="module")
def broker(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("xa-jms"), prefix="xa-jms", config=CONFIG) as system:
        yield system


@pytest.fixture
def make(broker: System) -> Iterator[Make]:
    """Return resources as different processes would have them."""
    with ExitStack() as stack:

        def make(url: str | None = None) -> JmsResource:
            resource = JmsResource("jms", url or lasting(broker), timeout_s=SOON_S)
            stack.callback(resource.close)
            return resource

        yield make


class Work:
    """A queue with one order, and a branch that receives it and sends a bill."""

    def __init__(self, system: System, name: str) -> None:
        self.system = system
        self.orders, self.bills = Queue(f"{name}.in"), Queue(f"{name}.out")
        self.xid = branch(new_gtrid("shop", 0), "jms")
        with connect(lasting(system)) as context:
            context.send(self.orders, "order")
            context.consumer(self.bills).close()

    def done_in(self, resource: JmsResource) -> None:
        handle = resource.start(self.xid, timeout_s=60)
        assert resource_body(handle.consumer(self.orders).receive(SOON_S)) == "order"
        handle.send(self.bills, "bill")
        resource.end(self.xid, success=True)

    def prepared_in(self, resource: JmsResource) -> None:
        self.done_in(resource)
        assert resource.prepare(self.xid) is Vote.YES

    def waiting(self) -> tuple[list[object], list[object]]:
        """Return the orders and bills that consumers can receive now."""
        with connect(lasting(self.system)) as context:
            orders, bills = ([message.body for message in context.browse(queue)] for queue in (self.orders, self.bills))
        return orders, bills

    def held(self) -> int:
        """Return the orders that a consumer holds."""
        queue = self.system.queue(self.orders.name)
        return 0 if queue is None else int(queue["delivering"])


def resource_body(message: Message | None) -> object:
    assert message is not None
    return message.body


@pytest.fixture
def work(broker: System, name: str) -> Work:
    return Work(broker, name)


@pytest.mark.slow
def test_messages_of_a_prepared_branch_are_hidden_until_any_process_commits_the_branch(work: Work, make: Make) -> None:
    first, second = make(), make()
    work.prepared_in(first)
    assert work.waiting() == ([], [])
    assert work.held() == 1
    assert work.xid in second.recover()
    second.commit(work.xid)
    assert work.waiting() == ([], ["bill"])
    assert work.held() == 0
    assert work.xid not in first.recover()
    with pytest.raises(UnknownXid, match="committed"):
        first.commit(work.xid)


def test_any_process_can_roll_back_a_prepared_branch(work: Work, make: Make) -> None:
    work.prepared_in(make())
    other = make()
    other.rollback(work.xid)
    assert work.waiting() == (["order"], [])
    with connect(work.system.url) as context:
        message = context.consumer(work.orders).receive(SOON_S)
    assert message is not None
    assert message.redelivered
    with pytest.raises(UnknownXid):
        other.rollback(work.xid)


@pytest.mark.parametrize("commit", [True, False])
def test_prepared_branch_survives_broker_kill_before_its_outcome(work: Work, make: Make, commit: bool) -> None:
    resource = make()
    work.prepared_in(resource)
    work.system.broker.restart()
    assert work.waiting() == ([], [])
    assert list(resource.recover()) == [work.xid]
    (resource.commit if commit else resource.rollback)(work.xid)
    work.system.broker.restart()
    assert work.waiting() == (([], ["bill"]) if commit else (["order"], []))
    assert list(resource.recover()) == []


def test_prepared_branch_survives_snapshot_and_trim_of_the_journal(work: Work, make: Make) -> None:
    work.prepared_in(make())
    history = TopicHistory({"bootstrap.servers": work.system.bootstrap}, "xa-jms.journal", 0)
    prepared_at = history.latest()
    with connect(work.system.url) as context:
        passing = Queue(f"{work.orders.name}.passing")
        consumer = context.consumer(passing)

        def trimmed() -> bool:
            for _ in range(50):
                context.send(passing, "x")
                assert consumer.receive(SOON_S) is not None
            return history.earliest() > prepared_at

        # The order is the oldest message, so that it moves to the store.
        wait_for(trimmed, "the journal to be trimmed")
    work.system.broker.restart()
    assert work.waiting() == ([], [])
    make().commit(work.xid)
    assert work.waiting() == ([], ["bill"])


def test_unprepared_branch_is_rolled_back_when_its_connection_breaks(work: Work, make: Make) -> None:
    resource = make()
    work.done_in(resource)
    work.system.broker.restart()
    with pytest.raises(BranchRolledBack, match="connection was lost") as caught:
        resource.prepare(work.xid)
    assert caught.value.xa_code is Code.XA_RBCOMMFAIL
    assert work.waiting() == (["order"], [])


def test_branch_with_a_refused_message_is_rolled_back_with_that_reason(work: Work, make: Make) -> None:
    resource = make()
    resource.start(work.xid, timeout_s=60).send(Queue("$management"), "no part of any")
    resource.end(work.xid, success=True)
    with pytest.raises(BranchRolledBack, match="the broker refused a message of the transaction") as caught:
        resource.prepare(work.xid)
    assert caught.value.xa_code is Code.XA_RBOTHER


def test_branch_whose_connection_the_administrator_closed_cannot_be_prepared(work: Work, make: Make) -> None:
    resource = make(work.system.url)
    work.done_in(resource)
    for connection in work.system.ask("connections"):
        with suppress(InvalidInput):  # of another branch, which has ended meanwhile
            work.system.act("connections/close", id=connection["id"])
    with pytest.raises((BranchRolledBack, ResourceFailed)):
        resource.prepare(work.xid)
    with pytest.raises(UnknownXid):
        resource.rollback(work.xid)
    assert work.waiting() == (["order"], [])


def test_jms_branch_can_be_rolled_back_without_prepare(work: Work, make: Make) -> None:
    resource = make()
    work.done_in(resource)
    resource.rollback(work.xid)
    assert work.waiting() == (["order"], [])
    assert work.xid not in resource.recover()


def test_jms_branch_without_work_votes_read_only(work: Work, make: Make) -> None:
    resource = make()
    handle = resource.start(work.xid, timeout_s=60)
    assert handle.consumer(Queue(f"{work.orders.name}.empty")).receive_no_wait() is None
    resource.end(work.xid, success=True)
    assert resource.prepare(work.xid) is Vote.READ_ONLY
    assert work.xid not in resource.recover()


def test_one_phase_commit_needs_no_prepare_and_a_later_rollback_reports_committed(work: Work, make: Make) -> None:
    resource = make()
    work.done_in(resource)
    resource.commit(work.xid, one_phase=True)
    assert work.waiting() == ([], ["bill"])
    with pytest.raises(BranchHeuristic, match="committed"):
        make().rollback(work.xid)


def test_handle_is_one_context_per_transaction_and_only_the_manager_ends_the_transaction(work: Work, make: Make, tmp_path: Path) -> None:
    resource = make()
    manager = TransactionManager("shop", FileLog(tmp_path / "log"), [resource])
    with manager:
        with manager.begin() as transaction:
            handle = transaction.enlist(resource)
            assert transaction.enlist(resource) is handle
            consumer = handle.consumer(work.orders, prefetch=10)
            assert resource_body(consumer.receive(SOON_S)) == "order"
            for forbidden in (handle.commit, handle.rollback, handle.close, handle.transaction):
                with pytest.raises(IllegalState, match="manager"):
                    forbidden()
            with pytest.raises(IllegalState, match="listener"):
                consumer.listener = print
        with pytest.raises(IllegalState, match="has ended"):
            handle.send(work.bills, "late")
        with pytest.raises(IllegalState, match="has ended"):
            consumer.receive_no_wait()
        with manager.begin() as transaction:
            again = transaction.enlist(resource).consumer(work.orders)
            assert again.state is consumer.state
            assert again.receive_no_wait() is None


def test_consumers_close_at_the_end_of_the_transaction_when_none_may_be_kept(work: Work, broker: System) -> None:
    resource = JmsResource("jms", broker.url, consumers_max=0)
    work.done_in(resource)
    wait_for(lambda: broker.queue(work.orders.name)["consumers"] == 0, "the consumers to be closed")  # type: ignore[index]
    resource.commit(work.xid, one_phase=True)
    assert work.waiting() == ([], ["bill"])
    resource.close()


def test_prefetched_messages_return_to_the_queue_at_the_end_of_the_transaction(work: Work, make: Make) -> None:
    resource = make()
    with connect(work.system.url) as context:
        for number in range(3):
            context.send(work.orders, f"{number}")
        handle = resource.start(work.xid, timeout_s=60)
        assert resource_body(handle.consumer(work.orders, prefetch=100).receive(SOON_S)) == "order"
        resource.end(work.xid, success=True)
        resource.commit(work.xid, one_phase=True)
        others = context.consumer(work.orders)
        received = [others.receive(SOON_S) for _ in range(3)]
    assert [(message.body, message.redelivered) for message in received if message is not None] == [(f"{n}", False) for n in range(3)]


def test_java_client_sees_no_message_sent_or_held_by_a_prepared_branch(work: Work, make: Make, connect_to: Connect) -> None:
    resource = make()
    work.prepared_in(resource)
    session = connect_to(work.system.url).session()
    consumers = {queue.name: session.consumer(f"queue:{queue.name}") for queue in (work.orders, work.bills)}
    assert [consumer.receive(0.3) for consumer in consumers.values()] == [None, None]
    resource.commit(work.xid)
    received = consumers[work.bills.name].receive(SOON_S)
    assert received is not None
    assert consumers[work.orders.name].receive(0.3) is None


def test_xid_in_use_is_refused_as_duplicate(work: Work, make: Make) -> None:
    first, second = make(), make()
    work.prepared_in(first)
    handle = second.start(work.xid, timeout_s=60)
    with pytest.raises(DuplicateXid):
        second.start(work.xid, timeout_s=60)
    handle.send(work.bills, "another")
    with pytest.raises(OutOfOrder):
        second.commit(work.xid)
    second.end(work.xid, success=True)
    with pytest.raises(DuplicateXid):
        second.prepare(work.xid)
    first.commit(work.xid)
    assert work.waiting() == ([], ["bill"])


@pytest.mark.parametrize(("action", "code"), [("commit", Code.XA_HEURCOM), ("rollback", Code.XA_HEURRB)])
def test_forced_outcome_of_a_branch_is_reported_to_the_manager_until_forgotten(work: Work, make: Make, action: str, code: Code) -> None:
    resource = make()
    work.prepared_in(resource)
    (shown,) = work.system.status()["branches"]
    assert (shown["xid"], shown["state"], shown["sent"], shown["received"]) == (str(work.xid), "prepared", 1, 1)
    work.system.act(f"branches/{action}", xid=str(work.xid))
    assert work.waiting() == (([], ["bill"]) if action == "commit" else (["order"], []))
    work.system.broker.restart()
    assert resource.recover() == [work.xid]
    with pytest.raises(BranchHeuristic) as caught:
        resource.commit(work.xid)
    assert caught.value.xa_code is code
    resource.forget(work.xid)
    assert resource.recover() == []
    with pytest.raises(InvalidInput, match="no branch"):
        work.system.act("branches/commit", xid=str(work.xid))


class Split(JmsResource):
    """A broker whose administrator rolls back each branch before its manager commits it."""

    system: System

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        self.system.act("branches/rollback", xid=str(xid))
        super().commit(xid, one_phase=one_phase)


def test_manager_reports_a_split_outcome_until_the_operator_forgets_the_branch(work: Work, make: Make, tmp_path: Path) -> None:
    split, other = Split("split", lasting(work.system)), make()
    split.system = work.system
    manager = TransactionManager("shop", FileLog(tmp_path / "log"), [split, other])
    with manager:
        transaction = manager.begin()
        transaction.enlist(other).send(work.bills, "kept")
        transaction.enlist(split).send(work.bills, "lost")
        with pytest.raises(HeuristicOutcome):
            transaction.commit()
        (heuristic,) = manager.recoverer().run().heuristics
        assert split.recover() == [heuristic.xid]
        manager.recoverer().forget(heuristic.xid)
        assert manager.recoverer().run().heuristics == []
    assert work.waiting() == (["order"], ["kept"])
    assert other.recover() == []
    split.close()


XID_FIELDS = {"type": "bascule.xa", "formatId": 7, "gtrid": "67", "bqual": ""}


def test_java_client_lists_and_commits_branches_by_the_documented_requests(work: Work, make: Make, connect_to: Connect) -> None:
    work.prepared_in(make())
    session = connect_to(work.system.url).session()
    answers = session.temporary_queue()
    consumer, producer = session.consumer(answers.address), session.producer("queue:$management")

    def asked(operation: str, **fields: object) -> tuple[object, dict[str, object]]:
        properties = {**XID_FIELDS, "operation": operation, **fields}
        producer.send(None, properties=properties, reply_to=answers.address, correlation_id=operation)
        answer = consumer.receive(SOON_S)
        assert answer is not None
        assert answer.correlation_id == operation
        return answer.body, {name: answer.properties.get(name) for name in ("statusCode", "xaCode", "outcome")}

    fields = {"formatId": work.xid.format_id, "gtrid": work.xid.gtrid.hex(), "bqual": work.xid.bqual.hex()}
    text, said = asked("recover")
    assert said == {"statusCode": 200, "xaCode": 0, "outcome": None}
    state, _, name = str(text).split(" ")
    assert (state, name) == ("prepared", ":".join(map(str, fields.values())))
    assert asked("commit", **fields)[1] == {"statusCode": 200, "xaCode": 0, "outcome": None}
    assert asked("commit", **fields)[1] == {"statusCode": 404, "xaCode": Code.XAER_NOTA, "outcome": "committed"}
    assert work.waiting() == ([], ["bill"])


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"operation": "dance"}, 400, Code.XAER_INVAL),
        ({"type": "org.amqp.management"}, 400, Code.XAER_INVAL),
        ({"formatId": "7"}, 400, Code.XAER_INVAL),
        ({"formatId": -1}, 400, Code.XAER_INVAL),
        ({"gtrid": "6"}, 400, Code.XAER_INVAL),
        ({"gtrid": ""}, 400, Code.XAER_INVAL),
        ({"bqual": "62" * 65}, 400, Code.XAER_INVAL),
        ({"bqual": 1}, 400, Code.XAER_INVAL),
        ({"operation": "prepare", "txnId": "31"}, 404, Code.XA_RBCOMMFAIL),
        ({"operation": "commit", "txnId": "31", "bqual": "01"}, 404, Code.XA_RBCOMMFAIL),
        ({"operation": "commit", "bqual": "02"}, 404, Code.XAER_NOTA),
        ({"operation": "forget"}, 404, Code.XAER_NOTA),
    ],
)
def test_invalid_branch_request_is_answered_with_status_code_and_reason(
    broker: System, change: dict[str, object], status: int, code: Code
) -> None:
    with connect(broker.url) as context:
        answer = context.request(Queue("$management"), Message(properties={**XID_FIELDS, "operation": "rollback", **change}))
    assert (answer.properties["statusCode"], answer.properties["xaCode"]) == (status, code), answer.properties
    assert answer.properties["statusDescription"]


def test_management_node_is_not_a_queue_and_takes_no_part_in_a_transaction(broker: System) -> None:
    with connect(broker.url) as context:
        with pytest.raises(Refused, match="reply-to"):
            context.consumer(Queue("$management"))
        with pytest.raises(TransactionRolledBack, match="cannot be part of a transaction"), context.transaction():
            context.send(Queue("$management"), Message(properties={"operation": "recover", "type": "bascule.xa"}))
    assert broker.queue("$management") is None


@pytest.mark.slow
def test_standby_takes_over_prepared_branches(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    with ExitStack() as stack:
        active, standby = (
            System(kafka.bootstrap, tmp_path / name, prefix="xa-jms-takeover", config=SHORT_SESSION) for name in ("one", "two")
        )
        stack.enter_context(active)
        stack.callback(standby.broker.stop)
        standby.broker.launch()
        wait_for(standby.stands_by, "the second broker to stand by")
        resource = JmsResource("jms", lasting(active, standby))
        stack.callback(resource.close)
        work, other = Work(active, "takeover"), Work(active, "takeover.other")
        work.prepared_in(resource)
        other.prepared_in(resource)
        resource.commit(other.xid)
        active.broker.kill()
        wait_for(standby.serves, "the second broker to serve")
        work.system = other.system = standby
        assert work.waiting() == ([], [])
        assert other.waiting() == ([], ["bill"])
        assert resource.recover() == [work.xid]
        resource.commit(work.xid)
        assert work.waiting() == ([], ["bill"])
