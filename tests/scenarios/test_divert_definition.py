"""A divert is created, changed and deleted at run time while driver, broker or Kafka are killed: each message is carried once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bascule.client import Topic, connect
from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE
from tests.scenarios.test_control_kills import REACHED_S, ask
from tests.scenarios.test_definition_kills import DEFINING
from tests.scenarios.test_up import Running, up
from tests.scenarios.topics import Reader, create
from tests.support.system import PYTHON_FAILOVER, wait_for

DEFINING_DIVERTS = ["define.before", "define.after"]
COVERING = ["coverage.before", "coverage.proved", "coverage.after"]
#: What is killed, and the crash points at which it ends by itself.
PARTS: dict[str, list[str]] = {"pipelines": [*DEFINING_DIVERTS, *DEFINING], "broker": COVERING, "kafka": []}
CONFIG = """
[[divert]]
name = "other"
from = "orders"
to = "other"
"""
PLACE = "diverts/late"


def settings(topic: str) -> dict[str, Any]:
    return {"from": "news", "to": topic, "key": "none"}


class DivertMaker:
    """An administrator who repeats requests that got no answer."""

    def __init__(self, running: Running) -> None:
        self.running = running

    def create(self, topic: str) -> None:
        """Return when the active broker covers the divert, whether this request or an earlier one has created it."""

        def created() -> bool:
            self._ask("POST", "diverts", name="late", config=settings(topic))
            return self._covered(1)

        self._until("the divert to be covered", created)

    def change(self, topic: str, revision: int) -> None:
        def changed() -> bool:
            self._ask("PUT", f"{PLACE}/config?revision={revision - 1}", **settings(topic))
            return self._covered(revision)

        self._until("the divert to be changed", changed)

    def delete(self) -> None:
        self._until("the divert to be deleted", lambda: self._ask("DELETE", PLACE))

    def await_revision(self, revision: int) -> None:
        def there() -> bool:
            status = self._status()
            return (status.get("reported_revision"), status.get("state")) == (revision, "running")

        self._until(f"revision {revision}", there)

    def await_end(self) -> None:
        listed: Callable[[], Any] = lambda: self._ask("GET", "diverts")  # noqa: E731
        self._until("the position to be deleted", lambda: [each["name"] for each in listed() or ()] == ["other"])

    def _covered(self, revision: int) -> bool:
        status = self._status()
        return status.get("revision") == revision and status.get("covered_from") is not None

    def _status(self) -> dict[str, Any]:
        return self._ask("GET", f"{PLACE}/status") or {}

    def _ask(self, method: str, path: str, **arguments: Any) -> Any:
        return ask(self.running, method, path, **arguments)

    def _until(self, what: str, condition: Callable[[], Any]) -> None:
        wait_for(condition, what, REACHED_S)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_message_sent_after_the_answer_is_carried_once_though_parts_are_killed(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "crashed"
    once.mkdir()
    points = PARTS[part]
    if points:
        monkeypatch.setenv(ARMED_VARIABLE, ",".join(points))
        monkeypatch.setenv(ONCE_VARIABLE, str(once))
    config = tmp_path / "bascule.toml"
    config.write_text(CONFIG)
    with up(tmp_path / "data", "--config", str(config)) as running, connect(PYTHON_FAILOVER.format(running.url)) as client:
        kafka = f"127.0.0.1:{running.ports['kafka']}"
        create(kafka, "first", "second", "third")
        maker = DivertMaker(running)

        client.send(Topic("news"), "nobody wants it")
        maker.create("first")
        client.send(Topic("news"), "0")
        running.kill(part)
        client.send(Topic("news"), "1")
        maker.await_revision(1)
        assert carried(kafka, "first", "1") == ["0", "1"]
        maker.change("second", 2)
        running.kill(part)
        maker.await_revision(2)
        client.send(Topic("news"), "2")
        assert carried(kafka, "second", "2") == ["2"]
        maker.delete()
        if part != "pipelines":
            running.kill(part)
        maker.await_end()
        client.send(Topic("news"), "nobody wants it any more")
        maker.create("third")
        client.send(Topic("news"), "3")
        maker.await_revision(1)
        assert carried(kafka, "third", "3") == ["3"]
        assert carried(kafka, "first", "1") == ["0", "1"]
        assert carried(kafka, "second", "2") == ["2"]
    assert {each.name for each in once.iterdir()} == set(points)


def carried(kafka: str, topic: str, last: str) -> list[str]:
    """Return the records of a topic up to one of them."""
    reader = Reader(kafka, topic)
    try:
        return reader.read_until(last)
    finally:
        reader.close()
