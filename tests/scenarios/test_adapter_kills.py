"""A group of endpoints under ``kill -9`` and SIGSTOP: each record has its row and its receipt, once, or is in the dead letters."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.scenarios.adapter_topics import Watcher, create, produce
from tests.scenarios.adapter_victim import Member, Where

from bascule.adapter.inbound import InboundLog
from bascule.core.crash import ARMED_VARIABLE, POINTS
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.testing.system import Late, wait_for

INBOUND = [name for name in POINTS if name.startswith("inbound.")]


class Group:
    """Members, what was sent to them, and what became of it."""

    def __init__(self, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, prefix: str, directory: Path) -> None:
        self._bootstrap, self._conninfo = kafka.bootstrap, postgres.conninfo
        table = "rows_" + "".join(filter(str.isalnum, prefix))[-40:]
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {table} (value text, member text)")
        receipts = f"{prefix}-receipts"
        create(self._bootstrap, prefix, receipts)
        self.where = Where(self._conninfo, self._bootstrap, prefix, prefix, receipts, table, str(directory))
        self.sent: list[str] = []
        self._numbers = itertools.count()
        self._members: list[Member] = []
        self._receipts: Watcher | None = None

    def send(self, *names: str, partition: int = -1) -> None:
        values = [f"{name}-{next(self._numbers)}" for name in names]
        produce(self._bootstrap, self.where.topic, values, partition=partition)
        self.sent += values

    def start(self, member: str = "m1", armed: str = "") -> Member:
        self._members.append(Member(self.where, member, {ARMED_VARIABLE: armed}))
        return self._members[-1]

    def rows(self) -> dict[str, list[str]]:
        """By value, the members that have written it."""
        found: dict[str, list[str]] = {}
        with psycopg.connect(self._conninfo) as connection:
            for value, member in connection.execute(f"SELECT value, member FROM {self.where.table}").fetchall():
                found.setdefault(value, []).append(member)
        return found

    def handled(self) -> bool:
        return set(self.sent) <= set(self.rows())

    def await_handled(self, *also: str) -> None:
        """Until each has a row, or is dead; and nothing is prepared or in flight any more."""
        try:
            wait_for(lambda: set(self.sent) - set(also) <= set(self.rows()), "a row for each record", 120)
        except Late:
            missing = sorted(set(self.sent) - set(also) - set(self.rows()))
            logs = "\n".join(f"{path.name}\n{path.read_text()[-6000:]}" for path in Path(self.where.directory).glob("*.log"))
            raise AssertionError(f"missing: {missing}\n{logs}") from None
        log = InboundLog("look", {"bootstrap.servers": self._bootstrap}, group=self.where.group)
        wait_for(lambda: log.all_flights() == {}, "nothing in flight", 60)
        log.close()

    def check(self, *dead: str) -> None:
        """Each in both places once, and those that are dead in none."""
        alive = [value for value in self.sent if value not in dead]
        produce(self._bootstrap, self.where.receipts, ["last0"], partition=0)
        produce(self._bootstrap, self.where.receipts, ["last1"], partition=1)
        receipts = Watcher(self._bootstrap, self.where.receipts)
        wait_for(lambda: {"last0", "last1"} <= set(receipts.look()), "the ends of the receipts", 90)
        receipts.close()
        assert Counter(receipts.values) - Counter(["last0", "last1"]) == Counter(alive)
        assert {value: len(members) for value, members in self.rows().items()} == dict.fromkeys(alive, 1)
        if dead:
            letters = Watcher(self._bootstrap, f"{self.where.group}.dead-letter")
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


@pytest.mark.timeout(600)
def test_a_member_is_killed_at_each_of_its_points(group: Group) -> None:
    for name in INBOUND:
        group.send("plain", "plain", "plain", "fail-1", "fail-9")
        assert group.start(armed=f"{name}:1").ended() == -signal.SIGKILL, name
    group.start()
    dead = [value for value in group.sent if value.startswith("fail-9")]
    group.await_handled(*dead)
    group.check(*dead)
