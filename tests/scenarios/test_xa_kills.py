"""Transactions over PostgreSQL and Kafka, killed at every point by ``kill -9``: none is split, stuck or orphaned.

``test_xa_jms_kills.py`` adds the broker as the third resource.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bascule.client import Message, connect
from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka, serves
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.xa.log import Outcome
from bascule.xa.recovery import Recoverer
from bascule.xa.recovery_protocol import Pass
from tests.scenarios.topics import Reader, create, produce
from tests.scenarios.xa_victim import MESSAGES, Case, Where, line, manager
from tests.support.postgres import temporary_postgres
from tests.support.system import Command, wait_for

ROOT = Path(__file__).parents[2]
KILLS_MIN = 128
#: Time within which a killed broker serves again.
BROKER_S = 120.0
#: Number of cases of the whole matrix that suffice for the default suite.
SHORT = 36
#: The calls that store the decision to commit.
DECISIONS = ("log.decide", "db.commit_deciding")
#: The points at which some recoveries must have been killed: after they had begun to act.
IN_RECOVERY = {"log.decide.before", "log.decide.after"}

ORDERS = (("db", "kafka"), ("kafka", "db"))
SHAPES = [
    *(Case("", log=log, parts=parts) for log in ("file", "kafka") for parts in ORDERS),
    *(Case("", ending="rollback", parts=parts) for parts in ORDERS),
    *(Case("", votes=votes, parts=parts) for votes in (("yes", "read-only"), ("read-only", "yes"), ("no", "yes")) for parts in ORDERS),
]


class Victims:
    """Runs cases, each in a process that does not outlive this object."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.cases: list[tuple[Case, dict[str, Any]]] = []
        self._numbers = itertools.count()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        command = [sys.executable, str(ROOT / "tests/scenarios/xa_victim.py"), json.dumps(asdict(where))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run(self, case: Case) -> dict[str, Any]:
        """How a process ended, what its application was told, and the points that it passed."""
        case = replace(case, id=f"{next(self._numbers)}")
        if "jms" in case.parts and not case.recovery:
            with connect(self.where.broker, timeout_s=BROKER_S) as context:
                context.send(self.where.orders, Message(case.id, type=case.id))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line(case))
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if not case.recovery:
            self.cases.append((case, answer))
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    @property
    def kills(self) -> int:
        return sum(answer["status"] == signal.SIGKILL for _, answer in self.cases)


@pytest.fixture
def victims(kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path) -> Iterator[Victims]:
    with made(kafka, postgres, topic_prefix, tmp_path) as victims:
        yield victims


@contextmanager
def made(
    kafka: EmbeddedKafka, postgres: EmbeddedPostgres, prefix: str, directory: Path, broker: str = "", *, decides: bool = False
) -> Iterator[Victims]:
    table = "matrix_" + "".join(filter(str.isalnum, prefix))[-40:]
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} (id text)")
    create(kafka.bootstrap, prefix)
    running = Victims(Where(postgres.conninfo, kafka.bootstrap, f"{prefix}.xa", prefix, table, str(directory), broker, decides))
    try:
        yield running
    finally:
        running.close()


def recover(victims: Victims) -> None:
    """Run recovery until nothing is left. A pass that is killed in between changes nothing."""
    resources: dict[str, Any] = victims.where.resources("recoverer")
    for kind in ("file", "kafka"):
        log = victims.where.log(kind)
        recoverer = Recoverer(manager(kind), log, list(resources.values()), by="test", patient=False)
        wait_for(lambda recoverer=recoverer: nothing_left(recoverer.run()), f"the recovery by the log in {kind}")
        state = log.read()
        assert [each for each in state.decisions.values() if each.outcome is Outcome.COMMIT] == []  # no orphan
        assert state.heuristics == {}
        log.close()
    assert [xid for each in resources.values() for xid in each.recover() if b"matrix-" in xid.gtrid] == []  # none is stuck
    for each in resources.values():
        each.close()


def nothing_left(done: Pass) -> bool:
    return done.finished and not done.steps


def decided(points: Sequence[str], moment: str) -> bool:
    """Return whether a call that commits, or stores a decision, has reached this moment: "before" or "after"."""
    decisions = [f"{decision}.{moment}" for decision in DECISIONS]
    return any(point.endswith(f".commit.{moment}") or point in decisions for point in points)


def expected(case: Case, answer: dict[str, Any]) -> Outcome | None:
    """Return the required outcome of a transaction; None if it depends on what the killed process had still completed."""
    points: Sequence[str] = answer["points"]
    if case.ending == "rollback" or "no" in case.votes or answer["told"] == "rolled back":
        return Outcome.ROLLBACK
    if answer["told"] == "committed" or decided(points, "after"):
        return Outcome.COMMIT
    if decided(points, "before"):
        return None
    return Outcome.ROLLBACK


def at_broker(where: Where) -> tuple[Counter[Any], Counter[Any]]:
    """Return the orders and bills that wait there."""
    if not where.broker:
        return Counter(), Counter()
    with connect(where.broker, timeout_s=BROKER_S) as context:
        orders, bills = (Counter(message.body for message in context.browse(queue)) for queue in (where.orders, where.bills))
    return orders, bills


