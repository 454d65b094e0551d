"""A batch of the journal with users' transformations, in Spark: their records and the journal's own rows, merged for one writer.

``bascule.pipelines.batches`` decides what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bascule.pipelines.batches import BatchFailed, carry_all
from bascule.pipelines.failures import FAILURES, crossing, described, error_from_spark
from bascule.pipelines.pools import InPool
from bascule.pipelines.rows import ROW_SCHEMA
from bascule.pipelines.spark import journal_rows, kafka_range
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.tasks import OFFSET_MAX, REPORT_SCHEMA, DivertTask, Message, RowsTask
from bascule.pipelines.transformation import transformed


@dataclass(frozen=True, slots=True)
class TransformingBatch:
    """Carries journal rows for diverts, some of which have transformations. It finds and dead-letters messages on which one fails.

    ``look`` raises an error once the query is told to stop. Its jobs are cancelled then, and no message is at fault for that.
    """

    task: DivertTask
    pool: str
    in_pool: InPool
    look: Callable[[], None] = lambda: None

    def __call__(self, journal: DataFrame, _batch_id: int = 0) -> None:
        """Carry a batch. Raises the errors of a task, and BatchFailed if a transformation fails for another reason than a message."""
        try:
            carry_all(SparkBatch(journal, self), self.task)
        except FAILURES as error:
            raise error_from_spark(error) or BatchFailed(described(error)) from None


@dataclass(frozen=True, slots=True)
class SparkBatch:
    """Journal rows as a Spark frame (``batches.JournalBatch``)."""

    journal: DataFrame
    of: TransformingBatch

    def bounds(self) -> tuple[int, int] | None:
        """Return the first and the last journal offset, or None if there are no rows."""
        bounds = self.journal.agg(F.min("offset"), F.max("offset")).first()
        return None if bounds is None or None in bounds else (bounds[0], bounds[1])

    def up_to(self, end: int) -> SparkBatch:
        """Return the rows up to and including this offset."""
        return replace(self, journal=self.journal.filter(F.col("offset") <= end))

    def after(self, end: int) -> SparkBatch:
        """Return the rows after this offset."""
        return replace(self, journal=self.journal.filter(F.col("offset") > end))

    def part(self, start: int, end: int) -> SparkBatch:
        """Return the journal's records from ``start`` up to ``end`` (not included), read again from Kafka."""
        pipelines, claim = self.of.task.pipelines, self.of.task.claim
        read = kafka_range(self.journal.sparkSession, pipelines, claim.topic, claim.partition, start, end)
        return replace(self, journal=journal_rows(read))

    def carry(self, task: DivertTask) -> None:
        """Write the records of the task's diverts for these rows."""
        self.of.look()
        frames = [self._records(divert, task) for divert in task.diverts if divert.transformed]
        # The journal's rows come last: all branches run in one task, one after the other.
        merged = _as_records(self.journal)
        for frame in reversed(frames):
            merged = frame.unionByName(merged)
        with self.of.in_pool(self.of.pool):
            written = merged.coalesce(1).mapInArrow(crossing(task), REPORT_SCHEMA)
        _run(written)

    def messages(self, divert: DivertSpec, most: int | None) -> list[Message]:
        """Return the messages that the divert's transformation gets, or the first ``most`` of them that are found."""
        self.of.look()
        places = self._rows(RowsTask(divert)).select("offset", "index")
        return [(row[0], row[1]) for row in (places.collect() if most is None else places.take(most))]

    def fault(self, divert: DivertSpec, messages: Sequence[Message]) -> str | None:
        """Return the error of the divert's transformation on these messages, or None if it succeeds."""
        self.of.look()
        try:
            _run(self._transformed(divert, self._rows_of(divert, messages[0], messages[-1])))
        except FAILURES as error:
            self.of.look()
            return described(error)
        return None

    def control(self, divert: DivertSpec, message: Message) -> None:
        """Read a message, and run the transformation on no message. An error here is not the message's fault and is raised."""
        without = self._transformed(divert, self._rows_of(divert, (OFFSET_MAX, 0), (OFFSET_MAX, 0)))
        read = self._rows_of(divert, message, message).select("offset", "index")
        _run(without.unionByName(read, allowMissingColumns=True).coalesce(1))

    def _records(self, divert: DivertSpec, task: DivertTask) -> DataFrame:
        return self._transformed(divert, self._rows(RowsTask(divert, task.failed_of(divert))))

    def _transformed(self, divert: DivertSpec, messages: DataFrame) -> DataFrame:
        with self._rows_pool():
            return transformed(divert, messages)

    def _rows_pool(self) -> AbstractContextManager[None]:
        return self.of.in_pool(f"{self.of.pool} rows")

    def _rows(self, task: RowsTask) -> DataFrame:
        with self._rows_pool():
            return self.journal.mapInArrow(crossing(task), ROW_SCHEMA)

    def _rows_of(self, divert: DivertSpec, first: Message, last: Message) -> DataFrame:
        part = replace(self, journal=self.journal.filter(F.col("offset").between(first[0], last[0])))
        return part._rows(RowsTask(divert, first=first, last=last))


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
