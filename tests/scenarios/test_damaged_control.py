"""Damaged records of the control of pipelines: only the pipeline of the record stands still."""

from __future__ import annotations

import pytest

from bascule.writer.control import PipelineState
from tests.scenarios import test_control
from tests.scenarios.operating import RUNNING, TIMEOUT_S, Operator
from tests.scenarios.sparkless import Bridge, Running

bridge = test_control.bridge
topics = test_control.topics
operator = test_control.operator


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("key", ["wanted/", "offsets/"])
def test_damaged_record_of_control_holds_its_divert_until_a_later_record_and_the_others_continue(
    bridge: Bridge, operator: Operator, key: str
) -> None:
    bridge.journal.start_epoch()
    diverts = (bridge.divert("x"), bridge.divert("y"))

    def held(running: Running) -> None:
        operator.follow(running)
        operator.await_state(running, "divert:x", PipelineState.FAILED)
        report = operator.topics.reports(TIMEOUT_S).pipelines["divert:x"]
        assert f"key b'{key}divert:x': unreadable record b'x'" in report.error
        operator.await_state(running, "divert:y", PipelineState.RUNNING)

    with bridge.running(*diverts) as running:
        running.settle()
        bridge.send("1")
        running.batch()
        for name in (f"{key}divert:x", "wanted/nobody", "restart/divert:y", "definition/divert:y"):
            operator.topics._store(name, b"x")
        held(running)  # while it runs
        bridge.send("2")
        running.batch()
        assert (bridge.carried("x"), bridge.carried("y")) == (["1"], ["1", "2"])
    with bridge.running(*diverts) as running:  # and at a start
        held(running)
        bridge.send("3")
        running.batch()
        assert (bridge.carried("x"), bridge.carried("y")) == (["1"], ["1", "2", "3"])
        operator.want("divert:x", RUNNING)
        operator.follow(running)
        running.settle()
        running.batch()
        assert bridge.carried("x") == ["1", "2", "3"]
        operator.await_state(running, "divert:x", PipelineState.RUNNING)
        assert operator.topics.reports(TIMEOUT_S).pipelines["divert:x"].error == ""
