"""The receipt of a record as a branch, while Kafka answers late or not at all: nothing happens twice or counts as a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest

from bascule.adapter.inbound import ActivationSpec, Backoff, InboundLog, Record, Xa
from bascule.adapter.inbound.deliveries import RecordDelivery
from bascule.adapter.inbound.delivering import Deliverer, InTransaction
from bascule.adapter.inbound.log_protocol import Superseded, refusal
from bascule.adapter.inbound.log_topic import BARRIER_ENTRY, LogClients, LogTopic
from bascule.adapter.inbound.state import CLAIM, FAILED, FLIGHT, OWNER, READ, LogFold, Place, Ref, key_of
from bascule.adapter.inbound.workers import Counts, Workers
from bascule.core.errors import TooLarge, TransactionInDoubt, TransactionRolledBack, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.xid import Xid
from bascule.kafka.appender import OffsetUnknown
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager
from bascule.xa.errors import BranchRolledBack, Code, ResourceFailed
from bascule.xa.resource import Vote
from tests.support.system import wait_for

PLACE = Place("payments", 0)
FIRST, SECOND = Xid(7, b"first", b"inbound"), Xid(7, b"second", b"inbound")


class Topic:
    """The log's topic. Without replicas, an append is stored (or ``lost``), but Kafka does not answer it and nobody can read it yet."""

    def __init__(self) -> None:
        self.replicas = True
        self.lost = False
        #: The number of appends that are lost before an append is stored again.
        self.drops = 0
        #: If false, each append is stored, but gets no offset.
        self.offsets_known = True
        self.follow: Callable[[bytes, bytes | None], None] = lambda *_: None
        self._entries: list[tuple[bytes, bytes | None]] = []
        self._end = self._read = 0
        self._lock = threading.RLock()

    def append(self, record: Outgoing) -> Future[int]:
        future: Future[int] = Future()
        with self._lock:
            if self.drops:
                self.drops -= 1
                future.set_exception(Unavailable("timed out"))
                return future
            if self.replicas or not self.lost:
                self._entries.append((record.key or b"", record.value))
            if self.replicas:
                self._end = len(self._entries)
            if self.replicas and not self.offsets_known:
                future.set_exception(OffsetUnknown("no offset"))
            elif self.replicas:
                future.set_result(self._end - 1)
            else:
                future.set_exception(Unavailable("no answer"))
        return future

    def recover(self) -> None:
        with self._lock:
            self.replicas, self._end = True, len(self._entries)

    def read(self, _timeout_s: float) -> dict[bytes, Any]:
        with self._lock:
            for entry in self._entries[self._read : self._end]:
                self.follow(*entry)
            self._read = self._end
        return {}

    read_behind_barrier = read

    def reach(self, _partition: int, _offset: int, timeout_s: float) -> dict[bytes, Any]:
        return self.read(timeout_s)

    def reached(self) -> dict[int, int]:
        return {}

    def close(self) -> None: ...


class Receipt:
    """A member with one record in flight."""

    def __init__(self, at: type[LogTopic] = LogTopic) -> None:
        self.topic = Topic()
        self.at = at({}, "shop.inbound", self.connect)
        self.log = InboundLog("inbound", {}, group="shop", at=self.at)
        self.ref = Ref(PLACE, self.log.take(PLACE, None), 5)
        self.log.schedule([self.ref])

    def connect(self, follow: Callable[[bytes, bytes | None], None], _begin: Callable[[], None]) -> LogClients:
        self.topic.follow = follow
        client = cast("Any", self.topic)
        return LogClients(client, client, client)

    def ended(self, xid: Xid) -> None:
        self.log.start(xid, timeout_s=60).take(self.ref)
        self.log.end(xid, success=True)

    def unanswered(self, xid: Xid) -> None:
        """Prepare a transaction whose claim Kafka does not answer, and check that the branch fails."""
        self.ended(xid)
        self.topic.replicas = False
        with pytest.raises(ResourceFailed):
            self.log.prepare(xid)


@pytest.fixture
def case() -> Receipt:
    return Receipt()


