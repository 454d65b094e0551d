"""The process from which Spark forks Python workers (``spark.python.daemon.module``).

It has imported what a task needs, so that a worker that replaces a killed one need not, and all workers share the memory of the modules. A
fork copies the forking thread only, so these modules may start no thread. The exception is the one of Arrow's second allocator, which
handles forks and which nobody uses.
"""

from __future__ import annotations

from pyspark.daemon import manager

import bascule.pipelines.jobs
import bascule.pipelines.tasks  # noqa: F401

if __name__ == "__main__":
    manager()
