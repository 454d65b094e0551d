"""The pipelines process on a journal that the test writes, and readers of its output."""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from confluent_kafka import Message

from bascule.embedded.jars import classpath
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.pipelines.class_archive import java_options
from tests.support.journal import SyntheticJournal
from tests.support.preloaded import PreloadedChild
from tests.support.spark_processes import daemons, jvms, workers
from tests.support.speed import SLOWNESS
from tests.support.system import SELDOM
from tests.support.usage import memory_mib

START_TIMEOUT_S = 180.0
#: Time for all batches in progress. Each failure in them costs Spark a worker, which takes more than a minute on a busy machine.
ARRIVAL_TIMEOUT_S = 420.0


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = ARRIVAL_TIMEOUT_S) -> None:
    timeout_s *= SLOWNESS
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)


def await_end(pids: Iterable[int]) -> None:
    """Return when none of these processes is active: Spark ends some time after its driver, and writes until then."""

    def there(pid: int) -> bool:
        with suppress(OSError):
            return memory_mib(pid) > 0
        return False

    left = list(pids)
    eventually(lambda: not any(map(there, left)), f"the processes {left} to end")


def quick_start() -> dict[str, str]:
    """Return variables with which a Spark job of a user starts as a driver does: with the archive of Spark's classes, and few polls."""
    jars = os.pathsep.join(map(str, classpath("spark-kafka")))  # the class path of the archive
    options = ["--driver-class-path", jars, "--driver-java-options", java_options()]
    for name, value in json.loads(SELDOM).items():
        options += ["--conf", f"{name}={value}"]
    return {"PYSPARK_SUBMIT_ARGS": shlex.join([*options, "pyspark-shell"])}


class Bridge:
    """A Kafka, a journal that the test writes, and the pipelines process."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str, directory: Path, *, servers: str | None = None) -> None:
        """``servers`` is the address at which the pipelines reach Kafka, if not directly."""
        self.servers, self.prefix, self.directory = kafka.bootstrap, prefix, directory
        self.topics = Topics({"bootstrap.servers": kafka.bootstrap})
        self.topics.create(f"{prefix}.journal", 1, {})
        self.journal = SyntheticJournal(kafka.bootstrap, f"{prefix}.journal")
        self.log = directory / "pipelines.log"
        config = directory / "bascule.toml"
        self.config = config
        self.child = PreloadedChild(
            "pipelines", "--config", str(config),
            log_file=self.log,
            env={
                "BASCULE_KAFKA__BOOTSTRAP_SERVERS": servers or self.servers,
                "BASCULE_PIPELINES__SPARK": SELDOM,
                "PYTHONPATH": os.pathsep.join((*sys.path, str(directory))),
            },
        )  # fmt: skip

    def configure(self, text: str, master: str = "local[2]") -> None:
        head = f'[bridge]\nid = "{self.prefix}"\n[journal]\nprefix = "{self.prefix}"\n[pipelines]\nmaster = "{master}"\n'
        self.config.write_text(head + text)

    def start(self) -> None:
        before = self.said().count("ready pipelines=")
        self.child.start()
        self.child.wait_ready(lambda: self.said().count("ready pipelines=") > before, START_TIMEOUT_S * SLOWNESS)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def daemons(self) -> list[int]:
        """Process ids of the processes from which Spark forks Python workers."""
        return daemons(self._driver())

    def workers(self) -> list[int]:
        """Process ids of the Python workers that Spark has forked."""
        return workers(self._driver())

    def jvms(self) -> list[int]:
        """Process id of Spark itself, if it was started."""
        return jvms(self._driver())

    def jvm(self) -> int:
        """Process id of Spark itself."""
        return self.jvms()[0]

    def _driver(self) -> int:
        assert self.child.pid is not None
        return self.child.pid

    def reader(self, *topics: str, committed: bool = True) -> Reader:
        return Reader(self.servers, topics, committed=committed)


class Reader:
    """The committed records, or all records, that a reader of some topics has received."""

    def __init__(self, servers: str, topics: tuple[str, ...], *, committed: bool = True) -> None:
        isolation = "read_committed" if committed else "read_uncommitted"
        self._consumer = clients.consumer(
            {"bootstrap.servers": servers, "group.id": f"reader-{random.random()}", "auto.offset.reset": "earliest",
             "isolation.level": isolation, "topic.metadata.refresh.interval.ms": 500, "allow.auto.create.topics": False}
        )  # fmt: skip
        self._consumer.subscribe(list(topics))
        self.seen: list[Message] = []

    def poll(self) -> None:
        self.seen += [message for message in self._consumer.consume(5000, 0.2) if message.error() is None]

    def values(self) -> list[str]:
        return [(message.value() or b"").decode(errors="replace") for message in self.seen]

    def wait_for(self, count: int, timeout_s: float = ARRIVAL_TIMEOUT_S) -> list[str]:
        def there() -> bool:
            self.poll()
            return len(self.seen) >= count

        eventually(there, f"{count} records", timeout_s)
        return self.values()

    def close(self) -> None:
        self._consumer.close()
