"""Which transformations waiting tasks can run, by Spark's plans of them. Spark does not run: the plans are models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from bascule.core.errors import InvalidInput
from bascule.pipelines import waiting_plans
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.waiting import Truncated, WaitingSource
from bascule.pipelines.waiting_plans import MESSAGE_RANGE, uncarried, why_not
from tests.unit.pipelines.test_transformation import Plan

DIVERT = DivertSpec("upper", "orders", select=("upper(text) AS value",))


class LoopJoin(Plan):
    """A join by nested loops."""

    def __init__(self, kind: str, side: str, *below: Plan) -> None:
        super().__init__("BroadcastNestedLoopJoin", *below)
        self._kind, self._side = kind, side

    def joinType(self) -> Any:
        return SimpleNamespace(toString=lambda: self._kind)

    def buildSide(self) -> Any:
        return SimpleNamespace(toString=lambda: self._side)


def messages() -> Plan:
    """Return the plan of the message rows."""
    return Plan("MapInArrow", Plan("Range", made_of=f"Range {MESSAGE_RANGE}"))


def table(leaf: str = "LocalTableScan", made_of: str = "") -> Plan:
    """Return the static side of a join."""
    return Plan("BroadcastExchange", Plan("Project", Plan(leaf, made_of=made_of), made_of=made_of), made_of=made_of)


@pytest.mark.parametrize(
    "plan",
    [
        messages(),
        Plan("WholeStageCodegen (1)", Plan("Project", Plan("Filter", Plan("Generate", Plan("InputAdapter", messages()))))),
        Plan("BatchEvalPython", Plan("ArrowEvalPython", Plan("MapInPandas", messages()))),
        Plan("BroadcastHashJoin", messages(), Plan("InputAdapter", table())),
        Plan("BroadcastHashJoin", table("Scan ExistingRDD"), messages()),
        LoopJoin("Inner", "BuildRight", messages(), table()),
        LoopJoin("LeftOuter", "BuildRight", messages(), table()),
    ],
)
def test_transformation_of_single_messages_can_wait(plan: Plan) -> None:
    assert uncarried(plan) is None


@pytest.mark.parametrize(
    "operator",
    ["HashAggregate", "Sort", "Window", "GlobalLimit", "LocalLimit", "CollectLimit", "TakeOrderedAndProject", "Exchange", "Coalesce",
     "Union", "Sample", "SortMergeJoin", "CartesianProduct", "InMemoryTableScan", "AdaptiveSparkPlan", "Expand", "FlatMapGroupsInPandas"],
)  # fmt: skip
def test_operator_that_is_not_known_to_treat_each_message_by_itself_is_refused(operator: str) -> None:
    assert uncarried(Plan("Project", Plan(operator, messages()))) == f"the plan has the operator {operator}"


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan("BroadcastHashJoin", messages(), table("Scan json")), "the plan reads a file or table (Scan json)"),
        (Plan("BroadcastHashJoin", messages(), table("InMemoryTableScan")), "the plan reads a file or table (InMemoryTableScan)"),
        (Plan("BroadcastHashJoin", messages(), table("Range", MESSAGE_RANGE)), "the plan joins the messages with themselves"),
        (Plan("BroadcastHashJoin", table(), table()), "the plan has the operator BroadcastHashJoin without message rows"),
        (Plan("BroadcastHashJoin", messages(), messages()), "the plan has the operator BroadcastHashJoin"),
        (Plan("Project", Plan("LocalTableScan")), "the plan has the operator LocalTableScan"),
        (Plan("Project", Plan("Range", made_of="Range (0, 10, step=1, splits=2)")), "the plan does not read the rows of the messages"),
    ],
)  # fmt: skip
def test_plan_without_a_chain_down_to_the_messages_or_with_a_changing_side_is_refused(plan: Plan, why: str) -> None:
    assert uncarried(plan) == why


@pytest.mark.parametrize(("kind", "side"), [("FullOuter", "BuildRight"), ("RightOuter", "BuildRight"), ("LeftOuter", "BuildLeft")])
def test_join_that_preserves_its_static_side_is_refused_because_spark_runs_the_messages_twice(kind: str, side: str) -> None:
    below = (messages(), table()) if side == "BuildRight" else (table(), messages())
    assert uncarried(LoopJoin(kind, side, *below)) == f"the plan has a join of the kind {kind} without equal columns"


@pytest.mark.parametrize("error", [InvalidInput("no"), PySparkException("no"), Py4JError("no")])
def test_transformation_that_cannot_be_planned_here_stays_in_micro_batches(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(waiting_plans, "waiting_frame", fails)
    session: Any = None
    why = why_not(session, DIVERT)
    assert why is not None
    assert why.reason.startswith("the transformation cannot be planned for waiting tasks: ")
    assert not why.lasting


def test_source_of_a_plan_that_is_only_looked_at_fails_at_once_when_the_users_function_runs_it() -> None:
    with pytest.raises(Truncated, match="runs Spark while Spark plans it"):
        next(WaitingSource("", DIVERT, "")(iter(())))
