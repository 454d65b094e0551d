# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""``bascule top`` with an admin server that gives the answers of a test, without a terminal and on one."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from bascule.cli.top import TopSample, _keys, rates_between, send_latency_between
from bascule.server.answers import OverviewAnswer
from tests.unit.cli.conftest import Bascule
from tests.unit.cli.test_administer import QUEUE, STATUS, Broker, broker, part  # noqa: F401 - a fixture

OVERVIEW: dict[str, Any] = {
    **STATUS, "dead_letters": 3, "time_ms": 1769846400000,
    "sums": {"messages": 3, "bytes": 30, "delivering": 1, "delayed": 0, "consumers": 1},
    "sends": {"count": 0, "seconds": 0.0, "bounds_s": [0.001, 0.01], "counts": [0, 0, 0]},
}  # fmt: skip
DIVERT = {
    "kind": "divert",
    "name": "orders",
    "state": "running",
    "lag": 1234,
    "lag_bytes": 567_890,
    "records_per_s": 5.5,
    "latency_p50_s": 0.02,
    "latency_p99_s": None,
}


@pytest.fixture
def served(broker: Broker) -> Broker:
    broker.answers |= {
        "/overview": (200, OVERVIEW), "/list/queues": (200, {"entries": [QUEUE | {"name": "a\x1b[2Jb"}]}), "/diverts": (200, [DIVERT]),
        "/ingresses": (200, []),
    }  # fmt: skip
    return broker


def test_one_screen_has_rates_queues_and_pipelines_without_control_characters(served: Broker, bascule: Bascule) -> None:
    done = bascule("top", "--once", "--interval-s", "0.2", "--admin", served.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo: waiting (Kafka is away), " in done.stdout
    assert "per second: in 0.0, out 0.0" in done.stdout
    assert "memory 1.8 %, producers are blocked: too much" in done.stdout
    assert done.stdout.splitlines()[4].split() == ["queue", "messages", "delivering", "delayed", "bytes", "consumers"]
    assert done.stdout.splitlines()[5].split() == [r"a\u001b[2Jb", "3", "1", "0", "30", "1"]
    assert done.stdout.splitlines()[7].split() == ["pipeline", "state", "lag", "lag", "bytes", "records/s", "p50", "s", "p99", "s"]
    assert "divert orders  running  1,234    567,890        5.5   0.02      -" in done.stdout
    assert "accepted in ms" not in done.stdout, "no message was sent"
    assert "\x1b" not in done.stdout


def test_batch_prints_a_line_of_json_for_each_interval(served: Broker, bascule: Bascule) -> None:
    done = bascule("top", "--batch", "--count", "2", "--interval-s", "0.2", "--format", "json", "--sort", "name", "--admin", served.url)
    found = [json.loads(each) for each in done.stdout.splitlines()]
    assert [each["queues"][0]["messages"] for each in found] == [3, 3]
    asked = [path for path, _ in served.asked if path.startswith("/list/queues")]
    assert asked == ["/list/queues?sort=name&order=ascending&limit=20"] * 3


def test_broker_that_cannot_ask_its_pipelines_still_has_figures(served: Broker, bascule: Bascule) -> None:
    served.answers["/diverts"] = (503, {"error": "Kafka is away"})
    done = bascule("top", "--once", "--interval-s", "0.2", "--admin", served.url)
    assert (done.returncode, "pipeline" in done.stdout) == (0, False)


@pytest.mark.parametrize(("new", "rate"), [(30, 10.0), (10, 0.0), (5, 0.0)])
def test_rates_are_the_growth_of_the_counters_and_never_negative(new: int, rate: float) -> None:
    before, now = (TopSample(at_s, {"counters": {"messages_in": count}}, [], []) for at_s, count in ((0.0, 10), (2.0, new)))
    assert rates_between(before, now)["in"] == rate


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ([5, 0, 0], [5, 0, 0], {"p50": None, "p99": None}),
        ([5, 0, 0], [15, 0, 0], {"p50": 0.5, "p99": 0.99}),
        ([5, 0, 0], [5, 10, 1], {"p50": 5.95, "p99": 10.0}),
        ([5, 9, 9], [2, 0, 0], {"p50": 0.5, "p99": 0.99}),  # the broker has started again
    ],
)  # fmt: skip
def test_latency_is_that_of_the_messages_between_two_samples(old: list[int], new: list[int], wanted: dict[str, float | None]) -> None:
    before, now = (TopSample(0.0, {"sends": {"bounds_s": [0.001, 0.01], "counts": counts}}, [], []) for counts in (old, new))
    assert send_latency_between(before, now) == wanted


