"""The pools of Spark's Python workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final

#: Worker processes with another value of this variable belong to another pool.
_VARIABLE: Final = "BASCULE_PIPELINE"

#: Returns a context in which Python functions get their workers from the pool of this name.
InPool = Callable[[str], AbstractContextManager[None]]


class WorkerPools:
    """Chooses the pool of workers for Python functions that are handed to Spark.

    A worker process belongs to one environment: a variable for each query with micro-batches lets it keep its own workers, with their
    prepared incarnations. Spark takes the environment when a function is handed over, and all threads of a driver share it.
    """

    def __init__(self, environment: Callable[[], MutableMapping[str, str]]) -> None:
        """``environment`` returns the environment of Spark's workers."""
        self._environment = environment
        self._lock = threading.RLock()

    @contextmanager
    def using(self, pool: str) -> Iterator[None]:
        """Use this pool until the block ends. Other threads that use a pool wait meanwhile; blocks of one thread may be nested."""
        with self._lock:
            environment = self._environment()
            before = environment.get(_VARIABLE)
            environment[_VARIABLE] = pool
            try:
                yield
            finally:
                if before is None:
                    del environment[_VARIABLE]
                else:
                    environment[_VARIABLE] = before
