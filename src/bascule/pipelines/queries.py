"""One streaming query, kept running: started at its positions, restarted after a failure, stopped if a restart cannot help."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.core.log import get_log
from bascule.pipelines.failures import described, error_from_spark
from bascule.pipelines.jobs import Running, Startable
from bascule.pipelines.planning import StillPlanning
from bascule.threads.background import in_background
from bascule.writer.position import PositionTaken

log = get_log(__name__)

#: Pause before the second restart, in seconds. It doubles with each failure. The first restart has no pause.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
#: A query that ran at least this time, in seconds, before it failed restarts at once.
STEADY_S = 20.0
#: How long the driver waits for the end of a query that it stops, in seconds. Meanwhile it looks after no other pipeline.
STOP_WAIT_S = 1.0
#: After this time, in seconds, the next run of a query starts although the last one has not ended. The last one can write nothing more:
#: the next owner of its positions fences it.
ENDING_S = 20.0


class MicroBatches:
    """A streaming query of Spark that was started."""

    def __init__(
        self, writer: DataStreamWriter, name: str, checkpoint: str, interval_ms: int, on_stop: Callable[[], None] = lambda: None
    ) -> None:
        """Start the query. ``on_stop`` is called before the query is stopped."""
        self._on_stop = on_stop
        trigger = f"{interval_ms} milliseconds"
        self._query: StreamingQuery = (
            writer.queryName(name).trigger(processingTime=trigger).option("checkpointLocation", checkpoint).start()
        )

    @property
    def job_group(self) -> str:
        """Return the id of this run, which Spark uses as the group of its jobs."""
        return str(self._query.runId)

    @property
    def active(self) -> bool:
        """Return True until the query has ended."""
        return self._query.isActive

    def failure(self) -> BaseException | None:
        """Return the error of the query."""
        return self._query.exception()

    def stop(self) -> None:
        """Stop the query. Blocks until Spark has ended it."""
        self._on_stop()
        self._query.stop()


class PipelineStopped(BasculeError):
    """Raised when a pipeline cannot continue. The text says why and what to do."""

    retriable = False
    scope = Scope.PROCESS


@dataclass(slots=True)
class Query:
    """A pipeline as Spark runs it.

    ``build`` takes over its positions and returns what starts the query, or None if there is nothing to do until ``restart``. While it
    raises StillPlanning, the query is not started, and nothing has failed.
    ``last_error`` is the last failure, at the time ``last_error_s`` of the wall clock.
    """

    name: str
    build: Callable[[], Startable | None]
    checkpoints: Path
    running: Running | None = None
    failure: BasculeError | None = None
    restarts: int = 0
    last_error: str = ""
    last_error_s: float = 0.0
    _attempts: int = 0
    _ending: Future[None] | None = None
    _ending_until_s: float = 0.0
    _prepared: Startable | None = None
    _planned: Callable[[], bool] | None = None
    _pause_s: float = 0.0
    _due_s: float = 0.0
    _since_s: float = field(default_factory=time.monotonic)

    def prepare(self) -> None:
        """Take over the positions, for a start by ``check`` when Spark is ready. An error counts as a failure of the query."""
        try:
            self._prepared = self.build()
            if self._prepared is None:
                self._due_s = math.inf
        except StillPlanning as error:
            self._planned = error.over
        except (BasculeError, PySparkException) as error:
            self._failed(error)

    def start(self) -> None:
        """Start the query at its positions. An error counts as a failure of the query.

        A query whose last run has not ended is started by ``check`` later.
        """
        self._planned = None
        if not self.has_ended():
            return
        try:
            start, self._prepared = self._prepared or self.build(), None
            if start is None:
                self._due_s = math.inf
                return
            self._attempts += 1
            # The position decides where to start, never a checkpoint: each start gets a new one.
            self._drop_checkpoint(self._attempts - 1)
            self.running = start(f"{self.name}-{self._attempts}", str(self._checkpoint(self._attempts)))
            self._since_s = time.monotonic()
        except StillPlanning as error:
            self._planned = error.over
        except (BasculeError, PySparkException) as error:
            self._failed(error)

    def check(self) -> None:
        """Restart the query if it has failed and its pause is over. Call this often."""
        if not self.has_ended() or self.stopped is not None:
            return
        if self.running is not None and not self.running.active:
            error = self.running.failure()
            self.running = None
            if time.monotonic() - self._since_s > STEADY_S:
                self._pause_s = 0.0
            self._failed(error or Unavailable("the query ended without a reason"))
        if self._planned is not None and not self._planned():
            return
        if self.running is None and self.stopped is None and time.monotonic() >= self._due_s:
            self.start()

    @property
    def stopped(self) -> str | None:
        """Return the name and text of the error that no restart can mend, or None."""
        return None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}".splitlines()[0]

    @property
    def idle(self) -> bool:
        """Return True if there is nothing to do until ``restart``."""
        return self.running is None and self.stopped is None and self._due_s == math.inf

    @property
    def superseded(self) -> bool:
        """Return True if the query has stopped because another driver has taken its position."""
        return isinstance(self.failure, PositionTaken)

    def stop(self, wait_s: float | None = None) -> None:
        """Stop the query. The next owner of the position aborts a transaction that is open.

        Wait for the end of the query, at most ``wait_s`` seconds (default: STOP_WAIT_S). After this time it ends in the background.
        """
        if self.running is not None:
            running, self.running = self.running, None
            self._ending, self._ending_until_s = in_background(running.stop, f"{self.name}-stop"), time.monotonic() + ENDING_S
            self.has_ended(STOP_WAIT_S if wait_s is None else wait_s)
        self._drop_checkpoint(self._attempts)

    def has_ended(self, wait_s: float = 0.0) -> bool:
        """Return whether the run that was stopped has ended, or was stopped ENDING_S ago. Wait for its end, at most ``wait_s`` seconds.

        Raises the error of a call to Spark.
        """
        ending = self._ending
        if ending is None:
            return True
        with suppress(TimeoutError):
            ending.exception(max(0.0, min(wait_s, self._ending_until_s - time.monotonic())))
        if not ending.done() and time.monotonic() < self._ending_until_s:
            return False
        self._ending = None
        if ending.done():
            ending.result()
        else:
            log.warning("task of pipeline has not ended", pipeline=self.name, waited_s=ENDING_S)
        return True

    @property
    def ending(self) -> bool:
        """Return True if a run was stopped whose end ``check`` has not seen."""
        return self._ending is not None

    def restart(self) -> None:
        """Stop the query and start it at once, unless it has stopped for good."""
        self.stop()
        if self.stopped is None:
            self._due_s = 0.0
            self.start()

    def retry(self) -> None:
        """Start the query at once, also after an error that no restart could mend, unless another driver has taken its position."""
        if not self.superseded:
            self.failure, self._pause_s = None, FIRST_PAUSE_S
            self.restart()

    def _failed(self, failure: BaseException) -> None:
        self.restarts += 1
        error = error_from_spark(failure)
        self.last_error, self.last_error_s = described(failure), time.time()
        if error is not None and not error.retriable:
            self.failure = error
            log.error("pipeline stopped", pipeline=self.name, reason=self.stopped)
            return
        self._due_s = time.monotonic() + self._pause_s
        log.warning("pipeline failed, restarting", pipeline=self.name, pause_s=self._pause_s, error=described(failure))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S

    def _checkpoint(self, attempt: int) -> Path:
        return self.checkpoints / f"{self.name}-{attempt}"

    def _drop_checkpoint(self, attempt: int) -> None:
        shutil.rmtree(self._checkpoint(attempt), ignore_errors=True)


class RestartCounts:
    """The failures of the tasks of pipelines since the driver began. A pipeline keeps its count when another task carries it."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        #: The queries at the last look, by name: another query may have taken the name.
        self._seen: dict[str, tuple[Query, int]] = {}

    def look(self, tasks: Mapping[str, str], queries: Mapping[str, Query]) -> dict[str, int]:
        """Return the counts by pipeline. ``tasks`` has the names of the queries that carry the pipelines now."""
        for pipeline, task in tasks.items():
            count = self._counts.setdefault(pipeline, 0)
            if (query := queries.get(task)) is not None:
                known, before = self._seen.get(task, (query, 0))
                self._counts[pipeline] = count + query.restarts - (before if known is query else 0)
        self._seen = {name: (query, query.restarts) for name, query in queries.items()}
        return dict(self._counts)
