"""What a soak tells of its own clients and queues: nothing that failed goes unsaid, and silence is not an empty queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bascule.testing.soak.load import Load
from bascule.testing.soak.plan import Plan
from bascule.testing.soak.records import Application
from bascule.testing.soak.site import Part, Site

BOOTSTRAP = "127.0.0.1:1"


class Broker:
    """A broker's process and what it says of itself."""

    running = True

    def __init__(self, *said: dict[str, Any] | Exception) -> None:
        self._said: Iterator[dict[str, Any] | Exception] = iter(said)

    def status(self, timeout_s: float) -> dict[str, Any]:
        found = next(self._said)
        if isinstance(found, Exception):
            raise found
        return found


def site(directory: Path, *brokers: Broker) -> Site:
    made = Site(Plan(seed=0), directory)
    made.systems = list(brokers)  # type: ignore[arg-type]
    made.parts = {f"broker-{number}": Part("", broker, lambda: 1) for number, broker in enumerate(brokers)}  # type: ignore[arg-type]
    return made


def queue(name: str, messages: int) -> dict[str, Any]:
    return {"name": name, "messages": messages, "delivering": 1, "delayed": 2}


def test_the_broker_that_serves_says_what_is_in_the_queues(tmp_path: Path) -> None:
    standby, active = {"serving": False, "queues": []}, {"serving": True, "queues": [queue("orders", 4)]}
    assert site(tmp_path, Broker(standby), Broker(active)).depths() == {"orders": 7}


def test_queues_are_not_empty_because_no_broker_serves(tmp_path: Path) -> None:
    assert site(tmp_path, Broker({"serving": False, "queues": []}), Broker(ConnectionRefusedError())).depths() is None


def test_a_client_of_kafka_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        plan, bootstrap, python_url = Plan(seed=0), BOOTSTRAP, "amqp://127.0.0.1:1"

    def refuse(_: Application) -> None:
        raise ValueError("no such setting")

    monkeypatch.setattr(Application, "_incarnation", refuse)
    load = Load(Elsewhere(), tmp_path)  # type: ignore[arg-type]
    load._application.start()
    load._application.join()
    load._abandon()
    (failure,) = load.failures
    assert failure.startswith("application: ")
    assert "ValueError: no such setting" in failure
