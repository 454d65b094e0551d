"""A message that an exclusive divert took is in no queue: it is carried or dead-lettered, whatever happens to the divert."""

from __future__ import annotations

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.pipelines.spec import EARLIEST, StartPosition
from bascule.pipelines.tasks import UnknownDivert
from bascule.writer.position import COMMON
from tests.scenarios.sparkless import Bridge, without_spark


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    without_spark(monkeypatch)
    return Bridge(kafka, topic_prefix)


def leave_the_second(bridge: Bridge) -> None:
    """The exclusive divert "x" took two messages, and has carried "1"."""
    bridge.journal.start_epoch(["x"])
    with bridge.running(bridge.divert("x", exclusive=True)) as running:
        bridge.send("1", taken_by=["x"])
        running.settle()
    bridge.send("2", taken_by=["x"])


@pytest.mark.on_mock_cluster
def test_new_exclusive_divert_carries_messages_taken_before_the_first_pipelines_start(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    bridge.send("before")
    assert bridge.pins() == {}
    began = bridge.journal.start_epoch(["x"])
    bridge.send("1", "2", taken_by=["x"])
    bridge.journal.start_epoch(["x"])
    bridge.send("3", taken_by=["x"])
    bridge.send("in the queue")
    assert bridge.pins() == {"divert:x": began}
    with bridge.running(bridge.divert("plain"), bridge.divert("x", exclusive=True)) as running:
        bridge.send("4", taken_by=["x"])
        running.settle()
        assert bridge.stored()[bridge.positions.common_key].members == ("plain", "x")
    assert bridge.carried("x") == ["1", "2", "3", "4"]
    assert bridge.carried("plain") == ["4"]
    assert bridge.dead() == []


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("vacant", [False, True])
def test_new_exclusive_divert_carries_remaining_messages_of_an_epoch_with_trimmed_start(bridge: Bridge, vacant: bool) -> None:
    if vacant:
        bridge.journal.start_epoch()
        for diverts in ([bridge.divert("last")], []):
            with bridge.running(*diverts) as running:
                running.settle()
    began = bridge.journal.start_epoch(["x"])
    bridge.send("trimmed", "1", taken_by=["x"])
    bridge.journal.start_epoch(["x"])
    bridge.send("2", taken_by=["x"])
    bridge.trim(began + 2)
    with bridge.running(bridge.divert("plain"), bridge.divert("x", exclusive=True)) as running:
        running.settle()
    assert bridge.carried("x") == ["1", "2"]
    assert bridge.carried("plain") == bridge.dead() == []


def test_new_exclusive_divert_carries_messages_taken_before_the_pipelines_knew_the_divert(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    bridge.send("0")
    with bridge.running(bridge.divert("plain")) as running:
        running.settle()
    bridge.send("in the queue")
    bridge.journal.start_epoch(["x"])
    bridge.send("1", taken_by=["x"])
    with bridge.running(bridge.divert("plain"), bridge.divert("x", exclusive=True)) as running:
        running.settle()
    assert bridge.carried("x") == ["1"]
    assert bridge.dead() == []


def test_messages_of_exclusive_divert_unknown_to_running_pipelines_wait_for_its_configuration(bridge: Bridge) -> None:
    plain = bridge.divert("plain")
    bridge.journal.start_epoch()
    with bridge.running(plain) as running:
        running.settle()
        bridge.journal.start_epoch(["x"])
        bridge.send("1", taken_by=["x"])
        with pytest.raises(UnknownDivert, match="'x' of the broker is not configured in these pipelines"):
            running.batch()
    with bridge.running(plain, bridge.divert("x", exclusive=True)) as running:
        running.settle()
    assert bridge.carried("plain") == bridge.carried("x") == ["1"]
    assert bridge.dead() == []


@pytest.mark.on_mock_cluster
def test_message_taken_after_removal_of_its_exclusive_divert_is_dead_lettered(bridge: Bridge) -> None:
    plain = bridge.divert("plain")
    bridge.journal.start_epoch(["x"])
    with bridge.running(plain, bridge.divert("x", exclusive=True)) as running:
        running.settle()
    with bridge.running(plain) as running:
        running.settle()
        bridge.journal.start_epoch(["x"])
        bridge.send("1", taken_by=["x"])
        running.settle()
    assert bridge.dead() == ["x: 1"]


@pytest.mark.on_mock_cluster
def test_exclusive_divert_first_started_as_disabled_carries_taken_messages_once_enabled(bridge: Bridge) -> None:
    bridge.journal.start_epoch(["x"])
    bridge.send("1", taken_by=["x"])
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("plain"), bridge.divert("x", exclusive=True, enabled=False)) as running:
        running.settle()
    with bridge.running(bridge.divert("plain"), bridge.divert("x", exclusive=True)) as running:
        running.settle()
    assert bridge.carried("x") == ["1"]


@pytest.mark.on_mock_cluster
def test_messages_of_exclusive_divert_removed_before_its_first_run_are_dead_lettered(bridge: Bridge) -> None:
    bridge.journal.start_epoch(["x"])
    bridge.send("1", taken_by=["x"])
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("plain")) as running:
        bridge.send("2")
        running.settle()
    assert bridge.dead() == ["x: 1"]
    assert bridge.carried("plain") == ["2"]