def check(victims: Victims, kafka: EmbeddedKafka) -> None:
    """Check that each transaction is in all places or in none, once, and as its application was told."""
    orders, bills = at_broker(victims.where)
    with psycopg.connect(victims.where.conninfo) as connection:
        rows = Counter(row[0] for row in connection.execute(f"SELECT id FROM {victims.where.table}"))
    produce(kafka.bootstrap, victims.where.topic, ["last"])
    reader = Reader(kafka.bootstrap, victims.where.topic)
    messages = Counter(value.partition("/")[0] for value in reader.read_until("last")[:-1])
    reader.close()
    wrong = []
    for case, answer in victims.cases:
        found = {
            *([rows[case.id]] if case.votes[0] != "read-only" else []),
            *([messages[case.id] / MESSAGES] if "kafka" in case.parts and case.votes[1] != "read-only" else []),
            *([bills[case.id], 1 - orders[case.id]] if "jms" in case.parts else []),
        }
        wanted = {Outcome.COMMIT: [{1}], Outcome.ROLLBACK: [{0}], None: [{0}, {1}]}[expected(case, answer)]
        if found not in wanted:
            places = f"rows {rows[case.id]}, messages {messages[case.id]}, orders {orders[case.id]}, bills {bills[case.id]}"
            wrong.append(f"{places}: {case} {answer}")
    assert wrong == []


def whole(victims: Victims) -> list[Case]:
    """Return every point of every shape."""
    return [replace(shape, at=at) for shape in SHAPES for at in range(len(victims.run(shape)["points"]))]


def kill_each(victims: Victims, cases: Sequence[Case]) -> list[str]:
    """Run each case. After every third one, kill a recovery too, each time at another point. Return those points."""
    recoveries: list[str] = []
    for number, case in enumerate(cases):
        assert victims.run(case)["status"] == signal.SIGKILL
        if number % 3 == 2:
            answer = victims.run(Case("", recovery=True, log=case.log, at=len(recoveries) % 16))
            if answer["status"] == signal.SIGKILL:
                recoveries.append(answer["points"][-1])
    return recoveries


def test_process_kills_at_selected_points_split_no_transaction(victims: Victims, kafka: EmbeddedKafka) -> None:
    cases = whole(victims)
    recoveries = kill_each(victims, cases[:: len(cases) // SHORT])
    recover(victims)
    check(victims, kafka)
    assert victims.kills >= SHORT
    assert set(recoveries) >= IN_RECOVERY, recoveries


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_process_kills_at_every_point_split_no_transaction(victims: Victims, kafka: EmbeddedKafka) -> None:
    recoveries = kill_each(victims, whole(victims))
    points = victims.run(SHAPES[0])["points"]
    for call in ("db.prepare.before", "kafka.prepare.before", "log.decide.before", "db.commit.before", "kafka.commit.before"):
        for delay_ms in range(1, 17):  # within the call
            victims.run(Case("", at=points.index(call), delay_s=delay_ms / 1000))
    recover(victims)
    check(victims, kafka)
    assert victims.kills >= KILLS_MIN
    assert set(recoveries) >= IN_RECOVERY, recoveries


class Keeper:
    """Restarts a service as soon as it is dead. A service that this thread has started ends with it."""

    def __init__(self, service: EmbeddedKafka | EmbeddedPostgres | Command) -> None:
        self._service = service
        self.starts = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _keep(self) -> None:
        service = self._service
        while not self._stop.wait(0.02):
            if not (service.running if isinstance(service, Command) else service.pid):
                service.start()
                self.starts += 1


@pytest.fixture
def own_postgres() -> Iterator[EmbeddedPostgres]:
    with temporary_postgres() as running:
        yield running


@pytest.mark.slow
def test_database_kills_at_every_point_split_no_transaction(
    kafka: EmbeddedKafka, own_postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path
) -> None:
    with made(kafka, own_postgres, topic_prefix, tmp_path) as victims, Keeper(own_postgres):
        for at in range(len(victims.run(SHAPES[0])["points"])):
            wait_for(lambda: own_postgres.pid is not None and reachable(own_postgres), "PostgreSQL")
            victims.run(Case("", at=at, victim=own_postgres.pid or 0))
        wait_for(lambda: reachable(own_postgres), "PostgreSQL")
        recover(victims)
        check(victims, kafka)


def reachable(postgres: EmbeddedPostgres) -> bool:
    try:
        psycopg.connect(postgres.conninfo).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kafka_kills_at_selected_points_split_no_transaction(
    postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kafka = EmbeddedKafka(tmp_path_factory.mktemp("own-kafka"), jvm_options=SHORT_LIVED)
    with kafka as own, Keeper(own), made(own, postgres, topic_prefix, tmp_path) as victims:
        for log in ("file", "kafka"):
            wait_for(lambda: own.pid is not None and serves(own.port), "Kafka")
            points = victims.run(Case("", log=log))["points"]
            for call in ("kafka.prepare", "log.decide", "kafka.commit"):
                for when in ("before", "after"):
                    wait_for(lambda: own.pid is not None and serves(own.port), "Kafka")
                    victims.run(Case("", at=points.index(f"{call}.{when}"), log=log, victim=own.pid or 0))
        wait_for(lambda: serves(own.port), "Kafka")
        recover(victims)
        check(victims, own)
