"""JTA transactions over the broker and PostgreSQL, with Narayana and Atomikos: application, broker, database and recovery are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from tests.scenarios.jta_shop import (
    COMMITTED,
    LONG_TIMEOUT_S,
    MANAGER_PARAMS,
    MANAGERS,
    OUTCOMES,
    ROLLED_BACK,
    Outcome,
    Shop,
)
from tests.support.postgres import temporary_postgres
from tests.support.system import System

RESOURCES = ("database", "jms")
POINTS = [
    f"{resource}.{call}"
    for resource in RESOURCES
    for call in ("end.after", "prepare.before", "prepare.after", "commit.before", "commit.after")
]
ROLLBACK_POINTS = [f"{resource}.rollback.{when}" for resource in RESOURCES for when in ("before", "after")]
ALL_POINTS = (*POINTS, *ROLLBACK_POINTS)
#: Both prepared and undecided; decided; half committed.
SHORT = ("jms.prepare.after", "database.commit.before", "jms.commit.before")
#: Points at which a service is killed.
SHORT_SERVICE = ("jms.commit.before",)
#: Where the application is killed, and where in the recovery that follows.
RECOVERIES = [
    *(("database.commit.before", f"{resource}.commit.{when}") for resource in RESOURCES for when in ("before", "after")),
    *(("jms.prepare.after", point) for point in ROLLBACK_POINTS),
]


def action_to(point: str) -> str:
    return "fail" if ".rollback." in point else "pay"


def expected(point: str) -> str:
    """Return the outcome of a transaction whose application is killed at a point."""
    return COMMITTED if ".commit." in point else ROLLED_BACK


@pytest.fixture(scope="module")
def system(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("java"), prefix="java-xa", config="[broker]\nallow_anonymous = true\n") as running:
        yield running


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[EmbeddedPostgres]:
    with temporary_postgres() as running:
        yield running


@pytest.fixture(params=MANAGERS)
def shop(request: pytest.FixtureRequest, system: System, own_postgres: EmbeddedPostgres, tmp_path: Path, name: str) -> Shop:
    return Shop(request.param, system, own_postgres, tmp_path, name)


def some_and_all(some: tuple[str, ...]) -> pytest.MarkDecorator:
    everything = pytest.param(ALL_POINTS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="all")
    return pytest.mark.parametrize("points", [pytest.param(some, id="some"), everything])


@pytest.mark.parametrize(("action", "told"), [("pay", COMMITTED), ("fail", ROLLED_BACK)])
def test_manager_commits_or_rolls_back_messages_and_rows_together(shop: Shop, action: str, told: str) -> None:
    name = shop.order()
    assert shop.run(action, name) == told
    assert shop.outcome(name) == OUTCOMES[told]
    assert shop.in_doubt() == []


@some_and_all(SHORT)
@pytest.mark.parametrize("shop", MANAGER_PARAMS, indirect=True)
def test_manager_recovers_after_the_application_is_killed(shop: Shop, points: tuple[str, ...]) -> None:
    names = {point: shop.order() for point in points}
    for point, name in names.items():
        shop.kill(action_to(point), name, point)
    shop.recover()
    assert {point: shop.outcome(name) for point, name in names.items()} == {point: OUTCOMES[expected(point)] for point in points}


@some_and_all(SHORT_SERVICE)
@pytest.mark.parametrize("service", ["broker", "database"])
def test_manager_finishes_transactions_interrupted_by_restart_of_broker_or_database(
    shop: Shop, points: tuple[str, ...], service: str
) -> None:
    shop.timeout_s = LONG_TIMEOUT_S
    names = {point: shop.order() for point in points}
    told = {}
    for point, name in names.items():
        with shop.stopped(action_to(point), name, point) as go_on:
            restart(shop, service)
            told[point] = go_on()
    shop.recover()
    ends = {point: (told[point], shop.outcome(name)) for point, name in names.items()}
    assert {point: end for point, end in ends.items() if end[1] not in possible(end[0])} == {}


def possible(told: str) -> list[Outcome]:
    """Return the possible outcomes of a transaction, given what its application was told. No outcome is partial."""
    return [OUTCOMES[told]] if told in OUTCOMES else list(OUTCOMES.values())


def restart(shop: Shop, service: str) -> None:
    if service == "broker":
        shop.system.broker.restart()
    else:
        shop.database.kill()
        shop.database.start()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_recovery_is_finished_by_the_next_recovery(shop: Shop) -> None:
    names = {points: shop.order() for points in RECOVERIES}
    for (point, recovery_point), name in names.items():
        shop.kill("pay", name, point)
        shop.kill("recover", "", recovery_point)
    shop.recover()
    assert {points: shop.outcome(name) for points, name in names.items()} == {points: OUTCOMES[expected(points[0])] for points in names}
