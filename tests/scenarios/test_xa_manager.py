"""Transactions over PostgreSQL and Kafka with a decision log on Kafka: the contract of the log, and the manager in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from bascule.core.errors import TransactionRolledBack
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.xa import FileLog, TransactionManager
from bascule.xa.errors import Code
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_log import KafkaLog
from bascule.xa.log import Decision, DecisionLog, Heuristic, Outcome
from bascule.xa.postgres import PostgresResource
from bascule.xa.xid import branch
from tests.scenarios.topics import Reader, create, produce
from tests.support.system import paused, wait_for

#: Attempts to make a payment that is rolled back because Kafka is busy.
ATTEMPTS = 5
#: Time of an attempt: all attempts together end before the test is stopped.
PAYMENT_S = 40.0
Make = Callable[[], KafkaLog]


@pytest.fixture
def make(kafka: EmbeddedKafka, topic_prefix: str) -> Iterator[Make]:
    made: list[KafkaLog] = []

    def make() -> KafkaLog:
        made.append(KafkaLog({"bootstrap.servers": kafka.bootstrap}, topic=f"{topic_prefix}.decisions"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def decision(number: int, outcome: Outcome = Outcome.COMMIT, by: str = "host/1") -> Decision:
    return Decision(f"shop/{number}".encode(), outcome, ("db", "kafka"), 1_790_000_000_000 + number, by)


def test_first_decision_in_the_kafka_log_stands_and_is_visible_to_every_process(make: Make) -> None:
    first, second = make(), make()
    rolled_back = decision(1, Outcome.ROLLBACK, "recoverer")
    assert first.decide(rolled_back) == rolled_back
    assert second.decide(decision(1)) == rolled_back
    assert second.decide(decision(12)) == decision(12)  # whose name begins like the other name
    assert first.decide(decision(1)) == rolled_back
    assert make().read().decisions == {b"shop/1": rolled_back, b"shop/12": decision(12)}


def test_processes_that_decide_at_once_agree(make: Make) -> None:
    logs = [make() for _ in range(3)]

    def decide(place: int) -> list[str]:
        return [logs[place].decide(decision(number, by=str(place))).by for number in range(30)]

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(decide, range(3)))
    assert answers[0] == answers[1] == answers[2]


def test_forgotten_entries_leave_the_kafka_decision_log_and_other_entries_stay(make: Make) -> None:
    log = make()
    heuristic = Heuristic(branch(b"shop/1", "db"), Code.XA_HEURRB, Outcome.COMMIT, "by hand", 1)
    log.record(heuristic)
    for number in (1, 12, 2):
        log.decide(decision(number))
    log.forget([b"shop/1", b"shop/2"])
    wait_for(lambda: set(make().read().decisions) == {b"shop/12"}, "what was forgotten")
    assert make().read().heuristics == {heuristic.xid: heuristic}
    log.forget_heuristic(heuristic.xid)
    wait_for(lambda: make().read().heuristics == {}, "what was forgotten")


class Shop:
    """An application: each payment is a row and two messages."""

    def __init__(self, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, prefix: str, log: DecisionLog) -> None:
        self.topic, self.table = prefix, "shop_" + "".join(filter(str.isalnum, prefix))[-40:]
        self._postgres, self._kafka = postgres, kafka
        create(kafka.bootstrap, prefix)
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {self.table} (id text PRIMARY KEY)")
        self.database = PostgresResource("db", postgres.conninfo)
        self.kafka = KafkaResource("kafka", {"bootstrap.servers": kafka.bootstrap}, prefix=f"{prefix}.xa")
        self.manager = TransactionManager("shop", log, [self.database, self.kafka])

    def pay(self, payment: str) -> None:
        with self.manager.begin(PAYMENT_S) as transaction:
            transaction.enlist(self.database).execute(f"INSERT INTO {self.table} VALUES (%s)", (payment,))
            handle = transaction.enlist(self.kafka)
            for part in "ab":
                handle.send(self.topic, f"{payment}/{part}".encode())

    def rows(self) -> list[str]:
        with psycopg.connect(self._postgres.conninfo) as connection:
            return [row[0] for row in connection.execute(f"SELECT id FROM {self.table} ORDER BY id")]

    def messages(self) -> list[str]:
        produce(self._kafka.bootstrap, self.topic, ["last"])
        reader = Reader(self._kafka.bootstrap, self.topic)
        try:
            return reader.read_until("last")[:-1]
        finally:
            reader.close()

    def close(self) -> None:
        self.database.close()
        self.kafka.close()


@pytest.fixture(params=["file", "kafka"])
def shop(
    request: pytest.FixtureRequest, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path, make: Make
) -> Iterator[Shop]:
    shop = Shop(kafka, postgres, topic_prefix, FileLog(tmp_path / "shop.xalog") if request.param == "file" else make())
    yield shop
    shop.close()


def test_concurrent_payments_are_in_database_and_kafka_or_in_neither(shop: Shop) -> None:
    refused: list[str] = []

    def pay(number: int) -> None:
        payment = f"{number // 2:02}"  # each twice, and only one can win
        for _ in range(ATTEMPTS):
            try:
                shop.pay(payment)
            except psycopg.errors.UniqueViolation as error:
                refused.append(type(error).__name__)
            except TransactionRolledBack:  # a busy Kafka may not start eight transactions at once in time
                continue
            return
        raise AssertionError(f"payment {payment} was rolled back {ATTEMPTS} times")

    with shop.manager, ThreadPoolExecutor(8) as pool:
        list(pool.map(pay, range(48)))
    assert len(refused) == 24
    assert shop.rows() == [f"{number:02}" for number in range(24)]
    assert sorted(shop.messages()) == sorted(f"{number:02}/{part}" for number in range(24) for part in "ab")
    assert shop.database.recover() == []
    assert shop.kafka.recover() == []
    assert shop.manager.log.read().decisions == {}


def test_payment_waits_for_paused_kafka_and_completes_after_resume(shop: Shop, kafka: EmbeddedKafka) -> None:
    with shop.manager:
        shop.pay("before")
        assert kafka.pid is not None
        with paused(kafka.pid):
            waiting = threading.Thread(target=shop.pay, args=("meanwhile",), daemon=True)
            waiting.start()
            wait_for(lambda: shop.manager._live, "the payment to begin")
            assert shop.rows() == ["before"]
            assert waiting.is_alive()
        waiting.join(60)
        assert not waiting.is_alive()
        assert shop.rows() == ["before", "meanwhile"]
        wait_for(lambda: not shop.kafka.recover(), "Kafka to be told")
    assert shop.messages() == ["before/a", "before/b", "meanwhile/a", "meanwhile/b"]
