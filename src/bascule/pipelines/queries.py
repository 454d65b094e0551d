"""One streaming query, kept running: started at its positions, started again with a pause when it fails, stopped where that cannot help."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from bascule.core.errors import BasculeError, Scope

log = structlog.get_logger()

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
#: A query that ran so long before it failed starts again with the first pause.
STEADY_S = 60.0

#: Errors, by their name, that starting again cannot mend.
FATAL = ("PositionTaken", "PositionLost", "DamagedRecord", "NewerRecord", "BadRecord", "TopicMissing", "Unwritable")
_NAMES = "|".join(FATAL)
#: As ``Query.start`` says one, and as a traceback does: a worker's, or that of a batch function that tells what a worker's says.
_SAID = re.compile(rf"({_NAMES}): ")
_RAISED = re.compile(rf"(?:bascule\.pipelines\.transforming\.BatchFailed: )?bascule\.[\w.]+\.({_NAMES}): ")
_TRACEBACK = "Traceback (most recent call last):"
_CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\]")
#: Spark's condition for what a worker raised. The text of another may quote a message, and a message anything.
_OF_A_WORKER = "[PYTHON_EXCEPTION]"


class PipelineStopped(BasculeError):
    """A pipeline cannot go on; the text says why and what to do."""

    retriable = False
    scope = Scope.PROCESS


@dataclass(slots=True)
class Query:
    """A pipeline as Spark runs it. ``build`` takes its positions over and returns what writes; None: nothing to do until ``restart``."""

    name: str
    build: Callable[[], DataStreamWriter | None]
    checkpoints: Path
    trigger_interval_ms: int = 0
    running: StreamingQuery | None = None
    stopped: str | None = None
    restarts: int = 0
    _attempts: int = 0
    _pause_s: float = FIRST_PAUSE_S
    _due_s: float = 0.0
    _since_s: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Starts it at its positions; an error counts as a failure of the query."""
        try:
            writer = self.build()
            if writer is None:
                self._due_s = math.inf
                return
            self._attempts += 1
            # The position decides, never a checkpoint: each start has a fresh one.
            self._drop_checkpoint(self._attempts - 1)
            self.running = (
                writer.queryName(f"{self.name}-{self._attempts}")
                .trigger(processingTime=f"{self.trigger_interval_ms} milliseconds")
                .option("checkpointLocation", str(self._checkpoint(self._attempts)))
                .start()
            )
            self._since_s = time.monotonic()
        except (BasculeError, PySparkException) as error:
            self._failed(type(error).__name__ + ": " + str(error))

    def check(self) -> None:
        """Looks after it; to be called often."""
        if self.stopped is not None:
            return
        if self.running is not None and not self.running.isActive:
            error = self.running.exception()
            self.running = None
            if time.monotonic() - self._since_s > STEADY_S:
                self._pause_s = FIRST_PAUSE_S
            self._failed(str(error) if error else "ended without a reason")
        if self.running is None and self.stopped is None and time.monotonic() >= self._due_s:
            self.start()

    @property
    def superseded(self) -> bool:
        """Whether it has stopped for another driver, which does its work now."""
        found = _fatal(self.stopped or "")
        return found is not None and found[1] == "PositionTaken"

    def stop(self) -> None:
        """Stops it; a transaction under way is aborted by whoever takes the position next."""
        if self.running is not None:
            self.running.stop()
            self.running = None
        self._drop_checkpoint(self._attempts)

    def restart(self) -> None:
        """Stops and starts it at once, unless it has come to its end."""
        self.stop()
        if self.stopped is None:
            self._due_s = 0.0
            self.start()

    def reached(self) -> dict[tuple[str, int], int]:
        """The end of its last finished batch, by topic and partition."""
        progress = self.running.lastProgress if self.running is not None else None
        if not progress:
            return {}
        ends = json.loads(progress["sources"][0]["endOffset"] or "{}")
        return {(topic, int(partition)): offset for topic, by in ends.items() for partition, offset in by.items()}

    def _failed(self, said: str) -> None:
        self.restarts += 1
        found = _fatal(said)
        if found is not None:
            self.stopped = found.string.splitlines()[0]
            log.error("pipeline stopped", pipeline=self.name, reason=self.stopped)
            return
        self._due_s = time.monotonic() + self._pause_s
        log.warning("pipeline failed, starting again", pipeline=self.name, pause_s=self._pause_s, error=short(said))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _checkpoint(self, attempt: int) -> Path:
        return self.checkpoints / f"{self.name}-{attempt}"

    def _drop_checkpoint(self, attempt: int) -> None:
        shutil.rmtree(self._checkpoint(attempt), ignore_errors=True)


def is_fatal(said: str) -> bool:
    """Whether an error names something that starting again cannot mend."""
    return _fatal(said) is not None


def is_raised(said: str, error: type[BasculeError]) -> bool:
    """Whether an error's text says that a worker has raised this."""
    return _raised(said).startswith(f"{error.__module__}.{error.__name__}: ")


def short(said: str) -> str:
    """What went wrong, without the stack of Java frames around it."""
    raised = _raised(said)
    if raised:
        return raised[:600]
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.lstrip().startswith(("at ", "..."))]
    return " | ".join(lines[:3])[:600]


def _fatal(said: str) -> re.Match[str] | None:
    """The name, behind which stands the reason. Only where an error itself is named: what it says may be a user's, or a message's, text."""
    return _SAID.match(said) or _RAISED.match(_raised(said) or said)


def _raised(said: str) -> str:
    """Of a Python traceback the line that says what was raised; empty where there is none. A second one may be quoted by the first."""
    before, _, traceback = said.partition(_TRACEBACK)
    condition = _CONDITION.search(before)
    if condition is not None and condition[0] != _OF_A_WORKER:
        return ""
    # The first that is not indented.
    return next((line.strip() for line in traceback.splitlines()[1:] if line[:1].strip()), "")
