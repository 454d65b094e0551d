"""A batch of the journal with users' transformations: their records and the journal's own rows, merged for one writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bascule.core.errors import BasculeError, Scope
from bascule.core.log import get_log
from bascule.pipelines.failures import FAILURES, crossing, described, error_from_spark
from bascule.pipelines.rows import ROW_SCHEMA
from bascule.pipelines.spark import journal_rows, kafka_range
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.tasks import OFFSET_MAX, REPORT_SCHEMA, DivertTask, Message, RowsTask, TooMuchAtOnce
from bascule.pipelines.transformation import transformed

log = get_log(__name__)

#: Sets the pool of worker processes that Python functions made from now on run in.
SetPool = Callable[[str], None]

#: When so many messages are found on which a transformation fails, what comes before the next one is carried, and then looked further.
#: Each takes Spark a second or so, in which all diverts stand still.
BAD_AT_ONCE = 8
#: Those on which one fails are looked for among no more than so many, or in one journal record.
SEARCHED_AT_ONCE = 100_000


class BatchFailed(BasculeError):
    """A batch could not be written."""

    retriable = True
    scope = Scope.OPERATION


@dataclass(frozen=True, slots=True)
class TransformingBatch:
    """Carries journal rows for diverts of which some have transformations. A message on which one fails is found and dead-lettered."""

    task: DivertTask
    pool: str
    set_pool: SetPool

    def __call__(self, journal: DataFrame, _batch_id: int = 0) -> None:
        """Raises what a task raises, and BatchFailed when a transformation fails for another reason than a message."""
        try:
            self._carry_all(journal)
        except FAILURES as error:
            raise error_from_spark(error) or BatchFailed(described(error)) from None

    def _carry_all(self, journal: DataFrame) -> None:
        rest: DataFrame | None = journal
        while rest is not None:
            rest = self._advance(rest)

    def _advance(self, journal: DataFrame) -> DataFrame | None:
        """Carries all rows, or, where transformations fail on many messages, the first; returns the rest."""
        try:
            return self._carry_some(journal)
        except (*FAILURES, TooMuchAtOnce) as error:
            if not isinstance(error_from_spark(error), TooMuchAtOnce):
                raise
        self._carry_in_parts(journal)
        return None

    def _carry_in_parts(self, journal: DataFrame) -> None:
        """One half after the other; a single journal record as it is."""
        bounds = journal.agg(F.min("offset"), F.max("offset")).first()
        if bounds is None or None in bounds:
            raise BatchFailed("Spark finds no rows in a batch of which there was too much to be held")
        first, last = bounds
        log.info("a batch is carried in parts", first=first, last=last)
        if first == last:
            replace(self, task=replace(self.task, made_bytes_max=None))._carry_all(journal)
            return
        middle = (first + last + 1) // 2
        pipelines, claim = self.task.pipelines, self.task.claim
        for start, end in ((first, middle), (middle, last + 1)):
            # Read anew from Kafka: of a batch as Spark gives it, each part would be read from the batch's beginning.
            self._carry_all(journal_rows(kafka_range(journal.sparkSession, pipelines, claim.topic, claim.partition, start, end)))

    def _carry_some(self, journal: DataFrame) -> DataFrame | None:
        try:
            self._carry(journal, self.task)
            return None
        except FAILURES as error:
            if error_from_spark(error) is not None:  # a task's, which no transformation has caused
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
        _run(merged.coalesce(1).mapInArrow(crossing(task), REPORT_SCHEMA))

    def _records(self, journal: DataFrame, divert: DivertSpec, task: DivertTask) -> DataFrame:
        failed = frozenset((offset, index) for name, offset, index in task.failed if name == divert.name)
        return transformed(divert, self._rows(journal, RowsTask(divert, failed)))

    def _rows(self, journal: DataFrame, task: RowsTask) -> DataFrame:
        self.set_pool(f"{self.pool} rows")
        return journal.mapInArrow(crossing(task), ROW_SCHEMA)

    def _failures(self, journal: DataFrame) -> tuple[dict[tuple[str, int, int], str], int]:
        """On what transformations fail, and why, by divert and message; and the last journal offset up to which that is all."""
        failed: dict[tuple[str, int, int], str] = {}
        end = OFFSET_MAX
        for divert in self.task.diverts:
            if divert.transformed:
                part = journal.filter(F.col("offset") <= end)
                fault, control = partial(self._fault, part, divert), partial(self._control, part, divert)
                bad, reached = first_bad(self._messages(part, divert), fault, control)
                failed |= {(divert.name, *message): reason for message, reason in bad.items()}
                end = min(end, reached)
        return {key: reason for key, reason in failed.items() if key[1] <= end}, end

    def _messages(self, journal: DataFrame, divert: DivertSpec) -> list[Message]:
        """Those that a divert's transformation is given. Raises TooMuchAtOnce."""
        places = self._rows(journal, RowsTask(divert)).select("offset", "index")
        found = places.collect() if self.task.made_bytes_max is None else places.take(SEARCHED_AT_ONCE + 1)
        if len(found) > SEARCHED_AT_ONCE and self.task.made_bytes_max is not None:
            raise TooMuchAtOnce(f"a transformation fails on some of more than {SEARCHED_AT_ONCE} messages")
        return sorted((row[0], row[1]) for row in found)

    def _fault(self, journal: DataFrame, divert: DivertSpec, messages: Sequence[Message]) -> str | None:
        """What a divert's transformation fails with on these; None when it does not."""
        try:
            _run(transformed(divert, self._rows_of(journal, divert, messages[0], messages[-1])))
        except FAILURES as error:
            return described(error)
        return None

    def _control(self, journal: DataFrame, divert: DivertSpec, message: Message) -> None:
        """Reads a message, and runs the transformation without any. What fails with that is not the message's fault, and is raised."""
        without = transformed(divert, self._rows_of(journal, divert, (OFFSET_MAX, 0), (OFFSET_MAX, 0)))
        read = self._rows_of(journal, divert, message, message).select("offset", "index")
        _run(without.unionByName(read, allowMissingColumns=True).coalesce(1))

    def _rows_of(self, journal: DataFrame, divert: DivertSpec, first: Message, last: Message) -> DataFrame:
        return self._rows(journal.filter(F.col("offset").between(first[0], last[0])), RowsTask(divert, first=first, last=last))