def test_unanswered_claim_is_withdrawn_before_next_claim(case: Receipt) -> None:
    case.unanswered(FIRST)
    with pytest.raises(ResourceFailed):
        case.log.rollback(FIRST)
    case.topic.recover()
    case.ended(SECOND)
    case.log.prepare(SECOND)
    case.log.commit(SECOND)
    assert case.log.all_flights() == {}


def test_commit_that_kafka_did_not_store_succeeds_on_retry(case: Receipt) -> None:
    """The claim must stay until the commit: a record in flight without a claim would be redelivered."""
    case.ended(FIRST)
    case.log.prepare(FIRST)
    case.topic.drops = 1
    with pytest.raises(ResourceFailed):
        case.log.commit(FIRST)
    assert case.log.recover() == [FIRST]
    case.log.commit(FIRST)
    assert case.log.all_flights() == {}


def test_claim_with_open_outcome_makes_next_claim_retriable(case: Receipt) -> None:
    case.unanswered(FIRST)
    case.topic.lost = True
    with pytest.raises(ResourceFailed):
        case.log.rollback(FIRST)
    case.topic.recover()
    case.ended(SECOND)
    with pytest.raises(ResourceFailed, match="which is in doubt"):
        case.log.prepare(SECOND)
    case.log.rollback(SECOND)
    assert case.log.recover() == [FIRST]
    case.log.rollback(FIRST)
    case.ended(SECOND)
    case.log.prepare(SECOND)


def test_claim_of_settled_record_is_refused_as_not_retriable(case: Receipt) -> None:
    case.ended(FIRST)
    case.log.commit(FIRST, one_phase=True)
    case.ended(SECOND)
    with pytest.raises(Superseded, match="is already settled"):
        case.log.prepare(SECOND)
    assert case.log.all_flights() == {}


class Shop(Receipt):
    """The delivery of the record in transactions. If ``enlisted``, the transactions include Kafka besides the log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, enlisted: bool, kafka: ModelResource | None = None) -> None:
        super().__init__()
        monkeypatch.setattr("bascule.adapter.inbound.delivering.AWAY_PAUSE_S", 0.01)
        self.kafka = cast("Any", kafka or ModelResource("kafka"))
        self.manager = TransactionManager("shop", ModelLog(), [self.log, self.kafka], recovery_interval_s=0.05)
        xa = Xa(self.manager, self.log, self.kafka)
        spec = ActivationSpec(
            topics=(PLACE.topic,), group="shop", order="partition", transacted=xa, retries=1, backoff=Backoff(0, 1, 0)  # type: ignore[arg-type]
        )  # fmt: skip
        self.counts = Counts()
        deliverer = Deliverer(spec, self.log, InTransaction(xa, 60, lambda: False), self.counts)
        self.failures: list[BaseException] = []

        def handle(delivery: RecordDelivery, call: Callable[[Record], None]) -> float | None:
            return deliverer.handle(self.workers, delivery, call)

        self.workers = Workers(spec, self.work, handle, self.counts, self.failures.append)
        self._enlisted = enlisted
        self.tries = 0

    def work(self, record: Record) -> None:
        self.tries += 1
        if self._enlisted:
            self.manager.enlist(self.kafka).append(record.value)

    def deliver(self) -> None:
        record = Record(*PLACE, self.ref.offset, None, b"receipt")
        self.workers.add([RecordDelivery(self.ref, record, (key_of(FLIGHT, self.ref),))])


@pytest.fixture(params=[True, False], ids=["with a send", "alone"])
def shop(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Shop]:
    shop = Shop(monkeypatch, enlisted=request.param)
    with shop.manager:
        shop.workers.start()
        yield shop
        shop.workers.stop(10)


@pytest.mark.parametrize("lost", [False, True])
def test_kafka_outage_is_not_counted_as_failure_and_record_is_delivered_once(shop: Shop, lost: bool) -> None:
    shop.topic.replicas = False
    shop.deliver()
    wait_for(lambda: shop.tries > 4, "tries without Kafka")
    shop.topic.lost = lost
    wait_for(lambda: shop.tries > 8, "tries without Kafka")
    shop.topic.recover()
    wait_for(lambda: shop.counts.delivered or shop.counts.dead_lettered, "the record's end")
    assert (shop.counts.delivered, shop.counts.failed, shop.log.flights(PLACE).keys) == (1, 0, {})
    assert shop.kafka.durable.committed == ([b"receipt"] if shop._enlisted else [])


class SentRecords(list[Any]):
    """The handle of a branch, with the interface of Kafka's handle."""

    def send(self, topic: str, value: bytes | None, _key: bytes | None, **_rest: object) -> None:
        self.append((topic, value))


