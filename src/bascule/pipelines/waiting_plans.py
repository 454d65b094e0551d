"""Which transformations waiting tasks can run (``waiting``), as Spark's plan of them says. The others stay in micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from bascule.core.errors import BasculeError
from bascule.pipelines.failures import described
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.waiting import BATCHES, waiting_frame

#: Operators that pass on each partition as one, in one task, and that compute nothing for good when Spark makes its plan.
_CARRIED: Final = frozenset(
    {"Project", "Filter", "Generate", "BroadcastHashJoin", "BroadcastNestedLoopJoin", "BatchEvalPython", "ArrowEvalPython", "MapInArrow",
     "MapInPandas", "InputAdapter", "ColumnarToRow"}
)  # fmt: skip
_RANGE: Final = "Range"
_BROADCAST: Final = "BroadcastExchange"
_COMPILED: Final = "WholeStageCodegen"
_LOOP_JOIN: Final = "BroadcastNestedLoopJoin"
#: Leaves of a static side that lie in memory. Files and tables are read again for each micro-batch.
_IN_MEMORY: Final = frozenset({"LocalTableScan", "Scan ExistingRDD", _RANGE, "Scan OneRowRelation"})
#: How Spark shows the range from which the message rows are made. A user's own range is unlikely to have these numbers.
MESSAGE_RANGE: Final = f"(0, {BATCHES}, step=1, splits={BATCHES})"
#: Joins by nested loops that treat each message by itself. For the others Spark runs the message rows twice, once in a job of its own.
_LOOPS: Final = frozenset(
    {("Inner", "BuildLeft"), ("Inner", "BuildRight"), ("Cross", "BuildLeft"), ("Cross", "BuildRight"), ("LeftOuter", "BuildRight"),
     ("RightOuter", "BuildLeft"), ("LeftSemi", "BuildRight"), ("LeftAnti", "BuildRight")}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why waiting tasks cannot run a transformation. It is ``lasting`` if Spark's plan shows it: another plan would show it as well."""

    reason: str
    lasting: bool


def why_not(session: SparkSession, divert: DivertSpec) -> Obstacle | None:
    """Return why waiting tasks cannot run a transformation, or None if they can. Nothing is run, but the user's function is called."""
    try:
        execution = waiting_frame(session, divert, "", "")._jdf.queryExecution()
        jvm: Any = session._jvm
        patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        analyzed = execution.analyzed()
        if analyzed.containsPattern(patterns.CURRENT_LIKE()):
            return Obstacle("the transformation uses the current time, date, user or catalog", lasting=True)
        if analyzed.containsPattern(patterns.PLAN_EXPRESSION()):
            return Obstacle("the transformation has a subquery", lasting=True)
        reason = uncarried(execution.executedPlan())
        return None if reason is None else Obstacle(reason, lasting=True)
    except (BasculeError, PySparkException, Py4JError) as error:  # it has passed the check, so it may run in micro-batches
        return Obstacle(f"the transformation cannot be planned for waiting tasks: {described(error)}", lasting=False)


def uncarried(plan: Any) -> str | None:
    """Return why Spark's plan of the message rows cannot run in a waiting task. It must be one chain down to the source."""
    while True:
        name = _name(plan)
        if name == _RANGE:
            return None if MESSAGE_RANGE in plan.toString() else "the plan does not read the rows of the messages"
        if not name.startswith(_COMPILED) and name not in _CARRIED:
            return f"the plan has the operator {name}"
        if name == _LOOP_JOIN and (plan.joinType().toString(), plan.buildSide().toString()) not in _LOOPS:
            return f"the plan has a join of the kind {plan.joinType().toString()} without equal columns"
        children = _children(plan)
        static = [child for child in children if _is_static(child)]
        for child in static:
            if (why := _unheld(child)) is not None:
                return why
        rest = [child for child in children if child not in static]
        if len(rest) != 1:
            return f"the plan has the operator {name} without message rows" if not rest else f"the plan has the operator {name}"
        plan = rest[0]


def _is_static(plan: Any) -> bool:
    name = _name(plan)
    return name == _BROADCAST or (name == "InputAdapter" and _is_static(_children(plan)[0]))


def _unheld(plan: Any) -> str | None:
    """Return why the static side of a join cannot be kept."""
    if MESSAGE_RANGE in plan.toString():
        return "the plan joins the messages with themselves"
    children = _children(plan)
    if not children and _name(plan) not in _IN_MEMORY:
        return f"the plan reads a file or table ({_name(plan)})"
    return next((why for child in children if (why := _unheld(child)) is not None), None)


def _children(plan: Any) -> Sequence[Any]:
    return [plan.children().apply(place) for place in range(plan.children().size())]


def _name(plan: Any) -> str:
    return str(plan.nodeName()).strip()
