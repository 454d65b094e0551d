"""Errors for a user's transformation that cannot be used. The tests need no Spark, because each error occurs before Spark runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import BinaryType, IntegerType, LongType, MapType, StringType, StructField, StructType

from bascule.core.errors import InvalidInput
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.transformation import NotPlanned, NotRowLocal, check_plan, given_columns, transformed

MODULE = """
def by_key(messages):
    return {}["colour"]

def by_type(messages):
    return messages + 1

def leave(messages):
    raise SystemExit(3)

def nothing(messages):
    return None
"""


@pytest.mark.parametrize(
    ("module", "function", "message"),
    [
        ("users_own", "by_key", "users_own:by_key failed during planning: KeyError: 'colour'"),
        ("users_own", "by_type", "users_own:by_type failed during planning: TypeError: "),
        ("users_own", "leave", "users_own:leave failed during planning: SystemExit: 3"),
        ("users_own", "nothing", "users_own:nothing returned NoneType, not a DataFrame"),
        ("users_own", "missing", "could not load python = 'users_own:missing': AttributeError: "),
        ("users_broken", "by_key", "could not load python = 'users_broken:by_key': ZeroDivisionError: "),
        ("users_leaving", "by_key", "could not load python = 'users_leaving:by_key': SystemExit: 3"),
        ("users_unwritten", "by_key", "could not load python = 'users_unwritten:by_key': ModuleNotFoundError: "),
    ],
)
def test_unusable_transformation_function_is_refused_and_error_names_divert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, function: str, message: str
) -> None:
    (tmp_path / "users_own.py").write_text(MODULE)
    (tmp_path / "users_broken.py").write_text("1 / 0")
    (tmp_path / "users_leaving.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    messages: Any = object()
    with pytest.raises((InvalidInput, NotPlanned)) as refused:
        transformed(DivertSpec("d", "#", function=f"{module}:{function}"), messages)
    assert refused.value.retriable is ("during planning" in message), "what the function asks may answer later"
    assert str(refused.value).startswith(f"divert 'd': {message}")


def test_invalid_select_expression_is_refused_and_error_names_divert() -> None:
    class Messages:
        def selectExpr(self, *expressions: str) -> None:
            assert expressions == ("offset", "epoch", "sequence", "index", "colour AS value")
            raise PySparkException("\n[UNRESOLVED_COLUMN] no column `colour`\n at line 1\n")

    messages: Any = Messages()
    with pytest.raises(InvalidInput, match=r"^divert 'd': the transformation does not fit the message row: \[UNRESOLVED_COLUMN\] .*`$"):
        transformed(DivertSpec("d", "#", select=("offset", " index ", "colour AS value")), messages)


def test_spark_error_of_function_is_reported_with_divert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_other.py").write_text(
        "from pyspark.errors import PySparkException\ndef f(messages):\n    raise PySparkException('no')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    messages: Any = object()
    with pytest.raises(InvalidInput, match=r"^divert 'd': the transformation does not fit the message row: no$"):
        transformed(DivertSpec("d", "#", function="users_other:f"), messages)


def result(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


IDENTITY: dict[str, Any] = {"offset": LongType(), "index": IntegerType()}
TEXTS = MapType(StringType(), StringType())


@pytest.mark.parametrize(
    ("columns", "given"),
    [
        ({"value": StringType()}, set()),
        ({"value": BinaryType(), "key": StringType(), "other": StringType()}, {"key"}),
        ({"value": BinaryType(), "topic": StringType(), "headers": StringType()}, {"topic"}),
        ({"value": BinaryType(), "key": StringType(), "topic": StringType(), "headers": TEXTS}, {"key", "topic", "headers"}),
    ],
)
def test_transformation_result_columns_are_recognised_by_name_and_headers_by_type(columns: dict[str, Any], given: set[str]) -> None:
    assert given_columns(DivertSpec("d", "#"), result(**IDENTITY, **columns)) == given


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"offset": LongType(), "value": StringType()}, "must keep the columns offset and index"),
        ({"index": IntegerType(), "value": StringType()}, "must keep the columns offset and index"),
        (IDENTITY, "must return a column `value` of type string or binary"),
        ({**IDENTITY, "value": IntegerType()}, "must return a column `value` of type string or binary"),
    ],
)
def test_transformation_result_without_required_columns_is_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^divert 'd': .*{message}"):
        given_columns(DivertSpec("d", "#"), result(**columns))


class Plan:
    """An operator of Spark's plan, and the operators below it, with the methods of the gateway's object."""

    def __init__(self, name: str, *below: Plan, made_of: str = "") -> None:
        self._name, self._below, self._made_of = name, below, made_of

    def nodeName(self) -> str:
        return self._name

    def toString(self) -> str:
        return self._made_of

    def children(self) -> Plan:
        return self

    def size(self) -> int:
        return len(self._below)

    def apply(self, place: int) -> Plan:
        return self._below[place]


TABLE = Plan("BroadcastExchange", Plan("HashAggregate", Plan("Exchange")), made_of="Scan json")
SELF_JOIN = Plan("BroadcastExchange", Plan("Range"), made_of="Range (0, 7919, step=1, splits=4)")


@pytest.mark.parametrize(
    "plan", [Plan("Project", Plan("Filter", Plan("Generate", Plan("Range")))), Plan("BroadcastHashJoin", Plan("Range"), TABLE)]
)
def test_row_local_transformation_and_join_with_static_table_are_allowed(plan: Plan) -> None:
    check_plan(DivertSpec("d", "#"), plan)


@pytest.mark.parametrize(
    ("plan", "operator"),
    [
        (Plan("Project", Plan("HashAggregate", Plan("Range"))), "HashAggregate"),
        (Plan("BroadcastHashJoin", TABLE, Plan("Sort", Plan("Range"))), "Sort"),
        (Plan("BroadcastHashJoin", Plan("Range"), SELF_JOIN), "BroadcastExchange (a join of the messages with themselves)"),
        (Plan("GlobalLimit", Plan("Range")), "GlobalLimit"),
    ],
)
def test_transformation_across_messages_is_refused_and_error_names_operator(plan: Plan, operator: str) -> None:
    with pytest.raises(
        NotRowLocal, match=f"^divert 'd': the transformation is not row-local: operator {re.escape(operator)} needs several"
    ):
        check_plan(DivertSpec("d", "#"), plan)
