"""A soak reports each failure of its own clients, and does not take a missing answer for an empty queue."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.soak.load import Load, failures_in
from tests.soak.plan import Plan
from tests.soak.records import Application
from tests.soak.site import NO_KAFKA, Part, Site
from tests.support.system import Command

BOOTSTRAP = "127.0.0.1:1"


class Broker:
    """The process of a broker, and the statuses that it reports."""

    running = True

    def __init__(self, *reports: dict[str, Any] | Exception) -> None:
        self._said: Iterator[dict[str, Any] | Exception] = iter(reports)

    def status(self, timeout_s: float) -> dict[str, Any]:
        found = next(self._said)
        if isinstance(found, Exception):
            raise found
        return found


class EndedCommand(Command):
    """A command that has written output and ended."""

    running = False

    def __init__(self, output: str) -> None:
        self._said = output

    def said(self) -> str:
        return self._said


class SiteWithoutProcesses:
    """A site without processes, with fixed queues."""

    plan, bootstrap, python_url = Plan(seed=0), BOOTSTRAP, "amqp://127.0.0.1:1"

    def __init__(self, depths: dict[str, int] | None = None) -> None:
        self._depths = depths

    def depths(self) -> dict[str, int] | None:
        return self._depths

    def wait(self, condition: Callable[[], object], _timeout_s: float) -> bool:
        return bool(condition())


def site(directory: Path, *brokers: Broker) -> Site:
    made = Site(Plan(seed=0), directory)
    made.systems = list(brokers)  # type: ignore[arg-type]
    made.parts = {f"broker-{number}": Part("", broker, lambda: 1) for number, broker in enumerate(brokers)}  # type: ignore[arg-type]
    return made


def queue(name: str, messages: int) -> dict[str, Any]:
    return {"name": name, "messages": messages, "delivering": 1, "delayed": 2}


def test_queue_depths_are_those_of_the_serving_broker(tmp_path: Path) -> None:
    standby, active = {"serving": False, "queues": []}, {"serving": True, "queues": [queue("orders", 4)]}
    assert site(tmp_path, Broker(standby), Broker(active)).depths() == {"orders": 7}


def test_queue_depths_are_unknown_while_no_broker_serves(tmp_path: Path) -> None:
    assert site(tmp_path, Broker({"serving": False, "queues": []}), Broker(ConnectionRefusedError())).depths() is None


def test_failure_of_the_kafka_application_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Application) -> None:
        raise ValueError("no such setting")

    monkeypatch.setattr(Application, "_incarnation", refuse)
    load = Load(SiteWithoutProcesses(), tmp_path)  # type: ignore[arg-type]
    load._application.start()
    load._application.join()
    load._abandon()
    (failure,) = load.failures
    assert failure.startswith("application: ")
    assert "ValueError: no such setting" in failure


def test_failed_java_client_is_reported_and_reconnected_one_is_not(tmp_path: Path) -> None:
    spared = ("failed", "session-closed", "consumer-closed", "producer-closed", "reopen")
    events = [{"client": "storm-1", "event": event} for event in (*spared, "interrupted", "restored", "error")]
    lines = [{"client": "storm-0", "op": "send", "ids": ["failed"], "outcome": "ok"}, {**events[0], "error": "why"}, *events[1:]]
    (tmp_path / "history").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert failures_in(tmp_path / "history") == ["storm-1: failed: why", *(f"storm-1: {event}: " for event in spared[1:])]


@pytest.mark.parametrize(
    ("depths", "left"),
    [({"DLQ": 2, "orders": 0}, {"DLQ": ["message 1", "message 2"]}), ({"orders": 0}, {}), (None, {"the queues": ["?"]})],
)
def test_each_message_waiting_at_the_end_counts_as_stuck(tmp_path: Path, depths: dict[str, int] | None, left: dict[str, list[str]]) -> None:
    load = Load(SiteWithoutProcesses(depths), tmp_path)  # type: ignore[arg-type]
    load._end_queues()
    load._abandon()
    assert load.left == left


ERROR = "error: no Kafka at 127.0.0.1:1"


@pytest.mark.parametrize(
    ("name", "output", "kafka_away_s", "excuse"),
    [
        ("broker-0", f"starting\n{ERROR}\n", 5.0, NO_KAFKA),
        ("broker-0", f"starting\n{ERROR}\n", 4.0, ""),  # Kafka was reachable again
        ("broker-0", f"ready amqp=1\n{ERROR}\n", 5.0, ""),  # a broker that serves survives an outage of Kafka
        ("kafka", ERROR, 5.0, ""),
    ],
)
def test_only_missing_kafka_at_start_excuses_a_part_that_exits_by_itself(
    tmp_path: Path, name: str, output: str, kafka_away_s: float, excuse: str
) -> None:
    here = site(tmp_path, Broker())
    here.parts = {"kafka": Part("kafka", Broker(), lambda: 1), name: Part(name, EndedCommand(output), lambda: None, launched_s=5.0)}  # type: ignore[arg-type]
    here.without_kafka_s = kafka_away_s
    here.tick()
    (end,) = here.own_ends
    assert (end.part, end.last_words, end.excuse) == (name, ERROR, excuse)


def test_expected_end_of_a_part_already_gone_does_not_excuse_its_next_end(tmp_path: Path) -> None:
    part = Part("broker-0", EndedCommand(""), lambda: None)
    part.expect_end(1.0)  # the process had ended before
    assert part.tend(10.0)


def test_site_is_not_well_while_a_part_is_still_ending(tmp_path: Path) -> None:
    here = site(tmp_path, Broker({"serving": True, "queues": []}))
    here.parts["broker-0"].expect_end(1.0)
    assert not here.well()
