"""``.ci/run`` runs every step, and ends with the names of the failed steps and the closing line of pytest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.pages import ROOT

#: Stands for make: notes the target, ends as the test wants, and prints the closing line of pytest.
MAKE = """#!/bin/sh
echo "$1" >> "$RUN_TARGETS"
case "$1" in
test) echo "==== 5 passed in 1.00s ====" ;;
esac
case " $RUN_FAILING " in *" $1 "*) exit 2 ;; esac
"""


def run(directory: Path, failing: str = "") -> tuple[int, list[str], list[str]]:
    """Return the status, the steps and the output."""
    make = directory / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    (directory / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", directory / ".ci" / "run")
    targets = directory / "targets"
    variables = {"RUN_TARGETS": str(targets), "RUN_FAILING": failing}
    environ = {**os.environ, **variables, "PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([directory / ".ci" / "run"], env=environ, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, targets.read_text().split(), done.stdout.splitlines()


def test_run_without_failure_ends_with_the_closing_line_of_all_tests(tmp_path: Path) -> None:
    status, steps, output = run(tmp_path)
    assert (status, steps) == (0, ["setup", "check", "docs", "check-deploy", "test"])
    assert output[-2:] == ["==== 5 passed in 1.00s ====", "==== 5 passed in 1.00s ===="]


@pytest.mark.parametrize("failing", ["check", "docs", "check-deploy", "test", "check test"])
def test_failed_steps_are_named_and_the_others_run(tmp_path: Path, failing: str) -> None:
    status, steps, output = run(tmp_path, failing)
    assert (status, steps) == (2, ["setup", "check", "docs", "check-deploy", "test"])
    assert output[-2:] == [f"failed: {failing}", "==== 5 passed in 1.00s ===="]
