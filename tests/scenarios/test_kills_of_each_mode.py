"""For each way to commit, 128 kills of the application, the broker, PostgreSQL and Kafka, at enumerated points: no transaction is split."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest

from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka, serves
from bascule.embedded.postgres import PREPARED_MAX, EmbeddedPostgres
from tests.scenarios.test_adapter_jms import Billing
from tests.scenarios.test_adapter_kills import Group
from tests.scenarios.test_xa_kills import Keeper, Victims, check, made, reachable, recover
from tests.scenarios.xa_victim import Case
from tests.support.postgres import temporary_postgres
from tests.support.system import PYTHON_FAILOVER, System, wait_for

T = TypeVar("T")
APPLICATION, BROKER, POSTGRES, KAFKA = "application", "broker", "postgres", "kafka"
#: Kills of each process in each mode: 128 in all. A Kafka takes the longest to start.
KILLS = {APPLICATION: 64, BROKER: 28, POSTGRES: 24, KAFKA: 12}
#: A service that was killed serves again by then, in seconds.
BACK_S = 180.0
SEVERAL = [
    Case("", parts=("jms", "db", "kafka")),
    Case("", parts=("db", "jms"), log="kafka"),
    Case("", parts=("kafka", "jms", "db"), log="kafka"),
    Case("", parts=("db", "kafka")),
    Case("", parts=("jms", "db"), ending="rollback"),
]
MODES = {
    "two phases": SEVERAL,
    "decision in the database": SEVERAL,
    "one phase": [
        Case("", parts=("db", "jms"), votes=("read-only", "yes")),
        Case("", parts=("db",)),
        Case("", parts=("db", "kafka"), votes=("read-only", "yes")),
        Case("", parts=("jms",), votes=("read-only", "yes")),
        Case("", parts=("kafka",), votes=("read-only", "yes"), log="kafka"),
    ],
}
#: Points that an endpoint passes once for each record, and once for each of the four branches of a record.
EACH_RECORD = [
    *("inbound.deliver.before", "inbound.deliver.after", "inbound.claim.after", "inbound.done.before", "inbound.done.after"),
    *("xa.decide.before", "xa.decide.after", "xa.log.write.after", "xa.log.sync.after", "xa.forget.before"),
    *("slot.commit.before", "slot.commit.after"),
]
EACH_BRANCH = ["xa.enlist.after", "xa.prepare.before", "xa.prepare.after", "xa.finish.before", "xa.finish.after"]
RECORDS = 2
_log = logging.getLogger(__name__)


class KilledServices:
    """A Kafka, a PostgreSQL and a broker, each restarted whenever it is dead."""

    def __init__(self, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, system: System) -> None:
        self.kafka, self.postgres, self.system = kafka, postgres, system
        self.keepers = {KAFKA: Keeper(kafka), POSTGRES: Keeper(postgres), BROKER: Keeper(system.broker)}

    @property
    def url(self) -> str:
        return PYTHON_FAILOVER.format(self.system.url)

    def pid(self, process: str) -> int:
        """Return the id of a process when all services serve."""
        wait_for(lambda: self.postgres.pid is not None and reachable(self.postgres), "PostgreSQL", BACK_S)
        wait_for(lambda: self.kafka.pid is not None and serves(self.kafka.port), "Kafka", BACK_S)
        wait_for(self.system.serves, "the broker to serve", BACK_S)
        return {KAFKA: self.kafka.pid, POSTGRES: self.postgres.pid, BROKER: self.system.broker.pid}[process] or 0

    @property
    def kills(self) -> dict[str, int]:
        return {process: keeper.starts for process, keeper in self.keepers.items()}


@contextmanager
def services(directory: Path, *, prepared_max: int = PREPARED_MAX) -> Iterator[KilledServices]:
    with ExitStack() as stack:
        postgres = stack.enter_context(temporary_postgres(prepared_max))
        kafka = stack.enter_context(EmbeddedKafka(directory / "kafka", jvm_options=SHORT_LIVED))
        running = KilledServices(kafka, postgres, stack.enter_context(System(kafka.bootstrap, directory / "broker", prefix="kills")))
        for keeper in running.keepers.values():
            stack.enter_context(keeper)
        yield running
        running.pid(BROKER)


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` of the items, from the first to the last."""
    return [items[number * len(items) // count] for number in range(count)]


def cycled(cases: Sequence[Case], count: int) -> list[Case]:
    """Return ``count`` cases. Later rounds through ``cases`` kill some milliseconds later, within the next call."""
    if count <= len(cases):
        return spread(cases, count)
    rounds = (replace(case, delay_s=delay_ms / 1000) for delay_ms in itertools.count() for case in cases)
    return list(itertools.islice(rounds, count))


def kill_applications(victims: Victims, cases: Sequence[Case]) -> int:
    """Run each case, and kill a recovery after every third one. Return the number of applications killed."""
    for number, case in enumerate(cases):
        victims.run(case)
        if number % 3 == 2:
            victims.run(Case("", recovery=True, log=case.log, at=number // 3 % 16))
    return victims.kills


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("mode", MODES)
def test_kills_of_each_process_at_enumerated_points_split_no_transaction(mode: str, topic_prefix: str, tmp_path: Path) -> None:
    decides = mode == "decision in the database"
    with (
        services(tmp_path, prepared_max=0 if decides else PREPARED_MAX) as running,
        made(running.kafka, running.postgres, topic_prefix, tmp_path, running.url, decides=decides) as victims,
    ):
        running.pid(BROKER)
        cases = [replace(shape, at=at) for shape in MODES[mode] for at in range(len(victims.run(shape)["points"]))]
        killed = kill_applications(victims, cycled(cases, KILLS[APPLICATION] + len(cases) // 2))
        assert killed >= KILLS[APPLICATION]
        for process in (BROKER, POSTGRES, KAFKA):
            for case in cycled(cases, KILLS[process]):
                victims.run(replace(case, delay_s=0.0, victim=running.pid(process)))
        running.pid(BROKER)
        recover(victims)
        check(victims, running.kafka)
        assert {process: count for process, count in running.kills.items() if count < KILLS[process]} == {}
        _log.info("%s: kills: %d of the application, %s", mode, killed, running.kills)


def member_points() -> list[str]:
    """Return the points of an endpoint's transaction, with the number of the pass."""
    once = [f"{name}:{number}" for number in range(1, RECORDS + 1) for name in EACH_RECORD]
    return [*once, *(f"{name}:{number}" for number in range(1, 4 * RECORDS + 1) for name in EACH_BRANCH)]


def handled(group: Group) -> bool:
    try:
        return group.handled()
    except psycopg.OperationalError:  # it is starting
        return False


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_kills_of_each_process_while_endpoints_handle_records_split_no_transaction(topic_prefix: str, tmp_path: Path) -> None:
    with services(tmp_path) as running, ExitStack() as stack:
        group = Group(running.kafka, running.postgres, topic_prefix, tmp_path, running.url)
        stack.callback(group.close)
        group.where = replace(group.where, workers=1)
        billing = Billing(group, running.url)
        points = member_points()
        assert len(points) == KILLS[APPLICATION]
        for point in points:
            billing.send(RECORDS)
            assert group.start(armed=point).ended() == -signal.SIGKILL, point
        for process in (BROKER, POSTGRES, KAFKA):
            for point in spread(points, KILLS[process]):
                victim = running.pid(process)
                billing.send(RECORDS)
                member = group.start(kill=f"{point}:{victim}")
                wait_for(lambda: handled(group), f"the records after the kill of {process} at {point}", BACK_S)
                member.signal(signal.SIGTERM)
                assert member.ended() == 0, member.log.read_text()[-4000:]
        running.pid(BROKER)
        group.start()
        billing.check()
        assert {process: count for process, count in running.kills.items() if count < KILLS[process]} == {}
        _log.info("endpoints: kills: %d of the application, %s", len(points), running.kills)