def test_unknown_column_is_refused(bascule: Bascule) -> None:
    assert "--sort 'size' must be one of messages," in bascule("top", "--sort", "size").stderr


def test_key_q_ends_the_command_on_a_terminal_and_restores_its_mode(served: Broker, tmp_path: Path) -> None:
    import termios

    terminal, other = pty.openpty()
    mode = termios.tcgetattr(other)
    command = [sys.executable, "-m", "bascule.cli", "top", "--interval-s", "0.2", "--admin", served.url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb", "BASCULE_CONTEXT": ""}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=other, stdout=other, stderr=other) as process:
        shown = b""
        while b"q quits" not in shown:  # the time limit of the test ends this
            shown += os.read(terminal, 4096)
        os.write(terminal, b"q")
        while process.poll() is None:  # a full terminal would block the process
            shown += os.read(terminal, 4096) if _readable(terminal) else b""
    assert process.returncode == 0
    assert b"sorted by messages" in shown
    assert b"\x1b[H\x1b[2J" in shown
    assert termios.tcgetattr(other) == mode
    os.close(terminal)
    os.close(other)


def test_closed_terminal_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, other = pty.openpty()
    with os.fdopen(other) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with _keys(True) as pressed:
            os.write(terminal, b"S")
            assert pressed(60.0) == "s"
            assert pressed(0.0) == ""
            os.close(terminal)
            assert [pressed(60.0), pressed(60.0)] == ["q", "q"]


@pytest.mark.parametrize("overview", [[], {}, OVERVIEW | {"counters": None}, OVERVIEW | {"time_ms": "now"}])
def test_answer_of_another_server_is_an_error(overview: Any, served: Broker, bascule: Bascule) -> None:
    served.answers["/overview"] = (200, overview)
    done = bascule("top", "--once", "--interval-s", "0.2", "--admin", served.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the server gave another answer than this version of the command expects: ")


def test_answer_of_another_server_is_an_error_without_the_extra_of_the_broker(
    served: Broker, bascule: Bascule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bascule.server.operations", None)
    served.answers["/overview"] = (200, {})
    done = bascule("top", "--once", "--interval-s", "0.2", "--admin", served.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the server gave another answer than this version of the command expects: KeyError(")


def test_defect_of_the_command_shows_as_a_defect(served: Broker, bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {**dict.fromkeys(get_type_hints(OverviewAnswer), ""), **OVERVIEW, "dead_letter_address": "DLQ", "expiry_address": "Expiry"}
    served.answers["/overview"] = (200, whole)
    served.answers["/list/queues"] = (200, part())
    served.answers |= {"/diverts": (200, []), "/ingresses": (200, [])}
    monkeypatch.setattr("bascule.cli.top.rates_between", lambda before, now: before["no field"])
    with pytest.raises(TypeError):
        bascule("top", "--once", "--interval-s", "0.2", "--admin", served.url)
    del served.answers["/list/queues"][1]["found"]
    done = bascule("top", "--once", "--interval-s", "0.2", "--admin", served.url)
    assert done.stderr.endswith("expects: GET /list/queues: the answer has no field 'found'\n")


def _readable(terminal: int) -> bool:
    import select

    return bool(select.select([terminal], [], [], 0.05)[0])
