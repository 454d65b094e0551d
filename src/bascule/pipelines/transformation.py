"""A user's transformation of a divert: Spark SQL expressions or a Python function over message rows, row by row."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType

from bascule.core.errors import BasculeError, InvalidInput, Scope
from bascule.pipelines.rows import IDENTITY, ROW_SCHEMA
from bascule.pipelines.spec import DivertSpec

#: The schema of a transformed row for the writer.
RECORD_SCHEMA = "divert string, offset long, index int, topic string, has_key boolean, key binary, value binary, headers map<string,string>"
#: Operators that need more than one message at a time, by a part of their name.
_NOT_ROW_LOCAL = (
    "Exchange", "Sort", "Aggregate", "Window", "Limit", "TakeOrdered", "CartesianProduct", "Coalesce", "ShuffledHashJoin",
    "Deduplicate", "StateStore", "FlatMapGroups", "CoGroup", "MapGroups", "Sample", "Collect",
)  # fmt: skip
_BROADCAST = "BroadcastExchange"
#: Rows of the sample frame on which a transformation is planned. A user's own range is unlikely to have this number.
_SAMPLE_ROWS = 7_919


class NotRowLocal(InvalidInput):
    """Raised for a transformation that needs several messages at once. The transformation of a divert must take each message by itself."""

    scope = Scope.PIPELINE


class NotPlanned(BasculeError):
    """Spark could not plan a transformation because the user's function has failed, or takes too long. Another attempt may succeed."""

    retriable = True
    scope = Scope.PIPELINE


def transformed(divert: DivertSpec, messages: DataFrame) -> DataFrame:
    """Return the records (RECORD_SCHEMA) that the divert's transformation makes of message rows. Raises InvalidInput, NotPlanned."""
    try:
        result = messages.selectExpr(*IDENTITY, *_without_identity(divert.select)) if divert.select else _function(divert)(messages)
        return _as_records(divert, result)
    except PySparkException as error:
        raise InvalidInput(f"divert {divert.name!r}: the transformation does not fit the message row: {_first_line(error)}") from error


def check(divert: DivertSpec, session: SparkSession) -> None:
    """Refuse, before anything runs, a transformation that is wrong or not row-local. Raises InvalidInput, NotRowLocal, NotPlanned."""
    source = F.col("id").cast("string")
    columns = [
        (F.create_map(F.lit("a"), source) if isinstance(kind, MapType) else source.cast(kind)).alias(name) for name, kind in _row_fields()
    ]
    records = transformed(divert, session.range(0, _SAMPLE_ROWS, 1, 4).select(*columns))
    try:
        check_plan(divert, records._jdf.queryExecution().executedPlan())
    except Py4JError as error:
        raise InvalidInput(f"divert {divert.name!r}: could not plan the transformation: {error}") from error


def check_plan(divert: DivertSpec, plan: Any) -> None:
    """Refuse Spark's plan of a transformation if it has an operator for several messages at once. Raises NotRowLocal."""
    for name in _operators(plan):
        if any(part in name for part in _NOT_ROW_LOCAL):
            raise NotRowLocal(
                f"divert {divert.name!r}: the transformation is not row-local: operator {name} needs several messages at once;"
                " allowed are select, filter, explode, functions of one row, and joins with small static tables"
            )


def _row_fields() -> list[tuple[str, DataType]]:
    row = cast("StructType", DataType.fromDDL(ROW_SCHEMA))
    return [(field.name, field.dataType) for field in row.fields]


def _operators(plan: Any) -> Iterator[str]:
    name = str(plan.nodeName())
    if name == _BROADCAST:
        # The static side of a join may have any operators, unless it is made of the messages themselves.
        if f"(0, {_SAMPLE_ROWS}, step=1, splits=4)" in plan.toString():
            yield f"{_BROADCAST} (a join of the messages with themselves)"
        return
    yield name
    children = plan.children()
    for place in range(children.size()):
        yield from _operators(children.apply(place))


def _function(divert: DivertSpec) -> Callable[[DataFrame], DataFrame]:
    module, _, name = (divert.function or "").partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise InvalidInput(f"divert {divert.name!r}: could not load python = {divert.function!r}: {_said(error)}") from error

    def call(messages: DataFrame) -> DataFrame:
        try:
            result = function(messages)
        except PySparkException:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # the function may raise anything, for example because a service does not answer
            raise NotPlanned(f"divert {divert.name!r}: {divert.function} failed during planning: {_said(error)}") from error
        if not isinstance(result, DataFrame):
            raise InvalidInput(f"divert {divert.name!r}: {divert.function} returned {type(result).__name__}, not a DataFrame")
        return result

    return call


def _without_identity(expressions: tuple[str, ...]) -> list[str]:
    return [each for each in expressions if each.strip() not in IDENTITY]


def given_columns(divert: DivertSpec, result: StructType) -> frozenset[str]:
    """Return which of the columns key, topic and headers a transformation gives.

    Raises InvalidInput if no record can be made of the result.
    """
    kinds = {field.name: field.dataType for field in result.fields}
    if not {"offset", "index"} <= kinds.keys():
        raise InvalidInput(f"divert {divert.name!r}: the function must keep the columns offset and index, which identify the message")
    if not isinstance(kinds.get("value"), BinaryType | StringType):
        raise InvalidInput(f"divert {divert.name!r}: the transformation must return a column `value` of type string or binary")
    given = {name for name in ("key", "topic") if name in kinds}
    return frozenset(given | ({"headers"} if isinstance(kinds.get("headers"), MapType) else set()))


def _as_records(divert: DivertSpec, result: DataFrame) -> DataFrame:
    given = given_columns(divert, result.schema)

    def column(name: str) -> Column:
        return F.col(name) if name in given else F.lit(None)

    return result.select(
        F.lit(divert.name).alias("divert"),
        F.col("offset").cast("long").alias("offset"),
        F.col("index").cast("int").alias("index"),
        column("topic").cast("string").alias("topic"),
        F.lit("key" in given).alias("has_key"),
        column("key").cast("binary").alias("key"),
        F.col("value").cast("binary").alias("value"),
        column("headers").cast("map<string,string>").alias("headers"),
    )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
