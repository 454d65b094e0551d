"""The Spark session of a driver: started in the background, awaited where it is needed, and watched for its end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from pyspark.sql import SparkSession

from bascule.core.errors import Scope, Unavailable
from bascule.threads.background import in_background


class SparkEnded(Unavailable):
    """Raised when Spark's JVM has ended. Its driver ends too: the next one starts Spark again."""

    scope = Scope.PROCESS


class StartingSpark:
    """The session of one driver. Use it from one thread."""

    def __init__(self, make: Callable[[], SparkSession]) -> None:
        """``make`` starts Spark and returns its session. It runs in another thread: in the main thread, Spark replaces a signal handler."""
        self._make = make
        self._made: Future[SparkSession] | None = None

    @property
    def started(self) -> bool:
        """Return True if Spark was started. It may not be ready yet."""
        return self._made is not None

    def start(self) -> None:
        """Start Spark in the background unless it was started."""
        if self._made is None:
            self._made = in_background(self._make, "spark-start")

    def session(self) -> SparkSession:
        """Return the session as soon as Spark is ready. Raises NoJdk, and Unavailable if Spark was not started."""
        if self._made is None:
            raise Unavailable("the driver has no Spark session: the driver is not started, or has ended")
        return self._made.result()

    def check(self) -> None:
        """Raise SparkEnded if Spark's JVM has ended."""
        code = self._exit_code()
        if code is not None:
            raise SparkEnded(f"Spark's JVM ended with {code}; its messages are in the log of the pipelines")

    @property
    def has_ended(self) -> bool:
        """Return True if Spark's JVM has ended by itself."""
        return self._exit_code() is not None

    def stop(self) -> None:
        """Stop Spark, if it was started."""
        if self._made is not None:
            self._made.result().stop()

    def _exit_code(self) -> int | None:
        if self._made is None or not self._made.done() or self._made.exception() is not None:
            return None
        process = getattr(self._made.result().sparkContext._gateway, "proc", None)  # None if somebody else has started the JVM
        return None if process is None else process.poll()
