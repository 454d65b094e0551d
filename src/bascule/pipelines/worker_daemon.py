"""The process from which Spark forks Python workers (``spark.python.daemon.module``).

It has imported what a task needs, so that a worker that replaces a killed one need not, and all workers share the memory of the modules. A
fork copies the forking thread only, so these modules may start no thread. The exception is the one of Arrow's second allocator, which
handles forks and which nobody uses.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def quick_paths(paths: Sequence[str], spark_home: str | None) -> list[str]:
    """Return the import paths without the archives of Spark, if Spark is the package PySpark of this environment.

    Spark puts archives of its Python sources before all other paths. Each process compiles each module that it imports from them, which
    takes more than half of its start. The package has the same modules as files. Without ``spark_home``, or with the Spark of another
    installation, the paths stay as they are.
    """
    home = Path(spark_home).resolve() if spark_home else None
    if home is None or not any(Path(path, "pyspark").resolve() == home for path in paths):
        return list(paths)
    return [path for path in paths if not (Path(path).suffix in {".zip", ".jar"} and Path(path).resolve().is_relative_to(home))]


class PartitionCollector:
    """The garbage collector that PySpark's daemon calls in a worker after each partition, in place of the module ``gc``.

    When modules were imported since the last collection, it takes all that is left out of later ones: with Arrow and pandas, a collection
    takes more processor time than a small batch.
    """

    def __init__(self) -> None:
        self._modules = 0

    def collect(self) -> int:
        """Collect garbage. Return the number of objects found."""
        found = gc.collect()
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            gc.freeze()  # what is frozen and becomes garbage later stays in memory, so this is not done each time
        return found


if __name__ == "__main__":
    sys.path[:] = quick_paths(sys.path, os.environ.get("SPARK_HOME"))

import pyspark.daemon  # noqa: E402

import bascule.pipelines.jobs  # noqa: E402
import bascule.pipelines.tasks  # noqa: E402

if os.environ.get("BASCULE_PIPELINE") != bascule.pipelines.jobs.RESIDENT:
    import bascule.pipelines.arrow_rows

    with suppress(ImportError):
        import pandas  # noqa: F401 - otherwise each worker imports it: Arrow looks for it when it gets the first list of values

if __name__ == "__main__":
    gc.freeze()  # a worker of PySpark collects garbage after each partition: without the modules this takes 0.1 ms in place of 30
    vars(pyspark.daemon)["gc"] = PartitionCollector()
    pyspark.daemon.manager()
