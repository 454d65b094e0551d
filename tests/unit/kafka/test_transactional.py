"""A writer whose client has a full queue, and writers of a Kafka that does not answer."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Output
from bascule.core.log import get_log
from bascule.kafka import clients, incarnation, transactional
from bascule.kafka.incarnation import ProducerLog
from bascule.kafka.transactional import TransactionalWriter, end_open_transactions
from bascule.writer.incarnation import Attempt, Identity
from bascule.writer.position import Position

BEFORE = Position("t", "id", 0, 0)
AFTER = Position("t", "id", 0, 2)


class FullClient:
    """A client whose queue has room for one record after each poll."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.committed = False
        self._room = False

    def produce(self, topic: str, *_: object, **__: object) -> None:
        if not self._room:
            raise BufferError("Local: Queue full")
        self._room = False
        self.written.append(topic)

    def poll(self, _timeout_s: float) -> int:
        self._room = True
        return 1

    def flush(self, _timeout_s: float) -> int:
        return 0

    def __len__(self) -> int:
        return 0

    def commit_transaction(self, _timeout_s: float) -> None:
        self.committed = True

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


class Positions:
    """The table of positions."""

    partitions = (0,)

    def __init__(self) -> None:
        self.table = self
        self.rested = 0

    def write_barriers(self, partitions: Any, _timeout_s: float) -> dict[int, int]:
        return dict.fromkeys(partitions, 9)

    def read_to(self, ends: Any, _timeout_s: float, _held_up: object) -> dict[int, int]:
        assert ends == {0: 10}
        return {}

    def rest(self) -> None:
        self.rested += 1

    def decoded(self, _table: object) -> dict[str, Position]:
        return {"key": BEFORE}


def test_records_and_positions_wait_for_room_in_client_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    client, positions = FullClient(), Positions()
    monkeypatch.setattr(clients, "producer", lambda *_, **__: client)
    monkeypatch.setattr(transactional, "PositionReader", lambda *_: positions)
    writer = TransactionalWriter({}, "id", "positions", "key")
    writer.write([Output("a", None, b"", []), Output("b", None, b"", [])], BEFORE, AFTER, {"other": None})
    assert client.written == ["a", "b", "positions", "positions"]
    assert client.committed
    assert positions.rested > 0, "a reader that waits for minutes does not fetch"


class UnansweredClient:
    """A client of a Kafka that does not answer."""

    def __init__(self, waits_s: list[float]) -> None:
        self._waits_s = waits_s

    def list_topics(self, _topic: str, timeout: float) -> None:
        self._waits_s.append(timeout)
        time.sleep(min(timeout, 0.1))
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def init_transactions(self, timeout_s: float) -> None:
        self._waits_s.append(timeout_s)
        time.sleep(timeout_s)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


def test_open_transactions_of_dead_writers_are_ended_within_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []
    monkeypatch.setattr(clients, "producer", lambda *_, **__: UnansweredClient(waits_s))
    monkeypatch.setattr(transactional, "END_TIMEOUT_S", 0.1)
    monkeypatch.setattr(transactional, "ENDED_WITHIN_S", 0.25)
    end_open_transactions({}, map(str, range(1000)))
    assert 0 < len(waits_s) < 100  # without the limit, each id would wait


def test_transactional_writer_fails_at_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactional, "PositionReader", lambda *_: Positions())
    monkeypatch.setattr(clients, "producer", lambda *_, **__: UnansweredClient([]))
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match="no transaction can be started"):
        TransactionalWriter({}, "id", "positions", "key", deadline_s=0.2).write([], BEFORE, AFTER)
    assert time.monotonic() - began_s < 60  # half of the time that a writer has without this limit


def test_system_error_caused_by_kafka_exception_is_raised_as_kafka_exception() -> None:
    fenced = KafkaException(KafkaError(KafkaError._FENCED))
    with pytest.raises(KafkaException) as raised, incarnation.client_errors():
        raise SystemError("returned a result with an exception set") from fenced
    assert raised.value is fenced
    second = SystemError("a second line")
    second.__cause__ = fenced
    with pytest.raises(KafkaException) as raised, incarnation.client_errors():
        raise SystemError("a third line") from second
    assert raised.value is fenced
    with pytest.raises(SystemError), incarnation.client_errors():
        raise SystemError("something else")


