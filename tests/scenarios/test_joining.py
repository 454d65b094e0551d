"""When diverts that stand elsewhere join the others."""

from __future__ import annotations

import pytest
from tests.scenarios.sparkless import Bridge, without_spark

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.positions import COMMON
from bascule.pipelines import driver
from bascule.pipelines.spec import EARLIEST, Start


def test_a_divert_joins_the_others_when_it_is_near_them_and_they_run(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    monkeypatch.setattr(driver, "JOIN_RECORDS", 1)
    bridge = Bridge(kafka, topic_prefix)
    bridge.journal.start_epoch()
    bridge.send("1", "2", "3", "4")
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=Start(EARLIEST))) as running:
        bridge.send("5")
        running.batch(COMMON)
        running.batch("divert:past", end=2)
        running.driver.poll()
        assert "divert:past" in running.driver.queries, "it is far behind"
        running.driver.queries[COMMON]._pause_s = 600.0
        running.query(COMMON).fail("lost a connection")
        running.driver.poll()
        assert running.query(COMMON) is None
        assert "divert:past" in running.driver.queries, "it is far behind, though the others are about to start again"
        running.driver.queries[COMMON].restart()
        running.batch("divert:past")
        running.query(COMMON).fail("BadRecord: that cannot be carried")
        running.driver.poll()
        running.driver.poll()
        assert running.driver.queries[COMMON].stopped
        assert running.query(COMMON) is None
        assert "divert:past" in running.driver.queries, "the others are stopped, and it is not"
    with bridge.running(bridge.divert("now"), bridge.divert("past", start=Start(EARLIEST))) as running:
        bridge.send("6")
        running.settle()
        assert list(running.driver.queries) == [COMMON]
    assert bridge.carried("past") == ["1", "2", "3", "4", "5", "6"]
    assert bridge.carried("now") == ["5", "6"]
