"""The benchmark of transactions, for one second each: every mode runs, and none fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.xa_modes import CONTENDERS

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_transactions_of_all_contenders_are_measured_in_one_run(tmp_path: Path) -> None:
    modes = ("jms-relay", "jms-postgres-send", "jms-postgres-relay", "jms-postgres-relay-deciding", "all-relay")
    chosen = [part for mode in modes for part in ("--mode", mode)]
    command = [sys.executable, "-m", "bench.xa", *chosen, "--seconds", "1", "--warm-up", "0", "--rounds", "1", "--clients", "1x2"]
    environment = os.environ | {"BASCULE_BENCH_RESULTS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("xa-*.json")
    results = json.loads(file.read_text())["results"]
    assert {each["who"] for each in results} == set(CONTENDERS)
    assert {each["mode"] for each in results} == set(modes)
    assert all(run["per_s"] > 0 and run["failures"] == 0 for each in results for run in each["runs"])
    assert "| receive, insert, send: decision in the database | 2 threads | Bascule, Python |" in done.stdout
