"""The pipelines on a Spark cluster: a standalone master and two workers, each a process, from the installation of PySpark."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pyspark
import pytest

from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import Child, free_port
from tests.scenarios.bridge import START_TIMEOUT_S, Bridge, Reader, eventually
from tests.support.journal import text_message
from tests.support.spark_processes import FORKED
from tests.support.speed import SLOWNESS
from tests.support.system import descendants

HOST = "127.0.0.1"
SPARK_HOME = Path(pyspark.__path__[0])
JOINED = "Successfully registered with master"
#: A backlog of so many transactions is not carried between two looks of the test.
BATCH = 200
BACKLOG = 200 * BATCH
GROUPS = ("left", "right")
#: How long the groups of a worker that was killed may need to continue on the other worker, in seconds.
CONTINUED_S = 10.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Worker:
    """A worker with two cores on loopback."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def groups(self) -> set[str]:
        """Return the groups of diverts whose tasks this worker runs."""
        return {group for group in GROUPS if self.tasks(group)}

    def tasks(self, group: str) -> list[int]:
        """Return the Python workers of a group. The process that forks them is not one of them: it stays when they have ended."""
        daemons = [pid for pid, command in self._below().items() if FORKED in command and f"group:{group}" in _pool(pid)]
        return sorted(daemons)[1:]

    def kill_executor(self) -> None:
        """Kill the JVM that runs tasks, with kill -9."""
        pid = next(pid for pid, command in self._below().items() if "CoarseGrainedExecutorBackend" in command)
        os.kill(pid, signal.SIGKILL)

    def _below(self) -> dict[int, str]:
        return descendants(self.child.pid) if self.child.pid is not None else {}


def _pool(pid: int) -> str:
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((each.decode() for each in variables if each.startswith(b"BASCULE_PIPELINE=")), "")
    return ""


class Cluster:
    """A master and two workers with two cores each on loopback."""

    def __init__(self, directory: Path) -> None:
        self.master = f"spark://{HOST}:{free_port()}"
        self.workers: list[Worker] = []
        self._env = {"SPARK_HOME": str(SPARK_HOME), "JAVA_HOME": str(find_jdk().home), "SPARK_LOCAL_IP": HOST, "SPARK_NO_DAEMONIZE": "1"}
        self._directory = directory

    def start(self, opened: ExitStack) -> None:
        """Return when the workers have joined the master."""
        port = self.master.rpartition(":")[2]
        self._run(opened, "master", "master", "--host", HOST, "--port", port, "--webui-port", "0", ready="I have been elected leader")
        for name in ("worker-1", "worker-2"):
            options = ("--host", HOST, "--cores", "2", "--memory", "1g", "--webui-port", "0", "--work-dir", str(self._directory / name))
            self.workers.append(Worker(self._run(opened, name, "worker", *options, self.master, ready=JOINED)))

    def restart(self, worker: Worker) -> None:
        """Start a worker that was killed. Return when it has joined."""
        log = worker.child.log_file
        before = log.read_text(errors="replace").count(JOINED)
        worker.child.start()
        worker.child.wait_ready(lambda: log.read_text(errors="replace").count(JOINED) > before, START_TIMEOUT_S * SLOWNESS)

    def spread(self) -> tuple[Worker, Worker]:
        """Return the workers once each runs one group. Spark places tasks at random: as long as it chooses one worker, a task is killed."""
        first, second = self.workers

        def placed() -> bool:
            return first.groups() | second.groups() == set(GROUPS)

        while True:
            eventually(placed, "both groups run")
            if first.groups() and second.groups():
                return first, second
            crowded = first if first.groups() else second
            for pid in crowded.tasks(GROUPS[0]):
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: not placed(), "the driver notices the death of the task")

    def _run(self, opened: ExitStack, name: str, part: str, *arguments: str, ready: str) -> Child:
        log = self._directory / f"{name}.log"
        main = f"org.apache.spark.deploy.{part}.{part.capitalize()}"
        child = Child([SPARK_HOME / "bin" / "spark-class", main, *arguments], log_file=log, env=self._env, name=f"Spark {name}")
        child.start()
        opened.callback(child.stop, 60)
        child.wait_ready(lambda: ready in log.read_text(errors="replace"), START_TIMEOUT_S * SLOWNESS)
        return child


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    with ExitStack() as opened:
        cluster.start(opened)
        yield cluster


