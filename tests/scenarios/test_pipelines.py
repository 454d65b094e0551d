"""Diverts and ingresses with a real Kafka, a real Spark and a journal written by the test; drivers and workers die by kill -9."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Message

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import Child
from bascule.kafka.admin import Topics
from bascule.testing.journal import SyntheticJournal, text_message

START_TIMEOUT_S = 120.0
ARRIVAL_TIMEOUT_S = 90.0


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = ARRIVAL_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)


class Bridge:
    """A Kafka, a journal written by hand, and the pipelines process."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str, directory: Path) -> None:
        self.servers, self.prefix, self.directory = kafka.bootstrap, prefix, directory
        self.topics = Topics({"bootstrap.servers": kafka.bootstrap})
        self.topics.create(f"{prefix}.journal", 1, {})
        self.journal = SyntheticJournal(kafka.bootstrap, f"{prefix}.journal")
        self.log = directory / "pipelines.log"
        config = directory / "bascule.toml"
        self.config = config
        self.child = Child(
            [sys.executable, "-m", "bascule.cli", "pipelines", "--config", config],
            log_file=self.log,
            env={"BASCULE_KAFKA__BOOTSTRAP_SERVERS": self.servers},
            name="pipelines",
        )

    def configure(self, text: str) -> None:
        head = f'[bridge]\nid = "{self.prefix}"\n[journal]\nprefix = "{self.prefix}"\n[pipelines]\nmaster = "local[2]"\n'
        self.config.write_text(head + text)

    def start(self) -> None:
        before = self.said().count("ready pipelines=")
        self.child.start()
        self.child.wait_ready(lambda: self.said().count("ready pipelines=") > before, START_TIMEOUT_S)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def workers(self) -> list[int]:
        """Process ids of the Python workers that Spark has forked."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                command = (directory / "cmdline").read_bytes()
                environment = (directory / "environ").read_bytes()
            except OSError:
                continue
            if b"pyspark.daemon" in command and b"BASCULE_PIPELINE" in environment and self.servers.encode() in environment:
                found.append(int(directory.name))
        return found

    def reader(self, *topics: str) -> Reader:
        return Reader(self.servers, topics)


class Reader:
    """What a read_committed reader of some topics has seen."""

    def __init__(self, servers: str, topics: tuple[str, ...]) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": servers, "group.id": f"reader-{random.random()}", "auto.offset.reset": "earliest",
             "isolation.level": "read_committed", "topic.metadata.refresh.interval.ms": 500, "allow.auto.create.topics": False}
        )  # fmt: skip
        self._consumer.subscribe(list(topics))
        self.seen: list[Message] = []

    def poll(self) -> None:
        self.seen += [message for message in self._consumer.consume(5000, 0.2) if message.error() is None]

    def values(self) -> list[str]:
        return [(message.value() or b"").decode(errors="replace") for message in self.seen]

    def wait_for(self, count: int) -> list[str]:
        def there() -> bool:
            self.poll()
            return len(self.seen) >= count

        eventually(there, f"{count} records")
        return self.values()

    def close(self) -> None:
        self._consumer.close()


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[Bridge]:
    bridge = Bridge(kafka, topic_prefix, tmp_path)
    yield bridge
    bridge.child.stop(60)


def test_each_message_arrives_exactly_once_though_driver_and_workers_are_killed(bridge: Bridge) -> None:
    bridge.configure("""
[[divert]]
name = "all"
from = "flights"
to = "${address}.all"
start = "earliest"
[[divert]]
name = "late"
from = "flights"
selector = "delay > 5"
to = "${address}.late"
key = "property:carrier"
start = "earliest"
""".replace("${address}", f"{bridge.prefix}.${{address}}"))
    journal = bridge.journal
    journal.start_epoch()
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for _ in range(count):
            batch = [text_message(str(sent + i), properties={"delay": (sent + i) % 10, "carrier": "AA"}) for i in range(1 + sent % 3)]
            journal.send(*batch)
            sent += len(batch)
            journal.acknowledge()
        journal.flush()

    send(2000)
    bridge.start()
    everything, late = bridge.reader(f"{bridge.prefix}.flights.all"), bridge.reader(f"{bridge.prefix}.flights.late")
    for round_number in range(4):
        send(500)
        everything.wait_for(sent - 400)
        if round_number % 2:
            for pid in bridge.workers():
                os.kill(pid, signal.SIGKILL)
        else:
            bridge.child.kill()
            bridge.start()
    send(100)
    assert [int(value) for value in everything.wait_for(sent)] == list(range(sent))
    expected_late = [n for n in range(sent) if n % 10 > 5]
    assert [int(value) for value in late.wait_for(len(expected_late))] == expected_late
    everything.poll()
    assert len(everything.seen) == sent
    everything.close()
    late.close()
