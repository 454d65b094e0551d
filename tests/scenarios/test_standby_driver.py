"""Two drivers of one bridge: one runs the pipelines, the other stands by and takes over when the first one ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.bridge import START_TIMEOUT_S, Bridge
from tests.support.system import wait_for

CONFIG = """
[[divert]]
name = "orders"
from = "orders"
"""


@pytest.mark.slow
def test_second_driver_stands_by_and_takes_over_when_the_first_is_killed(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    first, second = (Bridge(kafka, topic_prefix, tmp_path / name) for name in ("first", "second"))
    first.journal.start_epoch()
    for bridge in (first, second):
        bridge.directory.mkdir()
        bridge.configure(CONFIG)
    try:
        first.start()
        second.child.start()
        wait_for(lambda: "standby pipelines=1" in second.said(), "the second driver to stand by", START_TIMEOUT_S)
        assert "another driver" not in first.said()
        first.child.kill()
        wait_for(lambda: "ready pipelines=1" in second.said(), "the second driver to take over", START_TIMEOUT_S)
        first.child.start()
        wait_for(lambda: "standby pipelines=1" in first.said(), "the first driver to stand by", START_TIMEOUT_S)
        assert second.child.pid is not None, "the second driver has stopped for the first one"
    finally:
        for bridge in (first, second):
            bridge.child.stop(30)
