"""A slot while Kafka is unreachable: calls time out, and its close hides no other error and leaves nothing open."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.kafka.compacted import Stored
from bascule.kafka.incarnation import Background, KafkaProducer, ProducerLog, fault_of
from bascule.kafka.slot import LONG_TRANSACTION_TIMEOUT_MS, TRANSACTION_TIMEOUT_MS, Slot, _SlotClients
from bascule.threads.background import in_background
from bascule.threads.joint import JointTry
from bascule.writer.errors import RecordRefused, TransactionFault
from bascule.writer.incarnation import Attempt, Incarnation, IncarnationEvent
from tests.support.outage import THREADS, Door, Service, told_together

TIMED_OUT = KafkaException(KafkaError(KafkaError._TIMED_OUT))


class Reader:
    """A table of one partition."""

    closed = False
    partitions = (0,)

    def __init__(self) -> None:
        self.table: dict[bytes, Stored] = {}

    def write_barriers(self, partitions: Any, _timeout_s: float) -> dict[int, int]:
        return dict.fromkeys(partitions, 9)

    def read_to(self, ends: Any, _timeout_s: float, _held_up: object) -> dict[bytes, Stored]:
        assert ends == {0: 10}
        return self.table

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    reader = Reader()
    monkeypatch.setattr("bascule.kafka.slot.TableReader", lambda *_: reader)
    monkeypatch.setattr("bascule.kafka.guards.EXPLAIN_TIMEOUT_S", 0.01)
    return reader


@pytest.fixture
def coming(monkeypatch: pytest.MonkeyPatch) -> list[Future[Any]]:
    """Return the futures of the started incarnations, which the test completes."""
    started: list[Future[Any]] = []

    def start(_clients: object, work: Coroutine[Any, Any, Any]) -> Background[Any]:
        work.close()
        started.append(Future())
        return Background(started[-1])

    monkeypatch.setattr("bascule.kafka.incarnation.TransactionalClients.start", start)
    return started


def slot() -> Slot:
    return Slot({}, "id", "table", 0, deadline_s=0.01)


@pytest.mark.parametrize("failure", [None, fault_of(TIMED_OUT), Unavailable("no Kafka")])
def test_slot_is_closed_when_next_incarnation_is_pending_or_failed(
    reader: Reader, coming: list[Future[Any]], failure: BaseException | None
) -> None:
    closing = slot()
    closing.prepare()
    if failure is not None:
        coming[0].set_exception(failure)
    closing.close()
    assert reader.closed


def test_slot_is_closed_when_next_incarnation_failed_with_unexpected_error(reader: Reader, coming: list[Future[Any]]) -> None:
    closing = slot()
    closing.prepare()
    coming[0].set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        closing.close()
    assert reader.closed


def test_transaction_with_missing_incarnation_fails_at_timeout(reader: Reader, coming: list[Future[Any]]) -> None:
    waiting = slot()
    given_up = in_background(lambda: waiting.transact(lambda _: []), "transaction").exception(10)
    assert isinstance(given_up, Unavailable)
    assert str(given_up) == "no transaction can be started: Kafka does not answer in time"
    waiting.close()
    assert reader.closed


def test_reach_waits_for_incarnation_after_earlier_failure(reader: Reader, coming: list[Future[Any]]) -> None:
    reached = slot()
    with pytest.raises(Unavailable, match="no transaction can be started"):
        reached.reach()
    coming[0].set_result(Incarnation(None))
    reached.reach()
    reached.reach()
    assert len(coming) == 1


def test_threads_share_one_attempt_to_reach_transactions(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each thread made its own attempt, the last one of n threads would wait for n timeouts and hold locks in databases."""
    door, kafka = Door(), Service(Unavailable("no answer"))

    async def reach(_: object) -> None:
        kafka()

    monkeypatch.setattr("bascule.kafka.slot.TableTransactions.reach", reach)
    waiting = slot()
    waiting._reaching = JointTry(door)
    errors = told_together(door, kafka, waiting.reach)
    assert [str(each) for each in errors] == ["no answer"] * THREADS
    assert kafka.tries == 1


class HangingFinalizer:
    """A client whose finalizer hangs until the test releases it."""

    def __init__(self) -> None:
        self.ending, self.released = threading.Event(), threading.Event()

    def __del__(self) -> None:
        self.ending.set()
        assert self.released.wait(30)

    def purge(self) -> None: ...


