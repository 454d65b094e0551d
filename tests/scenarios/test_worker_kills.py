"""Spark's Python workers, the daemons that fork them, and Spark's JVM are killed with kill -9, as they start and while they carry."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.pipelines.session import SparkEnded
from tests.scenarios.bridge import Bridge, await_end, eventually
from tests.support.journal import text_message

DIVERTS = """
[[divert]]
name = "first"
from = "flights"
to = "${prefix}.first"
start = "earliest"
[[divert]]
name = "second"
from = "flights"
to = "${prefix}.second"
group = "second"
start = "earliest"
"""
ENDED = "Spark's JVM"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[Bridge]:
    bridge = Bridge(kafka, topic_prefix, tmp_path)
    bridge.configure(DIVERTS.replace("${prefix}", topic_prefix))
    bridge.journal.start_epoch()
    yield bridge
    bridge.child.stop(60)


class Load:
    """Messages for two diverts in two groups, each of which has a worker of its own."""

    def __init__(self, bridge: Bridge) -> None:
        self._journal = bridge.journal
        self._readers = [bridge.reader(f"{bridge.prefix}.{name}") for name in ("first", "second")]
        self.sent = 0

    def send(self, count: int = 20) -> None:
        self._journal.send(*(text_message(str(self.sent + number)) for number in range(count)))
        self._journal.flush()
        self.sent += count

    def carried(self) -> None:
        """Return when all messages have arrived, and check that each has arrived once and in order."""
        expected = list(map(str, range(self.sent)))
        for reader in self._readers:
            assert reader.wait_for(self.sent) == expected

    def close(self) -> None:
        for reader in self._readers:
            reader.poll()
            assert len(reader.seen) == self.sent
            reader.close()


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # ended with another one that was killed
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("drivers", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(5400)])])
def test_pipelines_continue_after_kills_of_workers_and_daemons(bridge: Bridge, drivers: int) -> None:
    """Kill daemons, workers, and both; each as soon as one of them is there, and again while they carry messages."""
    load = Load(bridge)
    kinds: tuple[Callable[[], list[int]], ...] = (bridge.daemons, bridge.workers, lambda: bridge.daemons() + bridge.workers())
    for _ in range(drivers):  # each driver begins without the pauses that follow repeated failures
        load.send()
        bridge.start()
        seen: set[int] = set()
        for victims in kinds:
            for carrying in (False, True):
                if carrying:
                    load.carried()
                load.send()
                found: list[int] = []
                eventually(lambda found=found, victims=victims: bool(found.extend(victims()) or found), "a process to kill")  # type: ignore[misc]
                kill(found)
                seen.update(found)
                load.send()
        load.carried()
        assert bridge.child.running
        seen.update(bridge.daemons(), bridge.workers())
        bridge.child.stop(60)
        await_end(seen)
    load.close()


def test_driver_ends_when_its_jvm_is_killed_and_next_one_continues(bridge: Bridge) -> None:
    """Kill the JVM as soon as it is there, and again while it carries messages."""
    load = Load(bridge)
    load.send()
    bridge.child.start()
    jvm: list[int] = []
    eventually(lambda: bool(jvm.extend(bridge.jvms()) or jvm), "the JVM to start")
    kill(jvm)
    eventually(lambda: not bridge.child.running, "the driver to end")
    assert (bridge.child.returncode, bridge.said().count(ENDED)) == (SparkEnded.exit_code, 1)
    bridge.start()
    load.carried()
    workers = bridge.daemons() + bridge.workers()
    load.send()
    kill([bridge.jvm()])
    eventually(lambda: not bridge.child.running, "the driver to end")
    assert (bridge.child.returncode, bridge.said().count(ENDED)) == (SparkEnded.exit_code, 2)
    await_end(workers)
    bridge.start()
    load.carried()
    load.close()
