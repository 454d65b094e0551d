"""Output of the processes: only the ready line on standard output, the log as JSON on standard error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from bascule.embedded.kafka import EmbeddedKafka
from tests.support.system import BROKER_START_S, PIPELINES_START_S

CONFIG = """
[bridge]
id = "{prefix}"
[journal]
prefix = "{prefix}"
[pipelines]
master = "local[1]"
[[ingress]]
name = "missing"
topics = ["{prefix}-missing"]
to = "queue"
"""


def run(command: list[str], env: dict[str, str], directory: Path, timeout_s: float) -> tuple[list[str], list[str]]:
    """Return the lines of standard output and standard error of a command that is ended after its first line."""
    errors = directory / f"{command[0]}.err"
    argv = [sys.executable, "-m", "bascule.cli", *command]
    with (
        errors.open("w") as stderr,
        subprocess.Popen(argv, env={**os.environ, **env}, cwd=directory, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=timeout_s)
    return (first + rest).splitlines(), errors.read_text().splitlines()


def records(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_stdout_has_only_the_ready_line_and_stderr_has_the_json_log(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    config = tmp_path / "bascule.toml"
    config.write_text(CONFIG.format(prefix=topic_prefix))
    env = {"BASCULE_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap, "BASCULE_EMBEDDED__DATA_DIR": str(tmp_path / "data")}
    ports = ["--amqp-port", "0", "--admin-port", "0"]
    out, log = run(["broker", "--config", str(config), *ports, "--log-format", "json"], env, tmp_path, BROKER_START_S)
    assert [line.split()[0] for line in out] == ["ready"]
    assert len(records(log)) == len(log)
    assert any(each["logger"] == "bascule.server.epoch" and each["level"] == "info" for each in records(log))
    out, log = run(["pipelines", "--config", str(config)], {**env, "BASCULE_LOG__FORMAT": "json"}, tmp_path, PIPELINES_START_S)
    assert out == ["ready pipelines=1"]
    (said,) = (each for each in records(log) if each["event"] == "ingress has no topic yet")
    assert (said["level"], said["logger"], said["ingress"]) == ("warning", "bascule.pipelines.ingresses", "missing")


def test_pipelines_without_divert_and_ingress_are_ready_without_spark(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    config = tmp_path / "bascule.toml"
    config.write_text(CONFIG.format(prefix=topic_prefix).partition("[[ingress]]")[0])
    # With the port of a gateway that does not exist, Spark cannot start.
    env = {"BASCULE_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap, "BASCULE_LOG__FORMAT": "json", "PYSPARK_GATEWAY_PORT": "1"}
    out, log = run(["pipelines", "--config", str(config)], env, tmp_path, PIPELINES_START_S)
    assert out == ["ready pipelines=0"]
    (said,) = (each for each in records(log) if "Spark" in each["event"])
    assert (said["level"], said["event"]) == ("info", "no divert or ingress is enabled, Spark is not started")
