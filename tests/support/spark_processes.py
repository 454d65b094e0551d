"""The processes below a driver of pipelines: Spark's JVM, the daemons that fork Python workers, and the workers."""

from __future__ import annotations

from tests.support.system import descendants, family

#: In the command line of a daemon and of the workers that it has forked. The JVM has the name of the module in its settings, too.
FORKED = "-m bascule.pipelines.worker_daemon "
JVM = "org.apache.spark.deploy.SparkSubmit"


def jvms(pid: int) -> list[int]:
    """Return Spark's JVM, if it was started."""
    return [below for below, command in descendants(pid).items() if JVM in command and FORKED not in command]


def daemons(pid: int) -> list[int]:
    """Return the processes that fork Python workers. A local Spark has one for all resident tasks."""
    parents = _forked(pid)
    return sorted(below for below, parent in parents.items() if parent not in parents)


def workers(pid: int) -> list[int]:
    """Return the Python workers without their daemons."""
    parents = _forked(pid)
    return sorted(below for below, parent in parents.items() if parent in parents)


def _forked(pid: int) -> dict[int, int]:
    """Return daemons and workers with their parents."""
    return {below: found.parent for below, found in family(pid).items() if FORKED in found.command}
