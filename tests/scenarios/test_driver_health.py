"""Health checks of drivers: the one that runs the pipelines, and its standby."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import free_port
from tests.support.system import ANSWER_S, System, wait_for


def answer(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=ANSWER_S) as said:
            return said.status, said.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_drivers_are_alive_and_ready_while_one_runs_and_one_stands_by(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    """Both have no pipelines, so neither needs Spark."""
    ports = [free_port(), free_port()]
    first, second = (
        System(kafka.bootstrap, tmp_path / str(port), prefix=topic_prefix, env={"BASCULE_PIPELINES__METRICS_PORT": str(port)})
        for port in ports
    )
    with first:
        first.pipelines.start()
        assert (answer(ports[0], "/livez"), answer(ports[0], "/readyz")) == ((200, "alive\n"), (200, "ready pipelines=0\n"))
        second.pipelines.launch()
        try:
            wait_for(lambda: answer(ports[1], "/readyz") == (200, "standby pipelines=0\n"), "the second driver to stand by")
            assert answer(ports[1], "/livez")[0] == 200
        finally:
            second.pipelines.stop()
