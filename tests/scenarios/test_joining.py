"""Diverts at another offset than the others join them."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.core.errors import BadRecord, Unavailable
from bascule.embedded.kafka import EmbeddedKafka
from bascule.pipelines import driver
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import EARLIEST, StartPosition
from bascule.writer.position import COMMON, Position
from tests.scenarios.sparkless import Bridge, without_spark


@pytest.mark.on_mock_cluster
def test_divert_joins_the_common_position_only_when_close_and_while_the_others_run(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    monkeypatch.setattr(driver, "JOIN_RECORDS", 1)
    bridge = Bridge(kafka, topic_prefix)
    bridge.journal.start_epoch()
    bridge.send("1", "2", "3", "4")
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))) as running:
        bridge.send("5")
        running.batch(COMMON)
        running.batch("divert:past", end=2)
        running.driver.poll()
        assert "divert:past" in running.driver.queries, "it is far behind"
        running.driver.queries[COMMON]._pause_s = 600.0
        running.query(COMMON).fail(Unavailable("lost a connection"))
        running.driver.poll()
        assert running.query(COMMON) is None
        assert "divert:past" in running.driver.queries, "it is far behind, though the others are about to start again"
        running.driver.queries[COMMON].restart()
        running.batch("divert:past")
        running.query(COMMON).fail(BadRecord("that cannot be carried"))
        running.driver.poll()
        running.driver.poll()
        assert running.driver.queries[COMMON].stopped
        assert running.query(COMMON) is None
        assert "divert:past" in running.driver.queries, "the others are stopped, and it is not"
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))) as running:
        bridge.send("6")
        running.settle()
        assert list(running.driver.queries) == [COMMON]
    assert bridge.carried("past") == ["1", "2", "3", "4", "5", "6"]
    assert bridge.carried("now") == ["5", "6"]


def leave_in_doubt(patch: pytest.MonkeyPatch, *, away: bool) -> None:
    """The next join is committed, and the driver gets no answer. With ``away``, Kafka does not answer the next question either."""
    move, read = Positions.move, Positions.read

    def moved(self: Positions, *moving: Any) -> Position:
        move(self, *moving)
        patch.setattr(Positions, "move", move)
        if away:
            patch.setattr(Positions, "read", unanswered)
        raise Unavailable("Kafka did not commit for 120 s")

    def unanswered(_: Positions, key: str) -> Position:
        patch.setattr(Positions, "read", read)
        raise Unavailable(f"Kafka does not answer about {key}")

    patch.setattr(Positions, "move", moved)


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("away", [False, True])
def test_divert_whose_join_commit_was_in_doubt_has_joined(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    without_spark(monkeypatch)
    bridge = Bridge(kafka, topic_prefix)
    bridge.journal.start_epoch()
    bridge.send("1", "2")
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST))) as running:
        bridge.send("3")
        running.batch()
        leave_in_doubt(monkeypatch, away=away)
        running.driver.poll()
        assert (running.query(COMMON) is None) == away, "it waits for Kafka"
        running.driver.poll()
        assert list(running.driver.queries) == [COMMON]
        running.driver.queries[COMMON].restart()
        bridge.send("4")
        running.settle()
    assert bridge.carried("past") == ["1", "2", "3", "4"]
    assert bridge.carried("now") == ["3", "4"]


@pytest.mark.on_mock_cluster
def test_messages_of_removed_divert_are_dead_lettered_though_its_join_commit_was_in_doubt(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    bridge = Bridge(kafka, topic_prefix)
    bridge.journal.start_epoch(exclusive=("past",))
    bridge.send("1", taken_by=("past",))
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=StartPosition(EARLIEST), exclusive=True)):
        pass
    with bridge.running(bridge.divert("now")) as running:
        bridge.send("2")
        running.batch()
        leave_in_doubt(monkeypatch, away=False)
        running.driver.poll()
        running.driver.poll()
        assert list(running.driver.queries) == [COMMON]
        bridge.send("3", taken_by=("past",))
        running.settle()
    assert bridge.dead() == ["past: 1", "past: 3"]
