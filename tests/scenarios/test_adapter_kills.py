"""A group of endpoints under ``kill -9`` and SIGSTOP: each record has one row and one receipt, or is a dead letter."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from bascule.adapter.inbound import InboundLog
from bascule.core.crash import ARMED_VARIABLE, POINTS
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.kafka import clients
from bascule.kafka.history import committed_offset
from tests.scenarios.adapter_topics import Watcher, create, produce
from tests.scenarios.adapter_victim import KILL_VARIABLE, Member, Where, await_file
from tests.support.system import Late, wait_for

INBOUND = [name for name in POINTS if name.startswith("inbound.")]


class Group:
    """The members, the records that were sent to them, and the results."""

    def __init__(self, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, prefix: str, directory: Path, broker: str = "") -> None:
        self.bootstrap, self._conninfo = kafka.bootstrap, postgres.conninfo
        table = "rows_" + "".join(filter(str.isalnum, prefix))[-40:]
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {table} (value text, member text)")
        receipts = f"{prefix}-receipts"
        create(self.bootstrap, prefix, receipts)
        self.where = Where(self._conninfo, self.bootstrap, prefix, prefix, receipts, table, str(directory), broker=broker)
        self.sent: list[str] = []
        self._numbers = itertools.count()
        self._members: list[Member] = []
        self._receipts: Watcher | None = None

    def send(self, *names: str, partition: int = -1) -> None:
        values = [f"{name}-{next(self._numbers)}" for name in names]
        produce(self.bootstrap, self.where.topic, values, partition=partition)
        self.sent += values

    def start(self, member: str = "m1", armed: str = "", kill: str = "") -> Member:
        """Start a member. See ``bascule.core.crash`` for ``armed``, and ``kill_another`` for ``kill``."""
        self._members.append(Member(self.where, member, {ARMED_VARIABLE: armed, KILL_VARIABLE: kill}))
        return self._members[-1]

    def rows(self) -> dict[str, list[str]]:
        """Return the members that have written each value."""
        found: dict[str, list[str]] = {}
        with psycopg.connect(self._conninfo) as connection:
            for value, member in connection.execute(f"SELECT value, member FROM {self.where.table}").fetchall():
                found.setdefault(value, []).append(member)
        return found

    def members(self) -> int:
        """Return the number of members that Kafka counts."""
        admin = clients.admin({"bootstrap.servers": self.bootstrap})
        return len(admin.describe_consumer_groups([self.where.group])[self.where.group].result(60).members)

    def handled(self) -> bool:
        return set(self.sent) <= set(self.rows())

    def await_handled(self, *also: str) -> None:
        """Wait until each record has a row or is a dead letter, and nothing is prepared or in flight."""
        try:
            wait_for(lambda: set(self.sent) - set(also) <= set(self.rows()), "a row for each record", 120)
        except Late:
            missing = sorted(set(self.sent) - set(also) - set(self.rows()))
            logs = "\n".join(f"{path.name}\n{path.read_text()[-6000:]}" for path in Path(self.where.directory).glob("*.log"))
            raise AssertionError(f"missing: {missing}\n{logs}") from None
        log = InboundLog("look", {"bootstrap.servers": self.bootstrap}, group=self.where.group)
        wait_for(lambda: log.all_flights() == {}, "nothing in flight", 60)
        log.close()

    def check(self, *dead: str) -> None:
        """Check that each record has one row and one receipt, and that dead letters have none."""
        alive = [value for value in self.sent if value not in dead]
        receipts = Watcher(self.bootstrap, self.where.receipts)
        # After a decision, the database and the log may have committed before Kafka has.
        receipts.wait(len(alive))
        ends = [f"end-{next(self._numbers)}" for _ in range(2)]
        for partition, end in enumerate(ends):
            produce(self.bootstrap, self.where.receipts, [end], partition=partition)
        wait_for(lambda: set(ends) <= set(receipts.look()), "the ends of the receipts", 90)
        receipts.close()
        assert Counter(value for value in receipts.values if not value.startswith("end-")) == Counter(alive)
        assert {value: len(members) for value, members in self.rows().items()} == dict.fromkeys(alive, 1)
        if dead:
            letters = Watcher(self.bootstrap, f"{self.where.group}.dead-letter")
            assert Counter(letters.wait(len(dead))) == Counter(dead)
            letters.close()

    def close(self) -> None:
        for member in self._members:
            member.kill()


@pytest.fixture
def group(kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path) -> Iterator[Group]:
    running = Group(kafka, postgres, topic_prefix, tmp_path)
    yield running
    running.close()


#: The points at which a fault is most likely to lose or duplicate a record.
SHORT = [
    "inbound.log.after",
    "inbound.commit.after",
    "inbound.deliver.after",
    "inbound.claim.after",
    "inbound.done.before",
    "inbound.retry.after",
]


def kill_at(group: Group, names: list[str]) -> None:
    for name in names:
        group.send("plain", "plain", "plain", "fail-1", "fail-9")
        assert group.start(armed=name).ended() == -signal.SIGKILL, name
    last = group.start()
    dead = [value for value in group.sent if value.startswith("fail-9")]
    group.await_handled(*dead)
    group.check(*dead)
    last.kill()


def test_member_kill_at_selected_delivery_points_handles_each_record_once(group: Group) -> None:
    kill_at(group, [f"{name}:1" for name in SHORT])


@pytest.mark.slow
def test_finished_record_is_not_reread_after_member_kill_before_offset_commit(group: Group) -> None:
    kill_at(group, ["inbound.log.after:1", "inbound.done.after:1", "inbound.done.after:2"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_member_kill_at_every_inbound_crash_point_handles_each_record_once(group: Group) -> None:
    kill_at(group, [f"{name}:1" for name in INBOUND])
    # Beside other running members.
    kill_at(group, [f"{name}:3" for name in INBOUND if name.startswith(("inbound.deliver", "inbound.claim", "inbound.done"))])


def test_terminated_member_finishes_its_running_record_and_leaves_the_rest_in_flight(group: Group) -> None:
    group.where = replace(group.where, workers=1)
    group.send("hold", "plain", "plain", partition=0)
    first = group.start()
    held = group.sent[0]
    await_file(Path(group.where.directory, f"{held}.at-work"))
    log = InboundLog("look", {"bootstrap.servers": group.bootstrap}, group=group.where.group)
    wait_for(lambda: sum(len(flights.keys) for flights in log.all_flights().values()) == 3, "all three to be in flight")
    first.signal(signal.SIGTERM)
    Path(group.where.directory, held).touch()
    assert first.ended() == 0, first.log.read_text()
    assert set(group.rows()) == {held}
    assert sum(len(flights.keys) for flights in log.all_flights().values()) == 2
    log.close()
    group.start()
    group.await_handled()
    group.check()


def test_paused_member_commits_no_record_that_its_successor_has_finished(group: Group) -> None:
    """One record of each partition is in its endpoint, and its offset is committed."""
    group.where = replace(group.where, workers=2)
    for partition in (0, 1):
        group.send("hold", "plain", "plain", "fail-1", partition=partition)
    first = group.start("m1")
    held = [value for value in group.sent if value.startswith("hold")]
    for value in held:
        await_file(Path(group.where.directory, f"{value}.at-work"))
    first.suspend()
    for value in held:
        Path(group.where.directory, value).touch()
    group.start("m2")
    group.await_handled()
    assert [group.rows()[value] for value in held] == [["m2"], ["m2"]]
    first.signal(signal.SIGCONT)
    # The member learns of it by its claims, drops what it has scheduled, and rejoins the group.
    wait_for(lambda: "taken over by another member" in first.log.read_text(), "the end of its illusions")
    group.send(*["plain"] * 20)
    group.await_handled()
    group.check()


@pytest.mark.slow
def test_member_paused_before_taking_its_partitions_takes_none_from_their_new_owner(group: Group) -> None:
    group.where = replace(group.where, workers=2)
    first = group.start("m1", armed="inbound.take.before:1:stop")
    wait_for(lambda: "inbound.take.before" in first.log.read_text(), "the suspension of the first member")
    second = group.start("m2")
    for partition in (0, 1):
        group.send("hold", "plain", partition=partition)
    held = [value for value in group.sent if value.startswith("hold")]
    for value in held:
        await_file(Path(group.where.directory, f"{value}.at-work"))
    first.signal(signal.SIGCONT)
    # The member rejoins when it is told; by then it has taken everything that it could have taken before.
    wait_for(lambda: group.members() == 2, "the first member to come back")
    for value in held:
        Path(group.where.directory, value).touch()
    group.await_handled()
    assert [group.rows()[value] for value in held] == [["m2"], ["m2"]]
    assert "taken over by another member" not in second.log.read_text()
    group.check()


@pytest.mark.slow
def test_failed_record_is_retried_by_next_member_of_a_group_starting_at_latest(group: Group) -> None:
    group.where = replace(group.where, start="latest")
    for partition in (0, 1):
        produce(group.bootstrap, group.where.topic, ["before the group began"], partition=partition)
    first = group.start(armed="inbound.retry.after:1")
    at = {"bootstrap.servers": group.bootstrap}, group.where.group, group.where.topic
    wait_for(lambda: all(committed_offset(*at, partition) > 0 for partition in (0, 1)), "the group to begin")
    group.send("fail-1")
    assert first.ended() == -signal.SIGKILL
    group.send("plain", partition=1)
    group.start()
    group.await_handled()
    group.check()


def test_partition_moved_under_load_handles_no_record_twice(group: Group) -> None:
    group.start("m1")
    group.send(*["plain"] * 40)
    wait_for(lambda: len(group.rows()) > 5, "the first rows")
    group.start("m2")
    group.send(*["plain"] * 40)
    wait_for(lambda: "m2" in itertools.chain(*group.rows().values()) or group.send("plain"), "rows by the second member", 120)
    group.await_handled()
    group.check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_member_kills_and_pauses_under_load_handle_each_record_once(group: Group) -> None:
    chosen = random.Random(4)
    members = {name: group.start(name) for name in ("m1", "m2", "m3")}
    for round_ in range(20):
        before = len(group.rows())
        group.send(*chosen.choices(["plain", "fail-1", "fail-9"], [8, 1, 1], k=30))
        victim = chosen.choice(list(members))
        wait_for(lambda: len(group.rows()) > before, f"progress in round {round_}", 180)  # noqa: B023 - it is over in this round
        if chosen.random() < 0.3:
            members[victim].suspend()
            time.sleep(chosen.uniform(0.1, 12))  # shorter and longer than a session
            members[victim].signal(signal.SIGCONT)
        else:
            members[victim].kill()
            members[victim] = group.start(victim)
    dead = [value for value in group.sent if value.startswith("fail-9")]
    group.await_handled(*dead)
    group.check(*dead)
