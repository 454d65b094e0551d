"""The status shows why a pipeline is stalled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bascule.core.errors import BadRecord
from bascule.embedded.kafka import EmbeddedKafka
from bascule.server.pipeline_holds import PipelineHolds
from bascule.writer.pipeline_holds import ALL_DISABLED, DISABLED, UNTOLD
from bascule.writer.position import COMMON, ENDED, POSITION_PARTITIONS
from tests.scenarios.sparkless import Bridge, without_spark
from tests.support.kafka_proxy import Action, Api, KafkaProxy
from tests.support.system import wait_for


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    without_spark(monkeypatch)
    monkeypatch.setattr("bascule.pipelines.driver.MIRROR_S", 0.0)
    # Drivers do not wait for the notes that they write at their end; the test does.
    monkeypatch.setattr("bascule.kafka.history.CLOSE_TIMEOUT_S", 60.0)
    monkeypatch.setattr("bascule.pipelines.driver.IDLE_TIMEOUT_S", 60.0)
    bridge = Bridge(kafka, topic_prefix)
    bridge.journal.start_epoch()
    return bridge


def reasons(bridge: Bridge, keepers: PipelineHolds | None = None) -> dict[str, str]:
    found = bridge.keepers() if keepers is None else keepers
    return {pin.name: pin.reason for pin in found.found(bridge.snapshot())}


def test_stall_reason_is_shown_only_while_the_pipeline_does_not_move(bridge: Bridge) -> None:
    keepers = bridge.keepers()
    with bridge.running(bridge.divert("x")) as running:
        bridge.send("1")
        running.settle()
        assert reasons(bridge, keepers) == {COMMON: ""}
        bridge.send("2", "3")
        running.batch(end=bridge.end() - 1)
        assert reasons(bridge, keepers) == {COMMON: ""}
        assert reasons(bridge, keepers)[COMMON].startswith("has not moved since 20")
        running.batch()
        assert reasons(bridge, keepers) == {COMMON: ""}


def test_stall_reasons_ignore_ends_reported_by_a_former_positions_leader(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
        monkeypatch.setattr(
            "bascule.kafka.compacted.TableReader.ends", lambda *_args, **_more: dict.fromkeys(range(POSITION_PARTITIONS), 0)
        )
        assert reasons(bridge) == {COMMON: ""}


def test_stall_reason_says_that_pipelines_ended_until_their_restart(bridge: Bridge) -> None:
    with bridge.running(bridge.divert("x")) as running:
        bridge.send("1")
        running.settle()
    bridge.send("2")
    assert reasons(bridge) == {COMMON: ENDED}
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
        bridge.send("3")
        assert reasons(bridge) == {COMMON: ""}


def test_stall_reason_says_that_the_divert_is_disabled(bridge: Bridge) -> None:
    plain, aside = bridge.divert("plain"), bridge.divert("x")
    with bridge.running(plain, aside) as running:
        running.settle()
    with bridge.running(plain, bridge.divert("x", enabled=False)) as running:
        bridge.send("1")
        running.settle()
        assert reasons(bridge) == {COMMON: "", "divert:x": DISABLED}


@pytest.mark.slow
def test_stall_reason_says_that_all_diverts_are_disabled(bridge: Bridge) -> None:
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
    keepers = bridge.keepers()
    with bridge.running(bridge.divert("x", enabled=False)):
        bridge.send("1")
        reasons(bridge, keepers)
        found = reasons(bridge, keepers)
    assert found == {COMMON: ALL_DISABLED, "divert:x": DISABLED}


def test_stall_reason_says_that_pipelines_do_not_know_the_exclusive_divert(bridge: Bridge) -> None:
    bridge.journal.start_epoch(["x"])
    bridge.send("1", taken_by=["x"])
    assert reasons(bridge) == {"divert:x": UNTOLD}


@pytest.mark.slow
def test_stall_reason_shows_the_error_of_a_stopped_divert(bridge: Bridge) -> None:
    plain = bridge.divert("plain")
    with bridge.running(plain, bridge.divert("x")) as running:
        running.settle()
    with bridge.running(plain, bridge.divert("x", enabled=False)) as running:
        bridge.send("lost", "2")
        running.settle()
    bridge.trim(bridge.end() - 1)
    with bridge.running(plain, bridge.divert("x")) as running:
        running.settle()
        stopped = running.driver.queries["divert:x"].stopped
        assert stopped is not None
        wait_for(lambda: running.driver.poll() or reasons(bridge)["divert:x"] == stopped, "the reason to be shown")
    assert reasons(bridge)["divert:x"] == stopped


@pytest.mark.slow
def test_stall_reason_shows_the_error_when_an_earlier_offset_commit_is_delayed(
    kafka: EmbeddedKafka, topic_prefix: str, bridge: Bridge
) -> None:
    with KafkaProxy(kafka.port) as proxy:
        bridge.pipelines = replace(bridge.pipelines, kafka={"bootstrap.servers": proxy.bootstrap})
        with bridge.running(bridge.divert("x")) as running:
            bridge.send("1")
            running.settle()
            bridge.send("2")
            late = proxy.inject(Api.OFFSET_COMMIT, Action.HOLD)
            wait_for(lambda: running.driver.poll() or late.hit, "an offset to be on its way")
            running.query(COMMON).fail(BadRecord("that cannot be carried"))
            running.driver.poll()
            stopped = running.driver.queries[COMMON].stopped
            assert stopped is not None
            late.release()
            wait_for(lambda: running.driver.poll() or reasons(bridge)[COMMON] == stopped, "the reason to be shown")
