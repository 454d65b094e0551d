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
test-compiled) echo "==== 3 passed in 0.50s (0:00:00) ====" ;;
esac
case " $RUN_FAILING " in *" $1 "*) exit 2 ;; esac
"""
#: Stands for Python, which looks for a C compiler.
PYTHON = """#!/bin/sh
[ -z "$RUN_OBSTACLE" ] || { echo "$RUN_OBSTACLE" >&2; exit 1; }
"""


def run(directory: Path, failing: str = "", obstacle: str = "") -> tuple[int, list[str], list[str]]:
    """Return the status, the steps and the output."""
    for name, content in {"bin/make": MAKE, ".venv/bin/python": PYTHON}.items():
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_text(content)
        (directory / name).chmod(0o755)
    (directory / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", directory / ".ci" / "run")
    targets = directory / "targets"
    variables = {"RUN_TARGETS": str(targets), "RUN_FAILING": failing, "RUN_OBSTACLE": obstacle}
    environ = {**os.environ, **variables, "PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([directory / ".ci" / "run"], env=environ, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, targets.read_text().split(), done.stdout.splitlines()


def test_run_without_failure_ends_with_the_closing_line_of_all_tests(tmp_path: Path) -> None:
    status, steps, output = run(tmp_path)
    assert (status, steps) == (0, ["setup", "check", "docs", "test", "test-compiled"])
    assert output[-2:] == ["compiled modules: ==== 3 passed in 0.50s (0:00:00) ====", "==== 5 passed in 1.00s ===="]


@pytest.mark.parametrize("failing", ["check", "docs", "test", "test-compiled", "check test-compiled"])
def test_failed_steps_are_named_and_the_others_run(tmp_path: Path, failing: str) -> None:
    status, steps, output = run(tmp_path, failing)
    assert (status, steps) == (2, ["setup", "check", "docs", "test", "test-compiled"])
    assert output[-2:] == [f"failed: {failing}", "==== 5 passed in 1.00s ===="]


def test_run_without_compiler_says_that_compiled_modules_were_not_tested(tmp_path: Path) -> None:
    status, steps, output = run(tmp_path, obstacle="cannot compile the modules: cc: No such file or directory")
    assert (status, steps) == (0, ["setup", "check", "docs", "test"])
    assert output[-2] == "compiled modules: not tested: cannot compile the modules: cc: No such file or directory"
