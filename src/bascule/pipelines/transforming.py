"""A batch of the journal with users' transformations: their records and the journal's own rows, merged for one writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bascule.core.errors import BasculeError
from bascule.pipelines.queries import is_fatal, short
from bascule.pipelines.rows import ROW_SCHEMA
from bascule.pipelines.spec import Divert
from bascule.pipelines.tasks import REPORT_SCHEMA, DivertTask, RowsTask
from bascule.pipelines.transformation import transformed

log = structlog.get_logger()

#: Sets the pool of worker processes that Python functions made from now on run in.
SetPool = Callable[[str], None]


class BatchFailed(BasculeError):
    """A batch could not be written."""


@dataclass(frozen=True, slots=True)
class TransformingBatch:
    """Carries journal rows for diverts of which some have transformations. A record on which one fails is found and dead-lettered."""

    task: DivertTask
    pool: str
    set_pool: SetPool

    def __call__(self, journal: DataFrame, _batch_id: int = 0) -> None:
        """Raises BatchFailed when the fault does not lie in a transformation."""
        try:
            self._carry(journal, self.task)
        except PySparkException as error:
            said = str(error)
            failed = {} if is_fatal(said) else self._failures(journal)
            if not failed:
                # Short: Spark searches what a batch function raises with a regular expression that overflows its stack on long texts.
                raise BatchFailed(short(said)) from None
            for (divert, offset), reason in failed.items():
                log.warning("transformation failed", divert=divert, offset=offset, reason=reason)
            self._carry(journal, replace(self.task, failed=failed))

    def _carry(self, journal: DataFrame, task: DivertTask) -> None:
        frames = [self._records(journal, divert, task) for divert in task.diverts if divert.transformed]
        # The journal's rows come last: all branches run in one task, one after the other.
        merged = _as_records(journal)
        for frame in reversed(frames):
            merged = frame.unionByName(merged)
        self.set_pool(self.pool)
        _run(merged.coalesce(1).mapInArrow(lambda batches: task(batches), REPORT_SCHEMA))

    def _records(self, journal: DataFrame, divert: Divert, task: DivertTask) -> DataFrame:
        self.set_pool(f"{self.pool} rows")
        bad = [offset for name, offset in task.failed if name == divert.name]
        rows = RowsTask(divert)
        good = journal.filter(~F.col("offset").isin(bad)) if bad else journal
        return transformed(divert, good.mapInArrow(lambda batches: rows(batches), ROW_SCHEMA))

    def _failures(self, journal: DataFrame) -> dict[tuple[str, int], str]:
        """The journal offsets on which a transformation fails, found by halving, and why."""
        span = journal.agg(F.min("offset"), F.max("offset")).first()
        if span is None or span[0] is None:
            return {}
        return {
            (divert.name, offset): reason
            for divert in self.task.diverts
            if divert.transformed
            for offset, reason in self._bad_offsets(journal, divert, span[0], span[1])
        }

    def _bad_offsets(self, journal: DataFrame, divert: Divert, low: int, high: int) -> list[tuple[int, str]]:
        part = journal.filter(F.col("offset").between(low, high))
        try:
            _run(self._records(part, divert, self.task))
        except PySparkException as error:
            if low == high:
                return [(low, short(str(error)))]
            middle = (low + high) // 2
            return self._bad_offsets(journal, divert, low, middle) + self._bad_offsets(journal, divert, middle + 1, high)
        return []


def _as_records(journal: DataFrame) -> DataFrame:
    return journal.select(
        F.lit(None).cast("string").alias("divert"),
        "offset",
        F.lit(None).cast("int").alias("index"),
        F.lit(None).cast("string").alias("topic"),
        F.lit(False).alias("has_key"),
        "key",
        "value",
        F.lit(None).cast("map<string,string>").alias("headers"),
    )


def _run(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()
