"""Spark of a driver: started in the background, awaited where it is needed, and watched for its end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError

from bascule.core.errors import Scope, Unavailable
from bascule.threads.background import in_background

#: How long a JVM that does not answer any more may take to end, in seconds. The system frees the memory of a killed process first.
END_S: Final = 5.0


class SparkEnded(Unavailable):
    """Raised when Spark's JVM has ended. Its driver ends too: the next one starts Spark again."""

    scope = Scope.PROCESS


class StartingSpark:
    """Spark of one driver. Use it from one thread."""

    def __init__(self, make: Callable[[], SparkContext]) -> None:
        """``make`` starts Spark and returns its context. It runs in another thread: in the main thread, Spark replaces a signal handler."""
        self._make = make
        self._made: Future[SparkContext] | None = None

    @property
    def started(self) -> bool:
        """Return True if Spark was started. It may not be ready yet."""
        return self._made is not None

    def start(self) -> None:
        """Start Spark in the background unless it was started."""
        if self._made is None:
            self._made = in_background(self._make, "spark-start")

    def context(self) -> SparkContext:
        """Return the context as soon as Spark is ready. Raises NoJdk, SparkEnded, and Unavailable if Spark was not started."""
        if self._made is None:
            raise Unavailable("the driver has no Spark context: the driver is not started, or has ended")
        try:
            return self._made.result()
        except PySparkRuntimeError as error:  # the JVM ended before it could be reached
            raise SparkEnded(f"Spark's JVM did not start: {error}") from error

    def check(self) -> None:
        """Raise SparkEnded if Spark's JVM has ended."""
        if self.has_ended:
            raise self._ended()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise SparkEnded in place of the error of a call to a JVM that has ended."""
        try:
            yield
        except Py4JError as error:
            process = self._process()
            with suppress(subprocess.TimeoutExpired):
                if process is not None:
                    process.wait(END_S)
            if self.has_ended:
                raise self._ended() from error
            raise

    @property
    def has_ended(self) -> bool:
        """Return True if Spark's JVM has ended by itself."""
        process = self._process()
        return process is not None and process.poll() is not None

    def stop(self) -> None:
        """Stop Spark, if it was started."""
        if self._made is not None and self._made.exception() is None:
            self._made.result().stop()

    def _ended(self) -> SparkEnded:
        process = self._process()
        code = None if process is None else process.poll()
        return SparkEnded(f"Spark's JVM ended with {code}; its messages are in the log of the pipelines")

    def _process(self) -> subprocess.Popen[bytes] | None:
        """Return the JVM. Return None before its start has ended, and if somebody else has started it."""
        if self._made is None or not self._made.done():
            return None
        # A JVM that ended during its start left no context, but its gateway.
        owner = SparkContext if self._made.exception() is not None else self._made.result()
        return getattr(owner._gateway, "proc", None)