class FencedClient(FullClient):
    """A client that finds during a poll that it was fenced, and logs that in the same call."""

    def poll(self, _timeout_s: float) -> int:
        raise SystemError("returned a result with an exception set") from KafkaException(KafkaError(KafkaError._FENCED))


def test_writer_fenced_while_waiting_for_queue_room_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FullClient()
    made = iter([FencedClient(), client])
    monkeypatch.setattr(clients, "producer", lambda *_, **__: next(made))
    monkeypatch.setattr(transactional, "PositionReader", lambda *_: Positions())
    TransactionalWriter({}, "id", "positions", "key").write([Output("a", None, b"", [])], BEFORE, AFTER)
    assert client.committed


ACQUIRED = ("%s [%s] %s", "GETPID", "name", "Acquired PID{Id:7,Epoch:3} (InitProducerId)")


@pytest.mark.parametrize(("debugging", "written"), [(False, 0), (True, 1)])
def test_client_debug_lines_are_logged_only_when_requested(debugging: bool, written: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "bascule.test")
    log = ProducerLog(get_log("bascule.test"), debugging=debugging)
    log.log(logging.DEBUG, *ACQUIRED)
    assert log.identity == Identity(7, 3)
    assert len(caplog.records) == written


def said(log: ProducerLog, *lines: str) -> None:
    for line in lines:
        log.log(logging.DEBUG, "%s [%s] %s", "SEND" if "Sent" in line else "RECV", "name", f"[thrd:b]: b/1: {line}")


PRODUCED = ("Sent ProduceRequest (v10, 9 bytes @ 0, CorrId 6)", "Received ProduceResponse (v10, 9 bytes, CorrId 6, rtt 1.00ms)")
ENDED = ("Sent EndTxnRequest (v1, 9 bytes @ 0, CorrId 7)", "Received EndTxnResponse (v1, 9 bytes, CorrId 7, rtt 1.00ms)")
REFRESHED = "Sent MetadataRequest (v13, 9 bytes @ 0, CorrId 8)"


def test_refused_beginnings_are_counted_until_they_are_taken() -> None:
    log = ProducerLog(get_log("bascule.test"))
    line = (
        'TxnCoordinator/1: AddPartitionsToTxn response: partition "t": [0]: Broker: Producer attempted to update a transaction while'
        " another concurrent operation on the same transaction was ongoing"
    )
    for said_line in (line, "t [0] registered with transaction", line):
        log.log(7, "%s [%s] %s", "ADDPARTS", "client", said_line)
    assert (log.take_refusals(), log.take_refusals()) == (2, 0)


@pytest.mark.parametrize(
    ("lines", "settled"),
    [
        ((*PRODUCED, *ENDED, REFRESHED), True),
        ((*ENDED, *PRODUCED[:1]), False),
        (ENDED[:1], False),
        ((*ENDED, *ENDED), False),
        (PRODUCED, False),
        ((), False),
    ],
    ids=["each answered", "unanswered produce", "unanswered end", "repeated end", "no end", "no line of the client"],
)
def test_producer_is_settled_if_each_request_was_answered_and_the_end_was_sent_once(lines: tuple[str, ...], settled: bool) -> None:
    log = ProducerLog(get_log("bascule.test"))
    said(log, *lines)
    assert log.settled(1) is settled


@pytest.mark.parametrize(
    ("kafka", "debug", "debugging"), [({}, "eos,protocol", False), ({"debug": "broker,msg"}, "broker,msg,eos,protocol", True)]
)
def test_user_debug_contexts_of_client_are_kept(
    kafka: dict[str, str], debug: str, debugging: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, Any]] = []

    def producer(settings: Any, *, logger: Any) -> FullClient:
        made.append((settings, logger))
        return FullClient()

    monkeypatch.setattr(clients, "producer", producer)
    transactional_clients = incarnation.TransactionalClients(kafka, kafka, "topic", get_log("bascule.test"), "test")
    run_blocking(transactional_clients.init(Attempt()))
    ((settings, logger),) = made
    assert (settings["debug"], logger._debugging) == (debug, debugging)
