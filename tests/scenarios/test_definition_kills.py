"""An ingress is created, changed and deleted at run time while driver, broker or Kafka are killed with -9: each record is carried once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bascule.client import Queue, connect
from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE
from tests.scenarios.test_control_kills import REACHED_S, ask
from tests.scenarios.test_up import Running, up
from tests.scenarios.topics import create, produce
from tests.support.system import PYTHON_FAILOVER, wait_for

DEFINING = ["forget.before", "forget.after"]
CONFIG = """
[[ingress]]
name = "other"
topics = ["in"]
to = "other"
routing = "anycast"
unbound = "keep"
"""
PLACE = "ingresses/made"


def settings(queue: str) -> dict[str, Any]:
    return {"topics": ["in"], "to": queue, "routing": "anycast", "unbound": "keep"}


class Maker:
    """An administrator who repeats requests that got no answer."""

    def __init__(self, running: Running) -> None:
        self.running = running

    def create(self, queue: str) -> None:
        self._until(
            "the ingress to be created", lambda: self._status() or self._ask("POST", "ingresses", name="made", config=settings(queue))
        )

    def change(self, queue: str, revision: int) -> None:
        def changed() -> Any:
            self._ask("PUT", f"{PLACE}/config?revision={revision - 1}", **settings(queue))
            return (self._status() or {}).get("revision") == revision

        self._until("the ingress to be changed", changed)

    def delete(self) -> None:
        self._until("the ingress to be deleted", lambda: self._ask("DELETE", PLACE))

    def await_revision(self, revision: int) -> None:
        def there() -> bool:
            status = self._status() or {}
            return (status.get("reported_revision"), status.get("state")) == (revision, "running")

        self._until(f"revision {revision}", there)

    def await_end(self) -> None:
        listed: Callable[[], Any] = lambda: self._ask("GET", "ingresses")  # noqa: E731
        self._until("the positions to be deleted", lambda: [each["name"] for each in listed() or ()] == ["other"])

    def _status(self) -> Any:
        return self._ask("GET", f"{PLACE}/status")

    def _ask(self, method: str, path: str, **arguments: Any) -> Any:
        return ask(self.running, method, path, **arguments)

    def _until(self, what: str, condition: Callable[[], Any]) -> None:
        wait_for(condition, what, REACHED_S)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", ["pipelines", "broker", "kafka"])
def test_ingress_made_at_run_time_carries_each_record_once_though_parts_are_killed(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "crashed"
    once.mkdir()
    if part == "pipelines":
        monkeypatch.setenv(ARMED_VARIABLE, ",".join(DEFINING))
        monkeypatch.setenv(ONCE_VARIABLE, str(once))
    config = tmp_path / "bascule.toml"
    config.write_text(CONFIG)
    with up(tmp_path / "data", "--config", str(config)) as running, connect(PYTHON_FAILOVER.format(running.url)) as client:
        kafka = f"127.0.0.1:{running.ports['kafka']}"
        create(kafka, "in")
        maker, send = Maker(running), partial(produce, kafka, "in")

        def received(queue: str, count: int) -> list[str]:
            consumer = client.consumer(Queue(queue))
            found = [consumer.receive(REACHED_S) for _ in range(count)]
            extra = consumer.receive(0.5)
            consumer.close()
            return [str(message and message.body) for message in (*found, *([] if extra is None else [extra]))]

        send(["0", "1"])
        maker.create("first")
        running.kill(part)
        maker.await_revision(1)
        assert received("first", 2) == ["0", "1"]
        maker.change("second", 2)
        running.kill(part)
        maker.await_revision(2)
        send(["2"])
        assert received("second", 1) == ["2"]
        maker.delete()
        if part != "pipelines":
            running.kill(part)
        maker.await_end()
        send(["3"])
        maker.create("third")
        maker.await_revision(1)
        assert received("third", 4) == ["0", "1", "2", "3"]
        assert received("other", 4) == ["0", "1", "2", "3"]
        assert received("first", 0) == received("second", 0) == []
    assert {each.name for each in once.iterdir()} == (set(DEFINING) if part == "pipelines" else set())