@pytest.fixture
def bridge(kafka: EmbeddedKafka, cluster: Cluster, topic_prefix: str, tmp_path: Path) -> Iterator[Bridge]:
    bridge = Bridge(kafka, topic_prefix, tmp_path)
    configure(bridge, cluster)
    bridge.journal.start_epoch()
    yield bridge
    bridge.child.stop(60)


def configure(bridge: Bridge, cluster: Cluster, spark: str = "") -> None:
    diverts = "".join(
        f"""
[[divert]]
name = "{group}"
from = "flights"
to = "{bridge.prefix}.{group}"
group = "{group}"
start = "earliest"
"""
        for group in GROUPS
    )
    bridge.configure(
        f"""
transaction_records = {BATCH}
[pipelines.spark]
"spark.driver.host" = "{HOST}"
"spark.driver.bindAddress" = "{HOST}"
"spark.executor.memory" = "512m"
{spark}
{diverts}
""",
        master=cluster.master,
    )


@pytest.fixture
def targets(bridge: Bridge) -> Iterator[dict[str, Reader]]:
    """The readers of the topics, by group."""
    readers = {group: bridge.reader(f"{bridge.prefix}.{group}") for group in GROUPS}
    yield readers
    for reader in readers.values():
        reader.close()


def send(bridge: Bridge, start: int, end: int) -> None:
    for number in range(start, end):
        bridge.journal.send(text_message(str(number)))
    bridge.journal.flush()


def check(targets: dict[str, Reader], count: int) -> None:
    """Check that each group has carried the first messages once and in order."""
    for target in targets.values():
        assert [int(value) for value in target.wait_for(count)] == list(range(count))
        target.poll()
        assert len(target.seen) == count


def test_groups_run_on_a_spark_cluster_and_resume_after_driver_kill(bridge: Bridge, targets: dict[str, Reader], tmp_path: Path) -> None:
    send(bridge, 0, 1000)
    bridge.start()
    check(targets, 1000)
    for name in ("worker-1", "worker-2"):
        assert list((tmp_path / name).glob("app-*/*/stderr")), f"no executor has run on {name}"
    # Driver and executors die, the cluster stays.
    bridge.child.kill()
    send(bridge, 1000, 2000)
    bridge.start()
    check(targets, 2000)


def test_groups_of_a_killed_worker_continue_on_the_other_worker(bridge: Bridge, cluster: Cluster, targets: dict[str, Reader]) -> None:
    bridge.start()
    driver = bridge.child.pid
    send(bridge, 0, BATCH)
    check(targets, BATCH)
    killed, left = cluster.spread()
    killed.child.kill()
    began = time.monotonic()
    send(bridge, BATCH, 2 * BATCH)
    for target in targets.values():
        target.wait_for(2 * BATCH)
    assert time.monotonic() - began < CONTINUED_S * SLOWNESS
    assert left.groups() == set(GROUPS)
    cluster.restart(killed)
    send(bridge, 2 * BATCH, 3 * BATCH)
    check(targets, 3 * BATCH)
    assert bridge.child.pid == driver


def test_executor_and_worker_kills_during_a_backlog_lose_and_double_no_record(
    bridge: Bridge, cluster: Cluster, targets: dict[str, Reader]
) -> None:
    send(bridge, 0, BACKLOG)
    bridge.start()
    driver = bridge.child.pid
    first, second = cluster.workers
    for kill in (first.kill_executor, second.child.kill):
        carried = targets[GROUPS[0]]
        assert len(carried.wait_for(len(carried.seen) + BATCH)) < BACKLOG - BATCH, "nothing is left to carry"
        kill()
    check(targets, BACKLOG)
    assert bridge.child.pid == driver


def test_driver_reports_task_for_which_the_cluster_has_no_slot(bridge: Bridge, cluster: Cluster, targets: dict[str, Reader]) -> None:
    configure(bridge, cluster, '"spark.cores.max" = 1')
    send(bridge, 0, 10)
    bridge.start()
    eventually(lambda: "tasks wait for a slot of Spark" in bridge.said(), "the report")
    (line,) = (line for line in bridge.said().splitlines() if "tasks wait for a slot" in line)
    assert "pipeline=group:right waiting=1 tasks=1" in line
    assert [int(value) for value in targets["left"].wait_for(10)] == list(range(10))
    targets["right"].poll()
    assert targets["right"].seen == []
