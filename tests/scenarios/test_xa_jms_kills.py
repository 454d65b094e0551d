"""Transactions over the broker, PostgreSQL and Kafka: the application, the broker and the recovery are killed at their points."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE, POINTS
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from tests.scenarios.test_xa_kills import IN_RECOVERY, Keeper, Victims, check, made, recover
from tests.scenarios.xa_victim import Case
from tests.support.system import PYTHON_FAILOVER, System, wait_for

#: The broker has the only branch with work, and commits it in one phase.
ONE_PHASE = Case("", parts=("db", "jms"), votes=("read-only", "yes"))
SHAPES = [
    Case("", parts=("jms", "db")),
    Case("", parts=("db", "jms"), log="kafka"),
    Case("", parts=("jms", "db", "kafka")),
    Case("", parts=("kafka", "jms", "db"), log="kafka"),
    Case("", parts=("jms", "db"), votes=("read-only", "yes")),
    ONE_PHASE,
    Case("", parts=("db", "jms"), votes=("no", "yes")),
    Case("", parts=("jms", "db"), ending="rollback"),
]
#: Number of points in the default suite: of the application, and of the broker.
SHORT = 6
SHORT_BROKER = 3
#: Some kills find the broker already dead because of an earlier one.
KILLS_MIN = 120
#: Points at which the broker ends itself: in transactions that are prepared and committed; in transactions that commit in one phase.
BRANCH_POINTS = [*(name for name in POINTS if name.startswith("branch.")), "transaction.commit.after"]


class Shop:
    """Victims, and the broker that they use, which is restarted whenever it is dead."""

    def __init__(self, victims: Victims, system: System, keeper: Keeper) -> None:
        self.victims = victims
        self.system = system
        self.keeper = keeper

    def points(self, shape: Case) -> list[str]:
        """Return the points of one undisturbed transaction."""
        points: list[str] = self.victims.run(shape)["points"]
        return points

    def kill_application(self, cases: Sequence[Case]) -> list[str]:
        """Run each case. After every third one, kill the recovery or the broker too. Return the points at which the recovery was killed."""
        recoveries: list[str] = []
        for number, case in enumerate(cases):
            assert self.victims.run(case)["status"] == signal.SIGKILL
            if number % 3 == 2:
                victim = self.alive() if number // 3 % 3 == 1 else 0
                answer = self.victims.run(Case("", recovery=True, log=case.log, at=number // 3 % 16, victim=victim))
                if answer["status"] == signal.SIGKILL:
                    recoveries.append(answer["points"][-1])
        return recoveries

    def kill_broker(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self.victims.run(replace(case, victim=self.alive()))

    def alive(self) -> int:
        """Return the process id of the broker, once it serves."""
        wait_for(self.system.serves, "the broker to serve")
        return self.system.broker.pid


@pytest.fixture
def shop(kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path) -> Iterator[Shop]:
    with opened(kafka, postgres, topic_prefix, tmp_path) as shop:
        yield shop


@contextmanager
def opened(kafka: EmbeddedKafka, postgres: EmbeddedPostgres, prefix: str, directory: Path, armed: str = "") -> Iterator[Shop]:
    """``armed`` are crash points of the broker: each ends it once."""
    (directory / "once").mkdir()
    environment = {ARMED_VARIABLE: armed, ONCE_VARIABLE: str(directory / "once")}
    with System(kafka.bootstrap, directory / "broker", prefix=f"{prefix}.jms", env=environment) as system:
        url = PYTHON_FAILOVER.format(system.url)
        with made(kafka, postgres, prefix, directory, url) as victims, Keeper(system.broker) as keeper:
            yield Shop(victims, system, keeper)
            wait_for(system.serves, "the broker to serve")


def each_point(shop: Shop) -> list[Case]:
    """Return every point of every shape."""
    return [replace(shape, at=at) for shape in SHAPES for at in range(len(shop.points(shape)))]


def test_application_and_broker_kills_at_selected_points_split_no_transaction(shop: Shop, kafka: EmbeddedKafka) -> None:
    cases = each_point(shop)
    assert shop.kill_application(cases[:: len(cases) // SHORT])
    shop.kill_broker(cases[5 :: len(cases) // SHORT_BROKER])
    recover(shop.victims)
    check(shop.victims, kafka)
    assert shop.victims.kills >= SHORT
    wait_for(lambda: shop.keeper.starts >= SHORT_BROKER, "the last start to be counted")


def test_broker_crashes_at_branch_points_split_no_transaction_and_leave_none_in_doubt(
    kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path
) -> None:
    with opened(kafka, postgres, topic_prefix, tmp_path, ",".join(f"{name}:1" for name in BRANCH_POINTS)) as shop:
        for _ in range(3 * len(BRANCH_POINTS)):
            shop.points(SHAPES[0])
            shop.points(ONE_PHASE)
            if len(list((tmp_path / "once").iterdir())) == len(BRANCH_POINTS):
                break
        assert {each.name for each in (tmp_path / "once").iterdir()} == set(BRANCH_POINTS)
        shop.alive()
        recover(shop.victims)
        check(shop.victims, kafka)
        assert {answer["told"] for _, answer in shop.victims.cases} == {"committed", "rolled back"}  # none in doubt


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_application_kills_at_every_point_with_the_broker_split_no_transaction(shop: Shop, kafka: EmbeddedKafka) -> None:
    recoveries = set(shop.kill_application(each_point(shop)))
    assert recoveries & IN_RECOVERY, recoveries
    recover(shop.victims)
    check(shop.victims, kafka)
    assert shop.victims.kills >= KILLS_MIN


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_broker_kills_at_every_point_split_no_transaction(shop: Shop, kafka: EmbeddedKafka) -> None:
    cases = [case for case in each_point(shop) if case.votes == ("yes", "yes")]
    shop.kill_broker(cases)
    points = shop.points(SHAPES[0])
    for call in ("jms.prepare.before", "jms.commit.before"):
        shop.kill_broker([replace(SHAPES[0], at=points.index(call), delay_s=delay_ms / 1000) for delay_ms in range(1, 17)])
    recover(shop.victims)
    check(shop.victims, kafka)
    assert shop.keeper.starts >= KILLS_MIN