def test_messages_left_under_old_name_of_the_only_exclusive_divert_are_dead_lettered(bridge: Bridge) -> None:
    leave_the_second(bridge)
    bridge.journal.start_epoch(["y"])
    bridge.send("3", taken_by=["y"])
    with bridge.running(bridge.divert("y", exclusive=True)) as running:
        running.settle()
        bridge.send("4", taken_by=["y"])
        running.settle()
        assert bridge.stored()[bridge.positions.common_key].members == ("y",)
    assert bridge.carried("x") == ["1"]
    assert bridge.dead() == ["x: 2"]
    assert bridge.carried("y") == ["3", "4"]


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("away", ["parked", "apart"])
def test_messages_of_exclusive_divert_removed_while_lagging_are_dead_lettered(bridge: Bridge, away: str) -> None:
    plain = bridge.divert("plain")
    bridge.journal.start_epoch(["x"])
    with bridge.running(plain, bridge.divert("x", exclusive=True)) as running:
        bridge.send("1", taken_by=["x"])
        running.settle()
    with bridge.running(plain, bridge.divert("x", exclusive=True, enabled=False)) as running:
        bridge.send("2", taken_by=["x"])  # the broker does not know of the divert yet
        running.settle()
    if away == "apart":
        with bridge.running(plain, bridge.divert("x", exclusive=True)) as running:
            bridge.send("3", taken_by=["x"])
            running.batch(COMMON)
    with bridge.running(plain) as running:
        bridge.send("4", taken_by=["x"])
        running.settle()
        assert set(running.driver.queries) == {COMMON}
    with bridge.running(plain) as running:
        bridge.send("5", taken_by=["x"])
        running.settle()
    assert bridge.carried("x") == ["1"]
    assert sorted(bridge.dead()) == [f"x: {number}" for number in ("2", "3", "4", "5") if number != "3" or away == "apart"]


@pytest.mark.on_mock_cluster
def test_messages_of_exclusive_divert_removed_while_others_are_disabled_are_dead_lettered(bridge: Bridge) -> None:
    bridge.journal.start_epoch(["x"])
    with bridge.running(bridge.divert("plain"), bridge.divert("x", exclusive=True)) as running:
        bridge.send("1", taken_by=["x"])
        running.settle()
    bridge.send("2", taken_by=["x"])
    with bridge.running(bridge.divert("plain", enabled=False)) as running:
        running.settle()
    assert bridge.dead() == ["x: 2"]
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("plain", enabled=False)) as running:
        running.settle()
    with bridge.running(bridge.divert("plain", enabled=False)) as running:
        assert running.query(COMMON) is None
    with bridge.running(bridge.divert("plain")) as running:
        running.settle()
    assert bridge.carried("plain") == ["1", "2"]


@pytest.mark.on_mock_cluster
def test_exclusive_divert_removed_while_lagging_and_added_again_resumes_at_its_own_position(bridge: Bridge) -> None:
    plain, taking = bridge.divert("plain"), bridge.divert("x", exclusive=True)
    bridge.journal.start_epoch(["x"])
    with bridge.running(plain, taking) as running:
        running.settle()
    with bridge.running(plain, bridge.divert("x", exclusive=True, enabled=False)) as running:
        bridge.send("1", "2", taken_by=["x"])
        running.settle()
    with bridge.running(plain) as running:
        running.batch(COMMON)
        running.batch("divert:x", end=bridge.end() - 1)
    with bridge.running(plain, taking) as running:
        bridge.send("3", taken_by=["x"])
        running.settle()
    assert bridge.dead() == ["x: 1"]
    assert bridge.carried("x") == ["2", "3"]


@pytest.mark.on_mock_cluster
def test_exclusive_divert_removed_and_added_again_resumes_at_the_common_position(bridge: Bridge) -> None:
    plain, taking = bridge.divert("plain"), bridge.divert("x", exclusive=True)
    bridge.journal.start_epoch(["x"])
    with bridge.running(plain, taking) as running:
        bridge.send("1", taken_by=["x"])
        running.settle()
    with bridge.running(plain) as running:
        bridge.send("2", taken_by=["x"])
        running.settle()
    bridge.send("3", taken_by=["x"])
    with bridge.running(plain, taking) as running:
        running.settle()
    assert bridge.carried("x") == ["1", "3"]
    assert bridge.dead() == ["x: 2"]


@pytest.mark.on_mock_cluster
def test_messages_of_the_last_removed_divert_are_dead_lettered_and_reading_stops(bridge: Bridge) -> None:
    leave_the_second(bridge)
    with bridge.running() as running:
        running.settle()
    bridge.journal.start_epoch()
    bridge.send("in the queue")
    with bridge.running() as running:
        running.settle()
    with bridge.running() as running:
        assert not running.driver.queries
    assert bridge.carried("x") == ["1"]
    assert bridge.dead() == ["x: 2"]
    assert bridge.pins() == {}
    # A divert that is added later starts as the first one did.
    began = bridge.journal.start_epoch(["x"])
    bridge.send("3", taken_by=["x"])
    assert bridge.pins() == {"divert:x": began}
    with bridge.running(bridge.divert("x", exclusive=True), bridge.divert("all", start=StartPosition(EARLIEST))) as running:
        running.settle()
    assert bridge.carried("x") == ["1", "3"]
    assert bridge.carried("all") == ["1", "2", "in the queue", "3"]
    assert bridge.dead() == ["x: 2"]