#: Tries a transformation on messages, and says what it fails with.
Fault = Callable[[Sequence[Message]], str | None]
#: Raises what is wrong where no message's transformation is.
Control = Callable[[Message], None]


def first_bad(messages: Sequence[Message], fault: Fault, control: Control) -> tuple[dict[Message, str], int]:
    """The first messages on which a transformation fails, and why; and the last journal offset up to which these are all.

    All of a journal record are looked at, since it is carried as one.
    """
    bad: dict[Message, str] = {}
    offset = -1
    for message, reason in _bad(messages, fault, control):
        if len(bad) >= BAD_AT_ONCE and message[0] > offset:
            return bad, message[0] - 1
        bad[message] = reason
        offset = message[0]
    return bad, OFFSET_MAX


def _bad(messages: Sequence[Message], fault: Fault, control: Control, *, failing: bool = False) -> Iterator[tuple[Message, str]]:
    """By halving, in order. ``failing`` says that they are known to hold one."""
    if len(messages) < 2:
        yield from _bad_itself(messages, fault, control)
    elif failing or fault(messages) is not None:
        middle = len(messages) // 2
        found = False
        for each in _bad(messages[:middle], fault, control):
            found = True
            yield each
        yield from _bad(messages[middle:], fault, control, failing=not found)


def _bad_itself(messages: Sequence[Message], fault: Fault, control: Control) -> Iterator[tuple[Message, str]]:
    """Twice: a fault that passes (a worker that was killed) is not the message's."""
    for message in messages:
        if fault([message]) is not None:
            control(message)
            if (reason := fault([message])) is not None:
                yield message, reason


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
