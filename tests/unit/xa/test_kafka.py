"""Errors of Kafka as a resource: large records, outages, interrupts, and unknown offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Event, Lock
from typing import Any, cast

import pytest

from bascule.core.errors import InvalidInput, TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.kafka.compacted import Stored
from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.joint import JointTry
from bascule.writer.errors import RecordRefused
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa import kafka as module
from bascule.xa.blocking import now_ms
from bascule.xa.errors import BranchRolledBack, OutOfOrder, ResourceError, ResourceFailed, TransactionError
from bascule.xa.kafka import AsyncKafkaBranch, KafkaBranch, KafkaResource
from bascule.xa.kafka_protocol import BranchLimits, _Ending
from bascule.xa.kafka_records import STARTED
from bascule.xa.log import Outcome
from bascule.xa.resource import Vote
from bascule.xa.transaction import Transaction
from bascule.xa.two_phase import TransactionStatus
from bascule.xa.xid import Xid, branch, new_gtrid
from tests.support.outage import THREADS, Door, Service, told_together
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

#: Time limit of an answer, also on a busy machine.
WAIT_S = 20.0 * SLOWNESS


class Clients:
    """In place of Kafka's clients. Each record is too large for the side topic."""

    def __init__(self) -> None:
        self.appender = self
        self.deleted: list[bytes | None] = []

    @contextmanager
    def slot(self, _transactional_id: str, *, own: bool) -> Iterator[Clients]:
        assert own
        yield self

    def prepare(self) -> None: ...

    def reach(self) -> None: ...

    def check(self, _record: Outgoing) -> int:
        return 1

    def append(self, record: Outgoing) -> Future[int]:
        future: Future[int] = Future()
        if record.topic.endswith(".side"):
            future.set_exception(TooLarge(record.topic))
        else:
            future.set_result(0)
            if record.value is None:
                self.deleted.append(record.key)
        return future


def test_branch_whose_prepare_record_is_too_large_is_rolled_back_with_this_cause() -> None:
    resource, clients = KafkaResource("kafka", {}), Clients()
    resource._calls._clients = cast("Any", clients)
    with TransactionManager("shop", ModelLog(), []) as manager:
        manager.resources["kafka"] = resource
        with pytest.raises(TransactionRolledBack) as raised, manager.begin() as transaction:
            transaction.enlist(resource).send("receipts", b"large")
    assert isinstance(raised.value.cause, BranchRolledBack)
    assert isinstance(raised.value.cause.cause, TooLarge)
    assert len(clients.deleted) == 1  # the record that announces the branch
    assert resource._branches._sent == {}
    assert not transaction.enlisted
    assert transaction.unfinished == {}


class UnreachableKafka(Clients):
    """In place of the clients of a Kafka that does not answer."""

    def turn(self, _transactional_id: str) -> Lock:
        return Lock()

    def transact(self, _make: object) -> None:
        raise Unavailable("no answer")

    def append(self, _record: Outgoing) -> Future[int]:
        future: Future[int] = Future()
        future.set_exception(Unavailable("no answer"))
        return future


@contextmanager
def sent(clients: Clients, others: list[ModelResource]) -> Iterator[tuple[KafkaResource, Transaction]]:
    """Yield Kafka and an active transaction that has sent a record and written to the other resources."""
    resource = KafkaResource("kafka", {})
    resource._calls._clients = cast("Any", clients)
    with TransactionManager("shop", ModelLog(), others, recovery_interval_s=60) as manager:
        manager.resources["kafka"] = resource
        transaction = manager.begin()
        for each in others:
            transaction.enlist(each).append("row")
        transaction.enlist(resource).send("receipts", b"1")
        yield resource, transaction


@pytest.mark.parametrize("beside", [[], ["db"]], ids=["alone", "beside a database"])
def test_messages_of_branch_sent_during_outage_are_not_kept(beside: list[str]) -> None:
    """Nobody asks later for a branch that was never stored in the log."""
    with sent(UnreachableKafka(), [ModelResource(name) for name in beside]) as (resource, transaction):
        with pytest.raises(TransactionError):
            transaction.commit()
        assert (resource._branches._sent, resource._branches._branches._states) == ({}, {})


