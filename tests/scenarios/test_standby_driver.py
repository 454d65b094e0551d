"""Two drivers of one bridge: one runs the pipelines, the other stands by and takes over when the first one ends."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import free_port
from tests.scenarios.bridge import START_TIMEOUT_S, Bridge
from tests.support.system import wait_for

#: It continues the table [pipelines].
CONFIG = """
metrics_port = {port}

[[divert]]
name = "orders"
from = "orders"
"""


@pytest.mark.slow
def test_second_driver_stands_by_and_takes_over_when_the_first_is_killed(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    first, second = (Bridge(kafka, topic_prefix, tmp_path / name) for name in ("first", "second"))
    first.journal.start_epoch()
    ports = {first: free_port(), second: free_port()}
    for bridge, port in ports.items():
        bridge.directory.mkdir()
        bridge.configure(CONFIG.format(port=port))

    def active(bridge: Bridge) -> float:
        """Return the metric of a driver that lives."""
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[bridge]}/metrics", timeout=30) as answer:
            (line,) = (each for each in answer.read().decode().splitlines() if each.startswith("bascule_pipelines_active "))
        return float(line.split()[1])

    try:
        first.start()
        second.child.start()
        wait_for(lambda: "standby pipelines=1" in second.said(), "the second driver to stand by", START_TIMEOUT_S)
        assert "another driver" not in first.said()
        wait_for(lambda: active(first) == 1, "the first driver to measure itself")
        assert active(second) == 0
        first.child.kill()
        wait_for(lambda: "ready pipelines=1" in second.said(), "the second driver to take over", START_TIMEOUT_S)
        wait_for(lambda: active(second) == 1, "the second driver to measure itself")
        first.child.start()
        wait_for(lambda: "standby pipelines=1" in first.said(), "the first driver to stand by", START_TIMEOUT_S)
        assert second.child.pid is not None, "the second driver has stopped for the first one"
    finally:
        for bridge in (first, second):
            bridge.child.stop(30)
