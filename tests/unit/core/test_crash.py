"""Crash points: the table and the source name the same points, and an armed point ends the process at the given pass."""

import ast
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from bascule.core import crash
from tests.scenarios.test_adapter_kills import INBOUND
from tests.scenarios.test_adapter_kills import SHORT as SHORT_INBOUND
from tests.scenarios.test_control_kills import CONTROL
from tests.scenarios.test_crash_points import BROKER
from tests.scenarios.test_crash_points import SHORT as SHORT_BROKER
from tests.scenarios.test_crash_points_pipelines import DRIVER, JOIN, LEAVING, SINK, WORKER
from tests.scenarios.test_crash_points_pipelines import SHORT as SHORT_PIPELINES
from tests.scenarios.test_crash_points_xa import NAMES as XA
from tests.scenarios.test_crash_points_xa import SHORT as SHORT_XA
from tests.scenarios.test_definition_kills import DEFINING
from tests.scenarios.test_divert_definition import COVERING, DEFINING_DIVERTS
from tests.scenarios.test_redrive_kills import REDRIVE
from tests.scenarios.test_xa_jms_kills import BRANCH_POINTS

SOURCE = Path(__file__).parents[3] / "src" / "bascule"
POINTS_MIN = 40


def named_in_source() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source if "crash.point" in source else "", str(path))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "crash.point":
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{path}: {ast.unparse(node)}"
                yield str(name.value)


def test_crash_point_table_equals_the_points_in_the_source() -> None:
    found = Counter(named_in_source())
    assert found == dict.fromkeys(crash.POINTS, 1)
    assert len(found) >= POINTS_MIN


def test_tests_kill_a_process_at_every_crash_point_and_at_many_in_every_run() -> None:
    defining = {*DEFINING, *DEFINING_DIVERTS, *COVERING}
    ended = {*BROKER, *WORKER, *DRIVER, *JOIN, *CONTROL, *defining, *REDRIVE, *LEAVING, *SINK, *XA, *INBOUND, *BRANCH_POINTS}
    assert ended == set(crash.POINTS)
    in_every_run = {*SHORT_BROKER, *SHORT_PIPELINES, *SHORT_XA, *SHORT_INBOUND, *BRANCH_POINTS}
    assert in_every_run <= ended
    assert len(in_every_run) >= POINTS_MIN


def test_documentation_names_the_test_of_each_crash_point() -> None:
    page = (SOURCE.parents[1] / "docs" / "internals" / "crash-points.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| (?:`(tests/[^`]+)`|the same) \|$", page, re.MULTILINE)
    patterns = [pattern for names, _ in rows for pattern in re.findall(r"`([^`]+)`", names)]
    assert [name for name in crash.POINTS if sum(fnmatch(name, pattern) for pattern in patterns) != 1] == []
    assert [test for _, test in rows if test and not (SOURCE.parents[1] / test).exists()] == []


PROGRAM = """
from bascule.core import crash
for number in range(5):
    print(number, flush=True)
    crash.point("epoch.loaded")
"""


def run(armed: str, once: str = "") -> tuple[int, list[str], str]:
    chosen = {crash.ARMED_VARIABLE: armed, crash.ONCE_VARIABLE: once, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | chosen, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout.split(), done.stderr


def test_process_is_killed_at_the_requested_pass_and_reports_the_crash_point_before() -> None:
    assert run("journal.append.before:1,epoch.loaded:3") == (-signal.SIGKILL, ["0", "1", "2"], "crash point epoch.loaded, pass 3\n")


def test_armed_crash_point_brings_its_state_about_and_another_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "epoch.loaded").touch()
    monkeypatch.setattr(crash, "_armed", {"epoch.loaded": (2, iter(range(1, 9)), str(tmp_path), signal.SIGKILL)})
    reached: list[str] = []
    crash.point("epoch.loaded", lambda: reached.append("armed"))
    crash.point("epoch.start.after", lambda: reached.append("not armed"))
    assert reached == ["armed"]


def test_process_without_armed_crash_points_runs_to_its_end() -> None:
    assert run("") == (0, ["0", "1", "2", "3", "4"], "")


def test_crash_point_that_kills_once_leaves_a_file_and_spares_the_next_process(tmp_path: Path) -> None:
    assert run("epoch.loaded", str(tmp_path))[0] == -signal.SIGKILL
    assert [each.name for each in tmp_path.iterdir()] == ["epoch.loaded"]
    assert run("epoch.loaded", str(tmp_path))[0] == 0


def test_unknown_crash_point_or_action_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown crash point 'epoch\.lost'"):
        crash.arm("epoch.lost:1")
    with pytest.raises(ValueError, match=r"invalid action in 'epoch\.loaded:1:halt'"):
        crash.arm("epoch.loaded:1:halt")
