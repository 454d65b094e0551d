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
STEPS = ["setup", "check", "docs", "check-deploy", "test-compiled", "test", "compiled-copy"]


def run(directory: Path, failing: str = "", *, compiler: bool = True) -> tuple[int, list[str], list[str]]:
    """Return the status, the steps and the output. The compiler, which runs beside the first steps, comes last."""
    make = directory / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    (directory / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", directory / ".ci" / "run")
    targets = directory / "targets"
    python = directory / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexit {int(not compiler)}\n")  # stands for the check whether there is a C compiler
    python.chmod(0o755)
    variables = {"RUN_TARGETS": str(targets), "RUN_FAILING": failing}
    environ = {**os.environ, **variables, "PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([directory / ".ci" / "run"], env=environ, stdout=subprocess.PIPE, text=True, check=False)
    steps = sorted(targets.read_text().split(), key="compiled-copy".__eq__)
    return done.returncode, steps, done.stdout.splitlines()


def test_run_without_failure_ends_with_the_closing_line_of_all_tests(tmp_path: Path) -> None:
    status, steps, output = run(tmp_path)
    assert (status, steps) == (0, STEPS)
    assert output[-2:] == ["==== 5 passed in 1.00s ====", "==== 5 passed in 1.00s ===="]


@pytest.mark.parametrize("failing", ["check", "docs", "check-deploy", "test-compiled", "test", "check test"])
def test_failed_steps_are_named_and_the_others_run(tmp_path: Path, failing: str) -> None:
    status, steps, output = run(tmp_path, failing)
    assert (status, steps) == (2, STEPS)
    assert output[-2:] == [f"failed: {failing}", "==== 5 passed in 1.00s ===="]


def test_machine_without_compiler_runs_the_other_steps_and_says_so(tmp_path: Path) -> None:
    status, steps, output = run(tmp_path, compiler=False)
    assert (status, steps) == (0, ["setup", "check", "docs", "check-deploy", "test"])
    assert output[-2:] == ["not run, because the compiler is missing: test-compiled", "==== 5 passed in 1.00s ===="]
