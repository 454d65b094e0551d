"""``bascule bench`` against a broker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.speed import SLOWNESS
from tests.support.system import PYTHON_FAILOVER, System, wait_for

COMMAND = [
    sys.executable, "-m", "bascule.cli", "bench", "--format", "json", "--seconds", "1", "--warmup-s", "0.5", "--arrival-s", "60"
]  # fmt: skip


def bench(system: System, *options: str, code: int = 0) -> dict[str, Any]:
    """Run the command and return its report."""
    command = [*COMMAND, "--broker", PYTHON_FAILOVER.format(system.url), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    wait_for(lambda: system.depth(report["plan"]["destination"]) == 0, "an empty queue")
    return report


@pytest.mark.parametrize(
    "options",
    [
        ("--rate", "100", "--producers", "2", "--consumers", "2", "--size", "4096"),
        ("--rate", "50", "--synchronous", "--non-persistent"),
        ("--rate", "60", "--transaction", "7"),
    ],
    ids=["asynchronous", "synchronous", "transactions"],
)
def test_each_message_of_a_queue_is_confirmed_and_received_once(system: System, options: tuple[str, ...]) -> None:
    report = bench(system, *options)
    results, due = report["results"], int(options[1]) * 3 // 2
    assert (results["sent"], results["confirmed"]["messages"], results["received"]["messages"]) == (due, due, due)
    assert (results["lost"], results["doubled"], results["left"], results["unsent"], results["errors"]) == (0, 0, 0, 0, {})
    for each in (results["confirmed"], results["received"]):
        assert 0 < each["p50_ms"] <= each["p90_ms"] <= each["p99_ms"] <= each["p999_ms"] <= each["max_ms"]
        assert 0 <= each["per_s"] <= each["messages"]  # none within the measured second, if the machine pauses


def test_each_consumer_of_a_topic_receives_each_message(system: System) -> None:
    results = bench(system, "--topic", "--rate", "40", "--consumers", "3")["results"]
    assert (results["sent"], results["received"]["messages"]) == (60, 180)
    assert (results["lost"], results["doubled"]) == (0, 0)


def test_messages_that_no_consumer_receives_are_counted_and_removed(system: System) -> None:
    results = bench(system, "--consumers", "0", "--rate", "40")["results"]
    assert (results["sent"], results["left"], results["lost"], results["received"]["messages"]) == (60, 60, 0, 0)
    assert results["received"]["p50_ms"] is None


def test_full_speed_sends_more_than_a_rate_asks_for(system: System) -> None:
    results = bench(system, "--rate", "0")["results"]
    assert results["confirmed"]["messages"] == results["received"]["messages"] == results["sent"]
    assert results["sent"] > 150 / SLOWNESS
    assert (results["lost"], results["doubled"]) == (0, 0)


def messages_in(system: System) -> int:
    """Return the number of messages that the broker has taken since its start."""
    found = re.search(r"^bascule_messages_in_total (\d+)", system.metrics(), re.MULTILINE)
    assert found is not None, system.metrics()
    return int(found[1])


@pytest.mark.parametrize("options", [(), ("--transaction", "5")], ids=["asynchronous", "transactions"])
def test_stall_of_a_killed_broker_counts_for_all_messages_that_were_due(system: System, options: tuple[str, ...]) -> None:
    command = [*COMMAND, "--broker", PYTHON_FAILOVER.format(system.url), "--rate", "50", "--seconds", "10", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        before = messages_in(system)
        wait_for(lambda: messages_in(system) > before + 20, "the load")
        system.broker.restart()
        said, _ = process.communicate(timeout=250)
    results = json.loads(said)["results"]
    assert (results["lost"], results["doubled"]) == (0, 0)
    assert results["confirmed"]["messages"] > 300
    # A broker needs more than half a second for its start, so more than one in a hundred messages of these ten seconds waits.
    assert results["confirmed"]["p99_ms"] > 300
    assert results["confirmed"]["p99_ms"] > 10 * 1000 / 50


def test_bench_reports_what_it_cannot_do(system: System) -> None:
    done = subprocess.run([*COMMAND, "--synchronous", "--transaction", "2"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--synchronous and --transaction exclude each other" in done.stderr
    assert system.broker.running