def test_hanging_client_close_does_not_delay_next_incarnation(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread must close the client. Otherwise all later transactions of the id would wait for the close."""
    monkeypatch.setattr("bascule.kafka.incarnation.clients.producer", lambda *_, **__: AnsweredClient())
    effects = _SlotClients({}, "id", "table", cast("Any", reader))
    hanging = HangingFinalizer()
    ending, released = hanging.ending, hanging.released
    effects.discard(KafkaProducer(cast("Any", hanging), ProducerLog(get_log("bascule.test"))))
    del hanging
    try:
        made = in_background(lambda: run_blocking(effects.init(Attempt())), "init").result(10)
        assert isinstance(made.client, AnsweredClient)
        assert ending.wait(10)
    finally:
        released.set()


class AnsweredClient:
    """A client to which Kafka answers at once."""

    def list_topics(self, *_: object, **__: object) -> None: ...

    def init_transactions(self, _timeout_s: float) -> None: ...

    def poll(self, _timeout_s: float) -> None: ...


class Client:
    """A producer whose commit or record may fail."""

    def __init__(self, *, refuses: bool = False, fails: bool = False) -> None:
        self.written: list[bytes | None] = []
        self.committed = False
        self._refuses, self._fails = refuses, fails

    def begin_transaction(self) -> None:
        if self._fails:
            raise TIMED_OUT

    def produce(self, _topic: str, value: bytes | None, *_: object, **__: object) -> None:
        if self._refuses:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        self.written.append(value)

    def flush(self) -> int:
        return 0

    def commit_transaction(self, _timeout_s: float) -> None:
        self.committed = True

    def poll(self, _timeout_s: float) -> int:
        return 0

    def purge(self) -> None: ...


def incarnation(client: Client, log: ProducerLog | None = None) -> Incarnation[Any]:
    made: Incarnation[Any] = Incarnation(KafkaProducer(client, log or ProducerLog(get_log("test"))))  # type: ignore[arg-type]
    made.move(IncarnationEvent.INIT)
    return made


def test_transaction_writes_records_made_from_table_and_prepares_next_incarnation(reader: Reader, coming: list[Future[Any]]) -> None:
    reader.table = {b"key": Stored(b"value", 0, 3)}
    client, writing = Client(), slot()
    writing.prepare()
    coming[0].set_result(incarnation(client))
    writing.transact(lambda table: [Outgoing("topic", None, stored.value) for stored in table.values()])
    assert client.written == [b"value"]
    assert client.committed
    assert len(coming) == 2


def test_incarnation_with_each_request_answered_has_the_next_transaction(reader: Reader, coming: list[Future[Any]]) -> None:
    log = ProducerLog(get_log("test"))
    writing = slot()
    writing.prepare()
    coming[0].set_result(incarnation(Client(), log))
    for _ in range(3):
        for line in ("Sent EndTxnRequest (v3, 1 bytes @ 0, CorrId 1)", "Received EndTxnResponse (v3, 1 bytes, CorrId 1, rtt 1.00ms)"):
            log.log(10, "%s [%s] %s", "SEND" if "Sent" in line else "RECV", "name", f"[thrd:b]: b/1: {line}")
        writing.transact(lambda _: [Outgoing("topic", None, b"")])
    assert len(coming) == 1


def test_transaction_without_records_is_not_begun(reader: Reader, coming: list[Future[Any]]) -> None:
    client, writing = Client(fails=True), slot()
    writing.prepare()
    coming[0].set_result(incarnation(client))
    writing.transact(lambda _: [])
    writing.transact(lambda _: [])
    assert len(coming) == 1


def test_record_refused_by_kafka_ends_transaction_permanently(reader: Reader, coming: list[Future[Any]]) -> None:
    writing = slot()
    writing.prepare()
    coming[0].set_result(incarnation(Client(refuses=True)))
    with pytest.raises(RecordRefused, match=r"Kafka refused a record: .*; nothing was written"):
        writing.transact(lambda _: [Outgoing("topic", None, b"")])


def test_uncommitted_transaction_fails_at_timeout(reader: Reader, coming: list[Future[Any]]) -> None:
    writing = slot()
    writing.prepare()
    coming[0].set_result(incarnation(Client(fails=True)))
    with pytest.raises(Unavailable, match="Kafka did not commit") as given_up:
        writing.transact(lambda _: [Outgoing("topic", None, b"")])
    assert isinstance(given_up.value.__cause__, TransactionFault)


def test_timed_out_transaction_gets_longer_timeout_on_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise no attempt to write 256 MiB over a slow network would succeed."""
    clients = _SlotClients({}, "id", "table", Reader())  # type: ignore[arg-type]
    first, second = (clients.settings(attempt)["transaction.timeout.ms"] for attempt in (Attempt(), Attempt(long=True)))
    assert (first, second) == (TRANSACTION_TIMEOUT_MS, LONG_TRANSACTION_TIMEOUT_MS)
    attempts: list[Attempt] = []

    async def init(_clients: object, attempt: Attempt) -> object:
        attempts.append(attempt)
        return incarnation(Client(fails=len(attempts) == 1)).producer

    monkeypatch.setattr("bascule.kafka.incarnation.TransactionalClients.init", init)
    monkeypatch.setattr("bascule.kafka.slot.TableReader", lambda *_: Reader())
    writing = Slot({}, "id", "table", 0, ahead=False)
    for _ in range(2):
        writing.transact(lambda _: [Outgoing("topic", None, b"")])
    assert [attempt.long for attempt in attempts] == [False, True, False]


def test_concurrent_prepare_creates_one_incarnation(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second incarnation would fence the first."""
    first, released = threading.Event(), threading.Event()
    made: list[Future[Any]] = []

    def make(_clients: object, work: Coroutine[Any, Any, Any]) -> Background[Any]:
        work.close()
        made.append(Future())
        first.set()
        released.wait(30)
        return Background(made[-1])

    monkeypatch.setattr("bascule.kafka.incarnation.TransactionalClients.start", make)
    preparing = slot()
    threads = [threading.Thread(target=preparing.prepare) for _ in range(2)]
    threads[0].start()
    assert first.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # time in which the second thread could make an incarnation
    released.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    preparing.close()
    assert reader.closed
