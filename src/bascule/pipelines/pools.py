"""The pools of Spark's Python workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from pyspark import SparkContext

#: Worker processes with another value of this variable belong to another pool.
_VARIABLE: Final = "BASCULE_PIPELINE"

#: Returns a context in which Python functions get their workers from the pool of this name.
InPool = Callable[[str], AbstractContextManager[None]]


class PooledEnvironment(MutableMapping[str, str]):
    """The environment of Spark's workers, in which each thread sees the variable of the pool that it uses."""

    def __init__(self, shared: Mapping[str, str]) -> None:
        self._shared = dict(shared)
        self._of_thread = threading.local()

    @property
    def pool(self) -> str | None:
        """Return the pool of this thread."""
        return getattr(self._of_thread, "pool", None)

    @pool.setter
    def pool(self, pool: str | None) -> None:
        self._of_thread.pool = pool

    def _seen(self) -> dict[str, str]:
        return self._shared if self.pool is None else {**self._shared, _VARIABLE: self.pool}

    def __getitem__(self, name: str) -> str:
        """Return a variable."""
        return self._seen()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._seen())

    def __len__(self) -> int:
        """Return the number of variables."""
        return len(self._seen())

    def __setitem__(self, name: str, value: str) -> None:
        """Set a variable for all threads."""
        self._shared[name] = value

    def __delitem__(self, name: str) -> None:
        """Remove a variable for all threads."""
        del self._shared[name]


class WorkerPools:
    """Chooses the pool of workers for Python functions that are handed to Spark.

    A worker process belongs to one environment: a variable for each query with micro-batches lets it keep its own workers, with their
    prepared incarnations. Spark takes the environment when a function is handed over.
    """

    def __init__(self, context: Callable[[], SparkContext]) -> None:
        self._context = context
        self._lock = threading.Lock()

    @contextmanager
    def using(self, pool: str) -> Iterator[None]:
        """Use this pool in this thread until the block ends. Blocks may be nested."""
        environment = self._environment()
        before, environment.pool = environment.pool, pool
        try:
            yield
        finally:
            environment.pool = before

    def _environment(self) -> PooledEnvironment:
        context = self._context()
        with self._lock:
            found: object = context.environment
            if isinstance(found, PooledEnvironment):
                return found
            pooled = PooledEnvironment(context.environment)
            context.environment = cast("dict[str, str]", pooled)  # Spark reads it as a mapping
            return pooled