class RefusesValues(ModelResource):
    """A cluster that refuses messages with a value when the branch prepares."""

    def start(self, xid: Xid, *, timeout_s: float) -> Any:
        super().start(xid, timeout_s=timeout_s)
        self._active[xid] = SentRecords()
        return self._active[xid]

    def prepare(self, xid: Xid) -> Vote:
        if any(value for _, value in cast("Any", self._active[xid])):
            del self._active[xid]
            raise BranchRolledBack("no room", cause=TooLarge("no room"))
        return super().prepare(xid)


class VotesNo(ModelResource):
    """A resource that votes no for a reason that no record has caused."""

    def __init__(self, code: Code, cause: Exception | None) -> None:
        super().__init__("kafka")
        self.votes_no = True
        self._code, self._cause = code, cause

    def prepare(self, xid: Xid) -> Vote:
        if self.votes_no:
            del self._active[xid]
            raise BranchRolledBack("not now", self._code) from self._cause
        return super().prepare(xid)


@pytest.mark.parametrize(
    ("code", "cause"),
    [(Code.XA_RBCOMMFAIL, None), (Code.XA_RBTRANSIENT, Unavailable("no transaction can be started"))],
    ids=["its connection was lost", "what it needs is away"],
)
def test_rollback_because_of_unavailable_resource_is_not_counted_as_failure_of_record(
    monkeypatch: pytest.MonkeyPatch, code: Code, cause: Exception | None
) -> None:
    kafka = VotesNo(code, cause)
    shop = Shop(monkeypatch, enlisted=True, kafka=kafka)
    with shop.manager:
        shop.workers.start()
        shop.deliver()
        wait_for(lambda: shop.tries > 4 or shop.counts.dead_lettered, "tries without it", 10)
        kafka.votes_no = False
        wait_for(lambda: shop.counts.delivered or shop.counts.dead_lettered, "the record's end", 10)
        shop.workers.stop(10)
    assert (shop.counts.delivered, shop.counts.failed, kafka.durable.committed) == (1, 0, [b"receipt"])


