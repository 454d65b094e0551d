"""The processes below a driver of pipelines: Spark's JVM, the daemons that fork Python workers, and the workers."""

from __future__ import annotations

from tests.support.system import descendants

#: In the command line of a daemon and of the workers that it has forked. The JVM has the name of the module in its settings, too.
FORKED = "-m bascule.pipelines.worker_daemon "
JVM = "org.apache.spark.deploy.SparkSubmit"


def jvms(pid: int) -> list[int]:
    """Return Spark's JVM, if it was started."""
    return [below for below, command in descendants(pid).items() if JVM in command and FORKED not in command]


def daemons(pid: int) -> list[int]:
    """Return the processes that fork Python workers. A local Spark has one for all resident tasks."""
    found = _forked(pid)
    return sorted(found - _below(found))


def workers(pid: int) -> list[int]:
    """Return the Python workers without their daemons."""
    found = _forked(pid)
    return sorted(found & _below(found))


def _forked(pid: int) -> set[int]:
    return {below for below, command in descendants(pid).items() if FORKED in command}


def _below(pids: set[int]) -> set[int]:
    return {below for pid in pids for below in descendants(pid)}
