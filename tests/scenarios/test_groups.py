"""Groups of diverts: each group has its own position, and a divert that changes its group loses, doubles and reorders nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bascule.core.errors import BadRecord
from bascule.embedded.kafka import EmbeddedKafka
from bascule.pipelines.spec import EARLIEST, DivertSpec, IngressSpec, StartPosition
from bascule.writer.position import COMMON
from tests.scenarios.operating import KillAt, Killed
from tests.scenarios.sparkless import Bridge, without_spark
from tests.support.crash_points import at_crash_points

#: Where a driver is killed while diverts change their groups.
PLACES = ("driver.take.before", "driver.take.after", "join.before", "join.caught_up", "join.after")


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    without_spark(monkeypatch)
    return Bridge(kafka, topic_prefix)


@pytest.mark.on_mock_cluster
def test_diverts_of_a_group_share_a_position_and_default_group_keeps_its_own(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("a"), bridge.divert("b", group="g"), bridge.divert("c", group="g")) as running:
        assert list(running.driver.queries) == [COMMON, "group:g"]
        bridge.send("1", "2")
        running.batch("group:g")
        assert (bridge.carried("a"), bridge.carried("b"), bridge.carried("c")) == ([], ["1", "2"], ["1", "2"])
        running.batch(COMMON)
        stored = bridge.stored()
        assert stored[bridge.positions.common_key].members == ("a",)
        assert stored[bridge.positions.group_key("g")].members == ("b", "c")
        assert set(running.driver._held_keys()) == {bridge.positions.common_key, bridge.positions.group_key("g")}
    assert bridge.carried("a") == ["1", "2"]


@pytest.mark.on_mock_cluster
def test_stopped_group_delays_no_other_group_and_keeps_the_journal(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("a"), bridge.divert("b", group="g"), bridge.divert("c", group="h")) as running:
        running.batch()
        stood = bridge.end()
        running.query("group:g").fail(BadRecord("that cannot be carried"))
        running.driver.poll()
        assert running.driver.queries["group:g"].stopped
        bridge.send("1")
        running.driver.poll()
        running.batch(COMMON, "group:h")
        assert bridge.pins() == {COMMON: bridge.end(), "group:g": stood, "group:h": bridge.end()}
    assert (bridge.carried("a"), bridge.carried("b"), bridge.carried("c")) == (["1"], [], ["1"])
    with bridge.running(bridge.divert("a"), bridge.divert("b", group="g"), bridge.divert("c", group="h")) as running:
        running.settle()
    assert (bridge.carried("a"), bridge.carried("b"), bridge.carried("c")) == (["1"], ["1"], ["1"])


@pytest.mark.on_mock_cluster
def test_groups_without_a_default_divert_need_no_common_query(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    bridge.send("1")
    with bridge.running(bridge.divert("a", group="g", start=StartPosition(EARLIEST))) as running:
        running.settle()
        assert list(running.driver.queries) == ["group:g"]
    assert bridge.stored()[bridge.positions.common_key].vacant
    assert bridge.pins() == {"group:g": bridge.end()}
    with bridge.running(bridge.divert("a", group="g")) as running:
        bridge.send("2")
        running.settle()
    with bridge.running() as running:
        assert running.driver.queries == {}
    assert bridge.positions.group_key("g") not in bridge.stored()
    assert bridge.carried("a") == ["1", "2"]


@pytest.mark.on_mock_cluster
def test_divert_moves_to_other_groups_and_back_without_loss_or_repeat(bridge: Bridge) -> None:
    bridge.journal.start_epoch(["x"])
    sent = []

    def send(text: str) -> None:
        sent.append(text)
        bridge.send(text, taken_by=["x"])

    for step, (mine, other) in enumerate([("", ""), ("g", ""), ("h", "h"), ("", "h"), ("h", ""), ("h", "g"), ("", "")]):
        diverts = bridge.divert("x", exclusive=True, group=mine), bridge.divert("y", group=other)
        with bridge.running(*diverts) as running:
            running.settle()
            send(f"{step} a")
            # One group is behind the other when the driver ends.
            running.batch(list(running.driver.queries)[step % len(running.driver.queries)])
            send(f"{step} b")
    with bridge.running(bridge.divert("x", exclusive=True), bridge.divert("y")) as running:
        running.settle()
        assert list(running.driver.queries) == [COMMON]
    assert bridge.carried("x") == bridge.carried("y") == sent
    assert bridge.dead() == []
    assert set(bridge.pins()) == {COMMON}


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("place", PLACES)
def test_driver_killed_while_diverts_change_groups_loses_and_repeats_nothing(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    bridge.journal.start_epoch()

    def diverts(mine: str, other: str) -> tuple[DivertSpec, ...]:
        return bridge.divert("x", group=mine), bridge.divert("y", group=other), bridge.divert("z", group="h")

    with bridge.running(*diverts("", "")) as running:
        running.settle()
        bridge.send("1")
        running.batch(COMMON)
        bridge.send("2")
        running.batch("group:h")
    bridge.send("3")

    with monkeypatch.context() as patched:
        at_crash_points(patched, KillAt(place))
        with pytest.raises(Killed), bridge.running(*diverts("h", "g")) as running:
            running.settle()
    bridge.send("4")
    for groups in (("h", "g"), ("g", "h"), ("", "")):
        with bridge.running(*diverts(*groups)) as running:
            running.settle()
    for name in "xyz":
        assert bridge.carried(name) == ["1", "2", "3", "4"]


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("others", [(), ("plain",)])
def test_messages_of_exclusive_divert_removed_from_a_group_are_dead_lettered(bridge: Bridge, others: tuple[str, ...]) -> None:
    kept = [bridge.divert("kept", group="g"), *map(bridge.divert, others)]
    bridge.journal.start_epoch(["x"])
    with bridge.running(*kept, bridge.divert("x", exclusive=True, group="g")) as running:
        bridge.send("1", taken_by=["x"])
        running.settle()
    bridge.send("2", taken_by=["x"])
    with bridge.running(*kept) as running:
        bridge.send("3", taken_by=["x"])
        running.settle()
        assert set(running.driver.queries) == {COMMON, "group:g"}
    bridge.send("4", taken_by=["x"])
    bridge.journal.start_epoch()
    bridge.send("in the queue")
    for _ in range(2):
        with bridge.running(*kept) as running:
            running.settle()
    assert bridge.carried("x") == ["1"]
    assert bridge.dead() == ["x: 2", "x: 3", "x: 4"]
    assert bridge.carried("kept") == ["1", "2", "3", "4", "in the queue"]
    assert (COMMON in bridge.pins()) == bool(others)


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("group", ["", "g"])
def test_messages_of_removed_exclusive_divert_are_dead_lettered_once_though_another_divert_begins_earlier(
    bridge: Bridge, group: str
) -> None:
    bridge.journal.start_epoch(["x"])
    back = bridge.divert("back", start=StartPosition(EARLIEST))
    with bridge.running(bridge.divert("x", exclusive=True), replace(back, group=group, enabled=bool(group))) as running:
        running.settle()
    bridge.send("1", taken_by=["x"])
    left = [replace(back, group="g")] if group else []
    with bridge.running(*left) as running:
        running.batch(COMMON)  # the group is behind
    bridge.journal.start_epoch()
    with bridge.running(*left) as running:
        running.batch(COMMON)
    with bridge.running(*left):
        assert bridge.stored()[bridge.positions.common_key].vacant
    with bridge.running(back) as running:
        running.settle()
        bridge.send("2")
        running.settle()
    assert bridge.carried("back") == ["1", "2"]
    assert bridge.dead() == ["x: 1"]


@pytest.mark.on_mock_cluster
def test_new_exclusive_divert_of_a_group_carries_messages_taken_before_the_pipelines_knew_it(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("old", group="g")) as running:
        running.settle()
        began = bridge.journal.start_epoch(["x"])
        bridge.send("1", "2", taken_by=["x"])
        running.batch("group:g")
        assert bridge.pins()["divert:x"] == began
    with bridge.running(bridge.divert("old", group="g"), bridge.divert("x", exclusive=True, group="g")) as running:
        running.settle()
    assert bridge.carried("x") == ["1", "2"]
    assert bridge.dead() == []


@pytest.mark.on_mock_cluster
def test_disabled_diverts_of_a_group_continue_in_another_group(bridge: Bridge) -> None:
    bridge.journal.start_epoch(["x"])
    with bridge.running(bridge.divert("x", exclusive=True, group="g")) as running:
        bridge.send("1", taken_by=["x"])
        running.settle()
    with bridge.running(bridge.divert("x", exclusive=True, group="g", enabled=False)) as running:
        bridge.send("2", taken_by=["x"])
        running.settle()
        assert set(bridge.pins()) == {"divert:x"}
    with bridge.running(bridge.divert("x", exclusive=True, group="h")) as running:
        running.settle()
        assert list(running.driver.queries) == ["group:h"]
    assert bridge.carried("x") == ["1", "2"]
    assert bridge.dead() == []


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("behind", ["", "g"])
def test_group_whose_unread_records_are_deleted_stops_and_the_others_continue(bridge: Bridge, behind: str) -> None:
    bridge.journal.start_epoch()
    ahead = "g" if behind == "" else ""
    diverts = bridge.divert("slow", group=behind), bridge.divert("fast", group=ahead)
    with bridge.running(*diverts) as running:
        running.settle()
        bridge.send("1", "2")
        running.batch("group:g" if ahead else COMMON)
    bridge.trim(2)
    for text in ("3", "4"):
        bridge.send(text)
        with bridge.running(*diverts) as running:
            running.batch("group:g" if ahead else COMMON)
            stopped = {name: query.stopped for name, query in running.driver.queries.items() if query.stopped}
            assert list(stopped) == [COMMON if behind == "" else "divert:slow"]
            assert "PositionLost" in str(*stopped.values())
    assert bridge.carried("fast") == ["1", "2", "3", "4"]
    assert bridge.carried("slow") == []


@pytest.fixture
def ingress(bridge: Bridge) -> IngressSpec:
    topic = f"{bridge.pipelines.topics.prefix}-in"
    bridge.topics.create(topic, 5, {})
    return IngressSpec("in", "queue", (topic,))


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize(("tasks", "expected"), [(None, [3, 2]), (1, [5]), (3, [2, 2, 1]), (9, [1] * 5)])
def test_source_partitions_of_an_ingress_are_spread_over_its_tasks(
    bridge: Bridge, ingress: IngressSpec, tasks: int | None, expected: list[int]
) -> None:
    with bridge.running(ingresses=(replace(ingress, tasks=tasks),)) as running:
        assert [len(task.claims) for task in running.query("ingress:in").shipped.tasks] == expected


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("seed", range(3))
def test_random_changes_of_groups_lose_and_repeat_nothing(bridge: Bridge, seed: int) -> None:
    pick = random.Random(seed)
    bridge.journal.start_epoch(["x"])
    sent: list[str] = []
    for step in range(6):
        diverts = [
            bridge.divert(name, exclusive=name == "x", group=pick.choice(["", "g", "h"]), enabled=step == 0 or pick.random() < 0.7)
            for name in "xyz"
        ]
        with bridge.running(*diverts) as running:
            for _ in range(2):
                sent.append(f"{step} {len(sent)}")
                bridge.send(sent[-1], taken_by=["x"])
                for name in list(running.driver.queries):
                    if pick.random() < 0.6:
                        running.batch(name)
                running.driver.poll()
    with bridge.running(*(bridge.divert(name, exclusive=name == "x", group="g" if name == "y" else "") for name in "xyz")) as running:
        running.settle()
    for name in "xyz":
        assert bridge.carried(name) == sent
    assert bridge.dead() == []
