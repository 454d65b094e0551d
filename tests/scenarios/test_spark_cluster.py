"""The pipelines on a Spark cluster: a standalone master and a worker, each a process, from the installation of PySpark."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pyspark
import pytest

from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import Child, free_port
from tests.scenarios.bridge import START_TIMEOUT_S, Bridge
from tests.support.journal import text_message
from tests.support.speed import SLOWNESS
from tests.support.system import descendants

HOST = "127.0.0.1"
SPARK_HOME = Path(pyspark.__path__[0])
JOINED = "Successfully registered with master"
#: A backlog of so many transactions is not carried between two looks of the test.
BATCH = 200
BACKLOG = 30 * BATCH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Cluster:
    """A master and one worker with two cores on loopback."""

    def __init__(self, directory: Path) -> None:
        self.master = f"spark://{HOST}:{free_port()}"
        self._worker: Child
        self._env = {"SPARK_HOME": str(SPARK_HOME), "JAVA_HOME": str(find_jdk().home), "SPARK_LOCAL_IP": HOST, "SPARK_NO_DAEMONIZE": "1"}
        self._directory = directory

    def start(self, opened: ExitStack) -> None:
        """Return when the worker has joined the master."""
        port = self.master.rpartition(":")[2]
        self._run(opened, "master", "--host", HOST, "--port", port, "--webui-port", "0", ready="I have been elected leader")
        options = ("--host", HOST, "--cores", "2", "--memory", "1g", "--webui-port", "0", "--work-dir", str(self._directory / "work"))
        self._worker = self._run(opened, "worker", *options, self.master, ready=JOINED)

    def kill_executor(self) -> None:
        """Kill a JVM that runs tasks, with kill -9."""
        assert self._worker.pid is not None
        pid = next(pid for pid, command in descendants(self._worker.pid).items() if "CoarseGrainedExecutorBackend" in command)
        os.kill(pid, signal.SIGKILL)

    def restart_worker(self) -> None:
        """Kill the worker with kill -9, which ends its executors. Return when another worker has joined."""
        log = self._worker.log_file
        before = log.read_text(errors="replace").count(JOINED)
        self._worker.kill()
        self._worker.start()
        self._worker.wait_ready(lambda: log.read_text(errors="replace").count(JOINED) > before, START_TIMEOUT_S * SLOWNESS)

    def _run(self, opened: ExitStack, part: str, *arguments: str, ready: str) -> Child:
        log = self._directory / f"{part}.log"
        main = f"org.apache.spark.deploy.{part}.{part.capitalize()}"
        child = Child([SPARK_HOME / "bin" / "spark-class", main, *arguments], log_file=log, env=self._env, name=f"Spark {part}")
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
    bridge.configure(
        f"""
transaction_records = {BATCH}
[pipelines.spark]
"spark.driver.host" = "{HOST}"
"spark.driver.bindAddress" = "{HOST}"
"spark.executor.memory" = "512m"
[[divert]]
name = "all"
from = "flights"
to = "{bridge.prefix}.flights"
start = "earliest"
""",
        master=cluster.master,
    )
    bridge.journal.start_epoch()
    yield bridge
    bridge.child.stop(60)


def send(bridge: Bridge, start: int, end: int) -> None:
    for number in range(start, end):
        bridge.journal.send(text_message(str(number)))
    bridge.journal.flush()


def test_divert_runs_on_a_spark_cluster_and_resumes_after_driver_kill(bridge: Bridge, tmp_path: Path) -> None:
    send(bridge, 0, 1000)
    with closing(bridge.reader(f"{bridge.prefix}.flights")) as target:
        bridge.start()
        assert [int(value) for value in target.wait_for(1000)] == list(range(1000))
        assert list((tmp_path / "work").glob("app-*/0/stderr")), f"no executor has run on the cluster: {os.listdir(tmp_path / 'work')}"
        # Driver and executors die, the cluster stays.
        bridge.child.kill()
        send(bridge, 1000, 2000)
        bridge.start()
        assert [int(value) for value in target.wait_for(2000)] == list(range(2000))


def test_executor_and_worker_kills_during_a_backlog_lose_and_double_no_record(bridge: Bridge, cluster: Cluster) -> None:
    send(bridge, 0, BACKLOG)
    with closing(bridge.reader(f"{bridge.prefix}.flights")) as target:
        bridge.start()
        driver = bridge.child.pid
        for kill in (cluster.kill_executor, cluster.restart_worker):
            before = len(target.wait_for(len(target.seen) + BATCH))
            assert before < BACKLOG - BATCH, "nothing is left to carry"
            kill()
        assert [int(value) for value in target.wait_for(BACKLOG)] == list(range(BACKLOG))
        target.poll()
        assert len(target.seen) == BACKLOG
        assert bridge.child.pid == driver
