"""Groups of diverts that cannot continue from their position: an administrator moves the diverts, or starts once without them."""

from __future__ import annotations

import pytest

from bascule.pipelines.spec import DivertSpec
from bascule.writer.control import PipelineState
from bascule.writer.position import COMMON
from tests.scenarios import test_control
from tests.scenarios.operating import RUNNING, STOPPED, TIMEOUT_S, Operator
from tests.scenarios.sparkless import Bridge, Running
from tests.scenarios.test_offsets import handled, move, stopped

bridge = test_control.bridge
topics = test_control.topics
operator = test_control.operator


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("group", ["", "g"])
@pytest.mark.parametrize("restarts", [False, True], ids=["while the driver runs", "before the driver starts"])
def test_diverts_of_a_group_whose_records_were_deleted_are_stopped_moved_and_resumed_one_by_one(
    bridge: Bridge, operator: Operator, group: str, restarts: bool
) -> None:
    bridge.journal.start_epoch()
    query = f"group:{group}" if group else COMMON

    def diverts() -> tuple[DivertSpec, ...]:
        return bridge.divert("x", group=group), bridge.divert("y", group=group)

    def moved(running: Running, name: str) -> None:
        stopped(operator, running, name)
        operator.await_state(running, f"divert:{name}", PipelineState.STOPPED)
        move(operator, bridge.end() - 1, name=name)
        assert handled(operator, running, "r1", f"divert:{name}") == ""
        operator.want(f"divert:{name}", RUNNING)
        operator.follow(running)
        running.batch()

    with bridge.running(*diverts()) as running:
        running.settle()
        bridge.send("1", "2")
        bridge.trim(bridge.end() - 1)
        if not restarts:
            running.driver.queries[query].restart()
            assert "were deleted before the pipeline read them" in (running.driver.queries[query].stopped or "")
            moved(running, "x")
            assert running.driver.queries[query].stopped is not None
        else:
            operator.want("divert:x", STOPPED)
    with bridge.running(*diverts()) as running:
        if restarts:
            moved(running, "x")
        bridge.send("3")
        running.batch()
        assert (bridge.carried("x"), bridge.carried("y")) == (["2", "3"], [])
    with bridge.running(*diverts()) as running:
        moved(running, "y")
        assert bridge.carried("y") == ["3"]
    with bridge.running(*diverts()) as running:
        running.settle()
        bridge.send("4")
        running.batch()
        assert (bridge.carried("x"), bridge.carried("y")) == (["2", "3", "4"], ["3", "4"])
        assert running.driver.queries[query].stopped is None
        assert not bridge.stored()[bridge.positions.key_of(query)].vacant
        assert min(bridge.pins().values()) >= bridge.end() - 1


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("others", [(), ("y",)], ids=["no other divert", "a divert of another group"])
def test_divert_whose_records_were_deleted_starts_like_a_new_one_after_a_start_without_it(bridge: Bridge, others: tuple[str, ...]) -> None:
    bridge.journal.start_epoch()
    rest = [bridge.divert(name, group="g") for name in others]
    with bridge.running(bridge.divert("x"), *rest) as running:
        running.settle()
        bridge.send("1", "2")
        bridge.trim(bridge.end() - 1)
    with bridge.running(bridge.divert("x"), *rest) as running:
        assert "were deleted before the pipeline read them" in (running.driver.queries[COMMON].stopped or "")
    with bridge.running(*rest):
        pass
    with bridge.running(bridge.divert("x"), *rest) as running:
        bridge.send("3")
        running.settle()
    assert bridge.carried("x") == ["3"]


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("others", [(), ("y",)], ids=["no other divert", "a divert of another group"])
def test_messages_of_an_exclusive_divert_removed_after_its_records_were_deleted_are_dead_lettered(
    bridge: Bridge, others: tuple[str, ...]
) -> None:
    bridge.journal.start_epoch(["x"])
    rest = [bridge.divert(name, group="g") for name in others]
    with bridge.running(bridge.divert("x", exclusive=True), *rest) as running:
        running.settle()
        bridge.send("1", "2", "3", taken_by=["x"])
        if rest:
            running.batch("group:g")
        bridge.trim(bridge.end() - 2)
    for _ in range(2):
        with bridge.running(*rest) as running:
            running.settle()
    assert bridge.dead() == ["x: 2", "x: 3"]


@pytest.mark.on_mock_cluster
def test_divert_that_is_new_while_its_group_cannot_continue_can_be_stopped_and_has_no_position(bridge: Bridge, operator: Operator) -> None:
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
        bridge.send("1", "2")
        bridge.trim(bridge.end() - 1)
    with bridge.running(bridge.divert("x"), bridge.divert("new")) as running:
        stopped(operator, running, "new")
        operator.await_state(running, "divert:new", PipelineState.STOPPED)
        assert list(running.driver.queries) == [COMMON]
        operator.want("divert:new", RUNNING)
        operator.await_state(running, "divert:new", PipelineState.FAILED)
        assert "were deleted before the pipeline read them" in operator.topics.reports(TIMEOUT_S).pipelines["divert:new"].error
