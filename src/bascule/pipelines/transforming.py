"""A batch of the journal with users' transformations: their records and the journal's own rows, merged for one writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bascule.core.errors import BasculeError
from bascule.pipelines.queries import is_fatal, short
from bascule.pipelines.rows import ROW_SCHEMA
from bascule.pipelines.spec import Divert
from bascule.pipelines.tasks import OFFSET_MAX, REPORT_SCHEMA, DivertTask, Message, RowsTask
from bascule.pipelines.transformation import transformed

log = structlog.get_logger()

#: Sets the pool of worker processes that Python functions made from now on run in.
SetPool = Callable[[str], None]

#: When so many messages are found on which a transformation fails, what comes before the next one is carried, and then looked further.
BAD_AT_ONCE = 16


class BatchFailed(BasculeError):
    """A batch could not be written."""


@dataclass(frozen=True, slots=True)
class TransformingBatch:
    """Carries journal rows for diverts of which some have transformations. A message on which one fails is found and dead-lettered."""

    task: DivertTask
    pool: str
    set_pool: SetPool

    def __call__(self, journal: DataFrame, _batch_id: int = 0) -> None:
        """Raises BatchFailed when the fault does not lie in a transformation."""
        rest: DataFrame | None = journal
        try:
            while rest is not None:
                rest = self._advance(rest)
        except PySparkException as error:
            # Short: Spark searches what a batch function raises with a regular expression that overflows its stack on long texts.
            raise BatchFailed(short(str(error))) from None

    def _advance(self, journal: DataFrame) -> DataFrame | None:
        """Carries all rows, or, where transformations fail on many messages, the first; returns the rest."""
        try:
            self._carry(journal, self.task)
            return None
        except PySparkException as error:
            if is_fatal(str(error)):
                raise
            failed, end = self._failures(journal)
            if not failed:
                raise
        for (divert, offset, index), reason in failed.items():
            log.warning("transformation failed", divert=divert, offset=offset, index=index, reason=reason)
        self._carry(journal.filter(F.col("offset") <= end), replace(self.task, failed=failed))
        return journal.filter(F.col("offset") > end) if end < OFFSET_MAX else None

    def _carry(self, journal: DataFrame, task: DivertTask) -> None:
        frames = [self._records(journal, divert, task) for divert in task.diverts if divert.transformed]
        # The journal's rows come last: all branches run in one task, one after the other.
        merged = _as_records(journal)
        for frame in reversed(frames):
            merged = frame.unionByName(merged)
        self.set_pool(self.pool)
        _run(merged.coalesce(1).mapInArrow(lambda batches: task(batches), REPORT_SCHEMA))

    def _records(self, journal: DataFrame, divert: Divert, task: DivertTask) -> DataFrame:
        failed = frozenset((offset, index) for name, offset, index in task.failed if name == divert.name)
        return transformed(divert, self._rows(journal, RowsTask(divert, failed)))

    def _rows(self, journal: DataFrame, task: RowsTask) -> DataFrame:
        self.set_pool(f"{self.pool} rows")
        return journal.mapInArrow(lambda batches: task(batches), ROW_SCHEMA)

    def _failures(self, journal: DataFrame) -> tuple[dict[tuple[str, int, int], str], int]:
        """On what transformations fail, and why, by divert and message; and the last journal offset up to which that is all."""
        failed: dict[tuple[str, int, int], str] = {}
        end = OFFSET_MAX
        for divert in self.task.diverts:
            if divert.transformed:
                part = journal.filter(F.col("offset") <= end)
                rows = self._rows(part, RowsTask(divert)).select("offset", "index").collect()
                bad, reached = first_bad(sorted((row[0], row[1]) for row in rows), partial(self._fault, part, divert))
                failed |= {(divert.name, *message): reason for message, reason in bad.items()}
                end = min(end, reached)
        return {key: reason for key, reason in failed.items() if key[1] <= end}, end

    def _fault(self, journal: DataFrame, divert: Divert, messages: Sequence[Message]) -> str | None:
        """What a divert's transformation fails with on these; None when it does not."""
        task = RowsTask(divert, first=messages[0], last=messages[-1])
        rows = self._rows(journal.filter(F.col("offset").between(messages[0][0], messages[-1][0])), task)
        try:
            _run(transformed(divert, rows))
        except PySparkException as error:
            if len(messages) == 1:
                _run(rows)  # when that fails, too, the fault lies elsewhere
            return short(str(error))
        return None


#: Tries a transformation on messages, and says what it fails with.
Fault = Callable[[Sequence[Message]], str | None]


def first_bad(messages: Sequence[Message], fault: Fault) -> tuple[dict[Message, str], int]:
    """The first messages on which a transformation fails, and why; and the last journal offset up to which these are all.

    All of a journal record are looked at, since it is carried as one.
    """
    bad: dict[Message, str] = {}
    offset = -1
    for message, reason in _bad(messages, fault):
        if len(bad) >= BAD_AT_ONCE and message[0] > offset:
            return bad, message[0] - 1
        bad[message] = reason
        offset = message[0]
    return bad, OFFSET_MAX


def _bad(messages: Sequence[Message], fault: Fault) -> Iterator[tuple[Message, str]]:
    """By halving, in order."""
    if not messages or fault(messages) is None:
        return
    if len(messages) > 1:
        middle = len(messages) // 2
        yield from _bad(messages[:middle], fault)
        yield from _bad(messages[middle:], fault)
    elif (reason := fault(messages)) is not None:  # a fault that passes (a worker that was killed) is not the message's
        yield messages[0], reason


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
