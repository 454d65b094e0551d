"""A transaction over PostgreSQL and Kafka, or its recovery, is killed at every crash point: both resources commit, or none does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bascule.core.crash import ARMED_VARIABLE, POINTS
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from tests.scenarios.test_xa_kills import check, made, recover
from tests.scenarios.xa_victim import Case

NAMES = [name for name in POINTS if name.startswith(("xa.", "slot."))]
#: Points of a short run.
SHORT = ["xa.prepare.after", "xa.decide.after", "slot.commit.after"]
#: The shapes of transactions that pass special points; any commit passes the others.
CASES = {
    "xa.one_phase.before": Case("", votes=("read-only", "yes")),
    "xa.one_phase.after": Case("", votes=("read-only", "yes")),
    "xa.log.append.after": Case("", log="kafka"),
}


def end_at(name: str, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, prefix: str, directory: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv(ARMED_VARIABLE, f"{name}:1")
    with made(kafka, postgres, prefix, directory) as victims:
        if name.startswith("xa.recover"):
            undecided = victims.run(Case(""))["points"].index("log.decide.before")
            assert victims.run(Case("", at=undecided))["status"] == signal.SIGKILL
            ended = victims.run(Case("", recovery=True))
        else:
            ended = victims.run(CASES.get(name, Case("")))
        assert (ended["status"], ended["told"]) == (signal.SIGKILL, "")
        recover(victims)
        check(victims, kafka)


@pytest.mark.parametrize("name", SHORT)
def test_transaction_crash_at_a_selected_point_leaves_all_resources_committed_or_none(
    name: str, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_at(name, kafka, postgres, topic_prefix, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transaction_crash_at_every_point_leaves_all_resources_committed_or_none(
    name: str, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_at(name, kafka, postgres, topic_prefix, tmp_path, monkeypatch)