class KafkaModel(Clients):
    """In place of the clients of a Kafka that accepts everything, one transaction at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[bytes, Stored] = {}
        self.written: list[list[bytes | None]] = []
        self.lock = Lock()

    def turn(self, _transactional_id: str) -> Lock:
        return self.lock

    def append(self, record: Outgoing) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(0)
        if record.topic.endswith(".log") and record.value is not None:
            self.table[record.key or b""] = Stored(record.value, 0, 0)
        return future

    def transact(self, make: Callable[[Mapping[bytes, Stored]], list[Outgoing]]) -> None:
        self.written.append([record.value for record in make(self.table) if record.topic == "receipts"])


class WithoutTransactions(KafkaModel):
    """A Kafka that cannot start a transaction."""

    def reach(self) -> None:
        raise Unavailable("no transaction can be started: why")


@pytest.mark.parametrize("beside", [[], ["db"]], ids=["alone", "beside a database"])
def test_kafka_that_cannot_start_transaction_votes_no(beside: list[str]) -> None:
    """Such a Kafka could not roll back a prepared branch either, and the database would keep its locks."""
    clients, others = WithoutTransactions(), [ModelResource(name) for name in beside]
    rolled_back = pytest.raises(TransactionRolledBack, match="no transaction can be started: why")
    with sent(clients, others) as (resource, transaction), rolled_back:
        transaction.commit()
    assert [key for key in clients.table if not key.endswith(b"/started")] == []
    assert (transaction.unfinished, resource._branches._sent, resource._branches._branches._states) == ({}, {}, {})
    assert [each.durable.committed for each in others] == [[]] * len(beside)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> tuple[KafkaResource, KafkaModel]:
    """Kafka with one transactional id and small limits of a branch."""
    monkeypatch.setattr(module, "SLOTS", 1)
    resource, clients = KafkaResource("kafka", {}, limits=BranchLimits(records_max=4, bytes_max=1000)), KafkaModel()
    resource._calls._clients = cast("Any", clients)
    return resource, clients


def test_branch_is_limited_to_records_and_bytes_that_kafka_copies_in_time(
    here: tuple[KafkaResource, KafkaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Kafka transaction could commit a larger branch, and the other branches of the transaction would keep their locks."""
    resource, clients = here
    many = resource.start(new_xid(), timeout_s=60)
    for _ in range(4):
        many.send("receipts", b"1")
    with pytest.raises(InvalidInput, match="4 records"):
        many.send("receipts", b"1")
    monkeypatch.setattr(clients, "check", lambda record: len(record.value))
    large = resource.start(new_xid(), timeout_s=60)
    large.send("receipts", b"x" * 999)
    with pytest.raises(InvalidInput, match="transaction too large for kafka"):
        large.send("receipts", b"xx")


def test_branches_committed_together_share_transactions_up_to_limit(here: tuple[KafkaResource, KafkaModel]) -> None:
    resource, clients = here
    xids = [new_xid() for _ in range(3)]
    for xid in xids:
        branch_ = resource.start(xid, timeout_s=60)
        branch_.send("receipts", b"1")
        branch_.send("receipts", b"2")
        resource.end(xid, success=True)
        resource.prepare(xid)
    with ThreadPoolExecutor(len(xids)) as threads:
        with clients.lock:
            ended = [threads.submit(resource.commit, xid) for xid in xids]
            wait_for(lambda: [len(each) for each in resource._branches._waiting.values()] == [len(xids)], "all to wait")
        for each in ended:
            each.result(30)
    assert [len(values) for values in clients.written] == [4, 2]


