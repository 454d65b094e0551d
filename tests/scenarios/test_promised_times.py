"""Promises in seconds and megabytes: the exit codes of their benchmarks. The times are those of a machine without other work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Seconds of steady traffic. The promise is about an hour: BASCULE_STEADY_S=3600.
STEADY_S = float(os.environ.get("BASCULE_STEADY_S", "600"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(STEADY_S + 3600)]


def run(bench: str, results: Path, *arguments: str) -> None:
    environment = os.environ | {"BASCULE_BENCH_RESULTS": str(results)}
    done = subprocess.run([sys.executable, "-m", bench, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(results.glob("*.json")) != []


def test_standby_serves_100_000_messages_within_10_s_after_a_kill_and_2_s_after_a_stop(tmp_path: Path) -> None:
    run("bench.takeover", tmp_path, "--messages", "100000", "--rounds", "2")


def test_killed_broker_serves_a_million_messages_within_30_s(tmp_path: Path) -> None:
    run("bench.backlog", tmp_path, "--messages", "1000000")


def test_steady_traffic_does_not_increase_journal_size_memory_or_start_time(tmp_path: Path) -> None:
    run("bench.steady", tmp_path, "--seconds", str(STEADY_S))
