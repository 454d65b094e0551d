"""Waiting Spark tasks: each passes one batch of messages after another through a user's plan, for a resident task (``exchange``).

The job is ``range(0, BATCHES, 1, BATCHES)``, the source, the user's plan, the sink, ``coalesce(1)``. Each partition of the range is one
batch. Spark computes the partitions of a coalesced task one after another, so a batch needs no job, no plan and no compiled code of its
own, and is complete when Spark has no further row of its partition.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame, SparkSession

from bascule.core.errors import BasculeError, Scope
from bascule.journal.records import Send
from bascule.pipelines.exchange import AskedMessage, MadeRow, answer, asked_messages
from bascule.pipelines.rows import ROW_SCHEMA, message_row
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.tasks import HELD_BYTES
from bascule.pipelines.transformation import transformed

if TYPE_CHECKING:
    import pyarrow as pa

#: Batches of one job. A job keeps some memory of each batch until it ends; then the next job plans the transformation again.
BATCHES: Final = 1_000
#: What Spark writes to a worker behind the last row of a partition (SpecialLengths.END_OF_STREAM).
_END_OF_STREAM: Final = (-4).to_bytes(4, "big", signed=True)
_MADE_COLUMNS: Final = ("offset", "index", "topic", "has_key", "key", "value", "headers")


class Truncated(BasculeError):
    """Spark has ended the rows of a batch without their end: an earlier operator has failed."""

    retriable = True
    scope = Scope.OPERATION


@dataclass(frozen=True, slots=True)
class WaitingSource:
    """Asks the resident task for a batch of messages, and yields their rows. A message without a row is left out."""

    path: str
    divert: DivertSpec
    job: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the message rows of one batch."""
        from bascule.pipelines.arrow_rows import arrow_batches

        if not self.path:
            raise Truncated("the transformation runs Spark while Spark plans it")
        for _ in batches:  # Spark keeps a worker for the next batch only if its function has read all of its input
            pass
        try:
            asked = asked_messages(self.path, self.divert.name, self.job)
        except EOFError:
            raise Truncated("the resident task has ended") from None
        yield from arrow_batches(self._rows(asked))

    def _rows(self, asked: list[AskedMessage]) -> Iterator[tuple[Any, ...]]:
        for offset, epoch, sequence, index, address, timestamp_ms, body in asked:
            send = Send(0, 0, 0, timestamp_ms, 0, 0, address, (), (), (), None, body)
            with suppress(BasculeError, ValueError):  # the resident task decodes the message as well, and dead-letters it
                yield message_row(send, offset, epoch, sequence, index, self.divert.key)


@dataclass(frozen=True, slots=True)
class WaitingSink:
    """Returns the records of a batch to the resident task."""

    path: str
    divert: str
    job: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Take the records of one batch. Yield nothing."""
        answer(self.path, self.divert, self.job, self._parts(batches, _input_of_worker(sys._getframe())))
        yield from ()

    @staticmethod
    def _parts(batches: Iterator[pa.RecordBatch], stream: Any) -> Iterator[tuple[int, list[MadeRow]]]:
        for batch in batches:
            yield (
                batch.nbytes + HELD_BYTES * batch.num_rows,
                list(zip(*(batch.column(name).to_pylist() for name in _MADE_COLUMNS), strict=True)),
            )
        check_end(stream)


def check_end(stream: Any) -> None:
    """Raise Truncated unless Spark has written the end of a partition. It is not consumed.

    If an earlier operator fails, Spark closes the connection to the worker, and Arrow takes this for the end of the rows.
    """
    said = stream.peek(len(_END_OF_STREAM))[: len(_END_OF_STREAM)]
    if not said or not _END_OF_STREAM.startswith(said):
        raise Truncated("the rows of a batch have ended without their end")


def _input_of_worker(frame: FrameType | None) -> Any:
    """Return the stream from which PySpark's worker reads: a variable of its main function."""
    while frame is not None:
        if frame.f_code.co_name == "main" and "infile" in frame.f_locals:
            return frame.f_locals["infile"]
        frame = frame.f_back
    raise Truncated("this version of PySpark does not show the input of a worker")


def waiting_frame(
    session: SparkSession, divert: DivertSpec, path: str, job: str,
    passed: Callable[[Any], Any] = lambda task: task, count: int = BATCHES,
) -> DataFrame:  # fmt: skip
    """Return the records that the transformation makes of ``count`` batches. ``passed`` prepares a function for a worker.

    Without a ``path`` the frame can be planned only. Raises InvalidInput.
    """
    source = WaitingSource(path, divert, job)
    messages = session.range(0, count, 1, count).mapInArrow(passed(source), ROW_SCHEMA)
    return transformed(divert, messages)


def sunk(records: DataFrame, divert: DivertSpec, path: str, job: str, passed: Callable[[Any], Any] = lambda task: task) -> DataFrame:
    """Return a frame without rows that gives records to the resident task."""
    return records.mapInArrow(passed(WaitingSink(path, divert.name, job)), "done int").coalesce(1)


def new_job() -> str:
    """Return a name for a job."""
    return uuid.uuid4().hex