def test_unavailable_topic_limits_of_kafka_raise_resource_failed(
    here: tuple[KafkaResource, KafkaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint of the adapter must not count an unavailable Kafka as a failure of its record."""
    resource, clients = here

    def check(_record: Outgoing) -> int:
        raise Unavailable("no answer")

    monkeypatch.setattr(clients, "check", check)
    with pytest.raises(ResourceFailed):
        resource.start(new_xid(), timeout_s=60).send("receipts", b"1")


def test_branch_of_suspended_machine_is_rolled_back_at_prepare(
    here: tuple[KafkaResource, KafkaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka may have deleted the messages of the branch. The monotonic clock does not include the suspension."""
    resource, clients = here
    xid = new_xid()
    resource.start(xid, timeout_s=60).send("receipts", b"1")
    resource.end(xid, success=True)
    monkeypatch.setattr(module, "now_ms", lambda: now_ms() + 2 * 3_600_000)
    with pytest.raises(BranchRolledBack, match="more than 3600 s have passed since its start"):
        resource.prepare(xid)
    assert clients.written == [[]]


def new_xid() -> Xid:
    return branch(new_gtrid("shop", 0), "kafka")


class SlowLog(KafkaModel):
    """In place of the clients of a Kafka that stores the record of a prepared branch when the test tells it to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.stored = Event(), Future[int]()

    def append(self, record: Outgoing) -> Future[int]:
        if record.topic.endswith(".log") and record.value is not None and not (record.key or b"").endswith(STARTED):
            self.asked.set()
            return self.stored
        return super().append(record)


def test_branch_votes_yes_when_its_record_is_stored() -> None:
    clients = SlowLog()
    with sent(clients, [ModelResource("db")]) as (resource, transaction), ThreadPoolExecutor(1) as thread:
        (xid,) = resource._branches._sent
        resource.end(xid, success=True)
        vote = thread.submit(resource.prepare, xid)
        assert clients.asked.wait(WAIT_S)
        with pytest.raises(TimeoutError):
            vote.result(0.2)
        clients.stored.set_result(1)
        assert vote.result(WAIT_S) is Vote.YES
        assert transaction.status is TransactionStatus.ACTIVE


def prepared(resource: KafkaResource, *values: bytes) -> Xid:
    """Return a prepared branch that has sent ``values``."""
    xid = new_xid()
    handle = resource.start(xid, timeout_s=60)
    for value in values:
        handle.send("receipts", value)
    resource.end(xid, success=True)
    resource.prepare(xid)
    return xid


def committed_together(resource: KafkaResource, clients: KafkaModel, *xids: Xid) -> list[BaseException | None]:
    """Return the error of each commit, when all of them wait for the same transactional id."""
    with ThreadPoolExecutor(len(xids)) as threads:
        with clients.lock:
            ended = []
            for count, xid in enumerate(xids, 1):
                ended.append(threads.submit(resource.commit, xid))
                wait_for(lambda count=count: [len(each) for each in resource._branches._waiting.values()] == [count], "it to wait")  # type: ignore[misc]
        return [each.exception(WAIT_S) for each in ended]


def test_ended_branch_accepts_no_more_records(here: tuple[KafkaResource, KafkaModel]) -> None:
    resource, clients = here
    xid = new_xid()
    handle = resource.start(xid, timeout_s=60)
    resource.end(xid, success=True)
    with pytest.raises(OutOfOrder, match=r"send: branch .* is ended"):
        handle.send("receipts", b"late")
    assert clients.table == {}


def test_branch_without_records_ends_without_request_to_kafka(here: tuple[KafkaResource, KafkaModel]) -> None:
    resource, clients = here
    one_phase, undone = new_xid(), new_xid()
    for xid in (one_phase, undone):
        resource.start(xid, timeout_s=60)
        resource.end(xid, success=True)
    resource.commit(one_phase, one_phase=True)
    resource.rollback(undone)
    assert (clients.table, clients.written, clients.deleted) == ({}, [], [])
    assert resource._branches.at_work == set()


def test_refused_record_fails_its_own_branch_and_branches_committed_together_succeed(
    here: tuple[KafkaResource, KafkaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    resource, clients = here
    xids = [prepared(resource, value) for value in (b"1", b"refused", b"3")]
    write = clients.transact

    def transact(make: Callable[[Mapping[bytes, Stored]], list[Outgoing]]) -> None:
        records = make(clients.table)
        if any(record.value == b"refused" for record in records):
            raise RecordRefused("its timestamp is wrong")
        write(lambda _: records)

    monkeypatch.setattr(clients, "transact", transact)
    first, refused, third = committed_together(resource, clients, *xids)
    assert (first, third) == (None, None)
    assert isinstance(refused, ResourceError)
    assert str(xids[1]) in str(refused)
    assert "its timestamp is wrong" in str(refused)
    assert sorted(clients.written) == [[b"1"], [b"3"]]


def test_interrupted_thread_fails_branches_that_it_commits_for_other_threads(
    here: tuple[KafkaResource, KafkaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    resource, clients = here
    xids = [prepared(resource, value) for value in (b"1", b"2")]

    def interrupted(_make: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(clients, "transact", interrupted)
    raised = committed_together(resource, clients, *xids)
    assert sorted(type(each).__name__ for each in raised) == ["KeyboardInterrupt", "ResourceFailed"]
    monkeypatch.undo()
    for xid in xids:
        resource.commit(xid)
    assert clients.written == [[b"1"], [b"2"]], "each commit can be repeated"


def test_interrupted_thread_fails_all_branches_that_it_commits_one_by_one(
    here: tuple[KafkaResource, KafkaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread commits the branches one by one because Kafka has refused a record."""
    resource, clients = here
    xids = [prepared(resource, value) for value in (b"1", b"2", b"3")]
    calls: list[object] = []

    def transact(_make: object) -> None:
        calls.append(None)
        raise RecordRefused("its timestamp is wrong") if len(calls) == 1 else KeyboardInterrupt

    monkeypatch.setattr(clients, "transact", transact)
    raised = committed_together(resource, clients, *xids)
    assert sorted(type(each).__name__ for each in raised) == ["KeyboardInterrupt", "ResourceFailed", "ResourceFailed"]
    assert resource._branches._waiting == {}
    monkeypatch.undo()
    for xid in xids:
        resource.commit(xid)
    assert clients.written == [[b"1"], [b"2"], [b"3"]], "each commit can be repeated"


class InterruptingTurn:
    """A lock whose first waiting thread is interrupted."""

    def __init__(self) -> None:
        self._interrupted, self._lock = False, Lock()

    def acquire(self) -> None:
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()


def test_branch_of_interrupted_waiting_thread_is_not_committed_twice(
    here: tuple[KafkaResource, KafkaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch must leave the waiting list. Otherwise a repeated commit would put it twice into one Kafka transaction."""
    resource, clients = here
    xid, turn = prepared(resource, b"1"), InterruptingTurn()
    monkeypatch.setattr(clients, "turn", lambda _slot: turn)
    with pytest.raises(KeyboardInterrupt):
        resource.commit(xid)
    assert resource._branches._waiting == {}
    resource.commit(xid)
    assert clients.written == [[b"1"]]


class InterruptedMutex:
    """Raises KeyboardInterrupt at the second release of the mutex, just after the thread has taken the branches to end."""

    def __init__(self) -> None:
        self._released = 0
        self._lock = Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._released += 1
        if self._released == 2:
            raise KeyboardInterrupt


def test_thread_interrupted_after_taking_branches_of_others_fails_them(here: tuple[KafkaResource, KafkaModel]) -> None:
    resource, clients = here
    branches = resource._branches
    mine, others = prepared(resource, b"1"), prepared(resource, b"2")
    other = _Ending(others, Outcome.COMMIT, one_phase=False, weight=0.25, messages=())
    branches._waiting[branches.slots[0]] = [other]
    branches._lock = InterruptedMutex()
    with pytest.raises(KeyboardInterrupt):
        resource.commit(mine)
    assert other.done
    assert isinstance(other.error, ResourceFailed)
    assert branches._waiting == {}
    for xid in (mine, others):
        resource.commit(xid)
    assert clients.written == [[b"1"], [b"2"]]


class WithoutOffsets(KafkaModel):
    """In place of the clients of a Kafka that stores a message and does not return its offset."""

    def append(self, record: Outgoing) -> Future[int]:
        if not record.topic.endswith(".side"):
            return super().append(record)
        future: Future[Any] = Future()
        future.set_result(None)
        return future


def test_branch_with_message_at_unknown_offset_is_rolled_back() -> None:
    clients = WithoutOffsets()
    with sent(clients, []) as (resource, transaction):
        with pytest.raises(TransactionRolledBack, match=r"did not return the offset of a record in topic 'bascule\.xa\.side'"):
            transaction.commit()
        assert resource._branches.at_work == set()


def test_branches_started_while_kafka_is_away_share_one_connection_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    door, kafka = Door(), Service(Unavailable("no answer"))
    monkeypatch.setattr(module, "Clients", kafka)
    resource = KafkaResource("kafka", {})
    resource._calls._opening = JointTry(door)
    errors = told_together(door, kafka, lambda: resource.start(branch(new_gtrid("shop", 0), "kafka"), timeout_s=5))
    assert [str(each) for each in errors] == ["XAER_RMFAIL: kafka: no answer"] * THREADS
    assert kafka.tries == 1


@pytest.mark.parametrize("refused", [False, True])
def test_cancelled_send_has_finished_when_cancellation_is_raised(refused: bool) -> None:
    """Otherwise nobody would know whether the transaction commits with the record."""
    sent: list[bytes | None] = []
    begun, released = Event(), Event()

    def send(record: Outgoing) -> None:
        begun.set()
        assert released.wait(WAIT_S), "the event loop was blocked"
        if refused:
            raise ResourceFailed("Kafka is away")
        sent.append(record.value)

    async def main() -> BaseException:
        task = asyncio.create_task(AsyncKafkaBranch(KafkaBranch(send), nullcontext).send("orders", b"paid"))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        released.set()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await task
        return cancelled.value

    cause = asyncio.run(main()).__cause__
    assert sent == ([] if refused else [b"paid"])
    assert isinstance(cause, ResourceFailed) if refused else cause is None