def test_transactional_dead_letter_too_large_for_topic_is_stored_without_value(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(monkeypatch, enlisted=False, kafka=RefusesValues("kafka"))

    def fail(_record: Record) -> None:
        raise ValueError("no account")

    monkeypatch.setattr(shop.workers, "_endpoint", fail)
    with shop.manager:
        shop.workers.start()
        shop.deliver()
        wait_for(lambda: shop.counts.dead_lettered, "the dead letter")
        shop.workers.stop(10)
    assert (shop.kafka.durable.committed, shop.log.flights(PLACE).keys) == ([("shop.dead-letter", b"")], {})


def test_record_fails_when_endpoint_rolls_back_its_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the record would count as delivered and stay in flight until the next start."""
    shop = Shop(monkeypatch, enlisted=False, kafka=RefusesValues("kafka"))
    monkeypatch.setattr(shop.workers, "_endpoint", lambda _: shop.manager.current.rollback())
    with shop.manager:
        shop.workers.start()
        shop.deliver()
        wait_for(lambda: shop.counts.delivered or shop.counts.dead_lettered, "the record's end")
        shop.workers.stop(10)
    assert (shop.counts.delivered, shop.counts.failed, shop.counts.dead_lettered) == (0, 2, 1)


@pytest.mark.parametrize(
    "error", [TransactionInDoubt("x"), TransactionRolledBack("x", cause=Unavailable("no broker"))], ids=["in doubt", "rolled back"]
)
def test_transaction_error_raised_by_endpoint_is_failure_of_record(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """For example, an error of the endpoint's local JMS transaction does not put the record's own transaction in doubt."""
    shop = Shop(monkeypatch, enlisted=False, kafka=RefusesValues("kafka"))

    def fail(_record: Record) -> None:
        raise error

    monkeypatch.setattr(shop.workers, "_endpoint", fail)
    with shop.manager:
        shop.workers.start()
        shop.deliver()
        wait_for(lambda: shop.counts.delivered or shop.counts.dead_lettered, "the record's end")
        shop.workers.stop(10)
    assert (shop.counts.delivered, shop.counts.failed, shop.counts.dead_lettered) == (0, 2, 1)


@pytest.mark.parametrize("retry", [InboundLog.housekeep, InboundLog.close])
def test_record_finished_during_outage_leaves_in_flight_state_later(case: Receipt, retry: Callable[[InboundLog], None]) -> None:
    """Otherwise the next start would redeliver the record, perhaps days later."""
    case.topic.replicas, case.topic.lost = False, True
    case.log.done(PLACE, [key_of(FLIGHT, case.ref)])
    case.topic.recover()
    retry(case.log)
    case.topic.read(0.0)
    assert case.at.known(lambda fold: fold.place(PLACE).flights) == {}


def test_records_stored_at_unknown_offsets_can_be_in_flight_and_finished() -> None:
    case = Receipt()
    case.topic.offsets_known = False
    other = Ref(PLACE, case.ref.token, 6)
    case.log.schedule([other])
    assert set(case.log.flights(PLACE).keys) == {5, 6}
    case.log.done(PLACE, [key_of(FLIGHT, case.ref)], wait=True)
    case.log.done(PLACE, [key_of(FLIGHT, other)])
    assert not case.log.flights(PLACE).keys
    assert not case.at._deletions


def test_failure_count_is_stored_or_raises_unavailable(case: Receipt) -> None:
    assert case.log.failed(case.ref, 2) == key_of(FAILED, case.ref)
    assert case.log.flights(PLACE).failures == {5: 2}
    case.topic.drops = 1
    with pytest.raises(Unavailable):
        case.log.failed(case.ref, 3)
    assert case.log.flights(PLACE).failures == {5: 2}


def test_finish_that_kafka_has_not_stored_raises_unavailable_and_record_stays_in_flight(case: Receipt) -> None:
    case.topic.drops = 1
    with pytest.raises(Unavailable):
        case.log.done(PLACE, [key_of(FLIGHT, case.ref)], wait=True)
    assert set(case.log.flights(PLACE).keys) == {5}


@pytest.mark.parametrize("store", [InboundLog.schedule, InboundLog.advance])
def test_unstored_entries_of_read_records_raise_unavailable(case: Receipt, store: Callable[[InboundLog, list[Ref]], None]) -> None:
    """The member then commits the group's offsets. After a crash, records without an entry would never be delivered."""
    case.topic.drops = 1
    with pytest.raises(Unavailable):
        store(case.log, [Ref(PLACE, case.ref.token, 6)])
    flights = case.log.flights(PLACE)
    assert (set(flights.keys), flights.read_to) == ({5}, None)


def test_read_entries_are_deleted_by_owner_after_later_entry(case: Receipt) -> None:
    ends = [Ref(PLACE, case.ref.token, offset) for offset in (6, 8)]
    for end in ends:
        case.log.advance([end])
    assert not [key for key, value in case.topic._entries if value is None]
    other = InboundLog("inbound", {}, group="shop", at=case.at)
    case.log.housekeep()  # reads the log up to its end
    other.housekeep()
    assert [key for key, value in case.topic._entries if value is None] == [key_of(READ, ends[0])]
    assert case.log.flights(PLACE).read_to == 8
    case.log.housekeep()
    assert len([key for key, value in case.topic._entries if value is None]) == 1


def test_owner_entries_are_kept_until_deletion_of_void_entries_is_stored(case: Receipt) -> None:
    """Without the entries of later owners, the late entry of the first owner would count, and its record would be redelivered."""
    first = case.ref.token
    second = case.log.take(PLACE, first)
    late = key_of(FLIGHT, Ref(PLACE, first, 6))
    case.topic._entries.append((late, b"1"))
    case.topic._end += 1
    owner = case.topic.append

    def stores_owners_alone(record: Outgoing) -> Future[int]:
        case.topic.drops = 0 if record.value is not None else 1
        return owner(record)

    case.topic.append = stores_owners_alone  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        case.log.take(PLACE, second)
    case.topic.append = owner  # type: ignore[method-assign]
    assert case.at.known(lambda fold: fold.place(PLACE).void) == {late}
    third = case.at.known(lambda fold: fold.place(PLACE).owner)
    assert {first, second} & set(case.at.known(lambda fold: list(fold.place(PLACE).owners)))
    case.log.take(PLACE, third)
    case.log.flights(PLACE)
    assert case.at.known(lambda fold: (fold.place(PLACE).void, len(fold.place(PLACE).owners))) == (set(), 1)


class RereadLogTopic(LogTopic):
    """A log that another thread begins to reread after each look at the known entries."""

    def known(self, see: Any) -> Any:
        found = super().known(see)
        self._begin()
        return found


def test_commit_deletes_flight_and_claim_when_log_is_reread_meanwhile() -> None:
    """Otherwise the log would delete only the claim, and the record would be redelivered."""
    case = Receipt(RereadLogTopic)
    case.ended(FIRST)
    case.log.prepare(FIRST)
    case.log.commit(FIRST)
    assert [key for key, value in case.topic._entries if value is None] == [
        key_of(FLIGHT, case.ref),
        key_of(CLAIM, case.ref, FIRST),
    ]


def test_claim_of_replaced_owner_is_refused(case: Receipt) -> None:
    case.log.take(PLACE, case.ref.token)
    case.ended(FIRST)
    with pytest.raises(Superseded, match="taken over by another member"):
        case.log.prepare(FIRST)
    assert case.log.recover() == []
    assert set(case.log.flights(PLACE).keys) == {5}


def test_claim_with_token_of_other_owner_does_not_count_for_own_token() -> None:
    other, own = Ref(PLACE, "a", 5), Ref(PLACE, "b", 5)
    fold = LogFold()
    for key, value in (
        (key_of(OWNER, other), b"x -"), (key_of(FLIGHT, other), b"1"), (key_of(CLAIM, other, FIRST), b"1"), (key_of(OWNER, own), b"y a"),
    ):  # fmt: skip
        fold.apply(key, value)
    assert refusal(fold.place(PLACE), FIRST, other) is None
    assert isinstance(refusal(fold.place(PLACE), FIRST, own), BranchRolledBack)
    assert isinstance(refusal(fold.place(PLACE), SECOND, own), ResourceFailed)


def test_owner_and_claim_at_unknown_offsets_are_resolved_from_log() -> None:
    case = Receipt()
    case.topic.offsets_known = False
    ref = Ref(PLACE, case.log.take(PLACE, case.ref.token), 5)
    with pytest.raises(Unavailable, match="taken over by another member"):
        case.log.take(PLACE, case.ref.token)
    case.log.start(FIRST, timeout_s=60).take(ref)
    case.log.end(FIRST, success=True)
    assert case.log.prepare(FIRST) is Vote.YES
    case.log.start(SECOND, timeout_s=60).take(case.ref)
    case.log.end(SECOND, success=True)
    with pytest.raises(Superseded):
        case.log.prepare(SECOND)
    case.log.commit(FIRST)
    assert case.log.all_flights() == {}


class ImmediateAppender:
    """An appender that stores each record at once."""

    def __init__(self, stored: list[Outgoing]) -> None:
        self._stored = stored

    def append(self, record: Outgoing) -> Future[int]:
        self._stored.append(record)
        future: Future[int] = Future()
        future.set_result(len(self._stored) - 1)
        return future

    def close(self) -> None: ...


def test_barrier_entry_of_inbound_log_has_no_effect_in_any_release(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[Outgoing] = []
    monkeypatch.setattr("bascule.kafka.compacted.Appender", lambda _: ImmediateAppender(stored))
    reader = LogTopic({"bootstrap.servers": "127.0.0.1:9"}, "shop.inbound")._reader()
    try:
        assert reader.write_barriers([3]) == {3: 0}
    finally:
        reader.close()
    assert [(each.key, each.value, each.partition) for each in stored] == [(BARRIER_ENTRY, None, 3)]
    fold = LogFold()
    fold.apply(BARRIER_ENTRY, None)
    assert not any(state.owners or state.flights or state.claims for state in fold.places.values())
