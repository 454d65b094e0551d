"""Dead letters are redriven once on a real Kafka and Spark, though driver, broker or Kafka are killed with -9 meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bascule.client import Queue, connect
from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE
from bascule.kafka.admin import Topics
from tests.scenarios.bridge import Reader
from tests.scenarios.test_control_kills import ask
from tests.scenarios.test_up import up
from tests.support.system import PYTHON_FAILOVER, wait_for

REDRIVE = ["redrive.taken", "redrive.before", "redrive.after"]
#: The driver starts with Spark again after each kill, on a busy machine.
REACHED_S = 240.0
CONFIG = """
[[divert]]
name = "small"
from = "orders"
to = "out.small"

[[ingress]]
name = "back"
topics = ["in.back"]
to = "back"
routing = "anycast"
unbound = "keep"
"""
COUNT = 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", ["pipelines", "broker", "kafka"])
def test_messages_too_large_for_their_topic_are_redriven_once_when_it_accepts_them(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "crashed"
    once.mkdir()
    if part == "pipelines":
        monkeypatch.setenv(ARMED_VARIABLE, ",".join(REDRIVE))
        monkeypatch.setenv(ONCE_VARIABLE, str(once))
    config = tmp_path / "bascule.toml"
    config.write_text(CONFIG)
    large = [f"{number} {'x' * 3000}" for number in range(COUNT)]
    with up(tmp_path / "data", "--config", str(config)) as running, connect(PYTHON_FAILOVER.format(running.url)) as client:
        servers = f"127.0.0.1:{running.ports['kafka']}"
        topics = Topics({"bootstrap.servers": servers})
        topics.create("out.small", 1, {"max.message.bytes": "2000"})
        producer, reader = client.producer(Queue("orders")), Reader(servers, ("out.small",))

        def arrived() -> list[str]:
            reader.poll()
            return sorted((message.value() or b"").decode() for message in reader.seen)

        def progress(what: str) -> str:
            return f"{what}; {len(arrived())} records have arrived"

        def awaited(what: str, condition: Callable[[], Any]) -> Any:
            return wait_for(condition, partial(progress, what), REACHED_S)

        def waiting() -> int | None:
            found = ask(running, "GET", "redrive/letters?pipeline=divert:small")
            return None if found is None else len(found["letters"])

        def finished(job: str) -> dict[str, Any] | None:
            jobs = ask(running, "GET", "redrive/jobs") or []
            return next((each for each in jobs if each["job"] == job and each["state"] == "done"), None)

        for text in large:
            producer.send(text)
        awaited("the dead letters", lambda: waiting() == COUNT)
        topics.set("out.small", {"max.message.bytes": "1000000"})
        asked = awaited("an answer", lambda: ask(running, "POST", "redrive/run", pipeline="divert:small"))
        running.kill(part)
        awaited("the job", lambda: finished(asked["job"]))
        awaited("the records", lambda: arrived() == sorted(large))  # the reader may not have polled yet
        awaited("no dead letter that waits", lambda: waiting() == 0)
        producer.send("after")
        awaited("the next message", lambda: arrived() == sorted([*large, "after"]))
        reader.close()
    assert {each.name for each in once.iterdir()} == (set(REDRIVE) if part == "pipelines" else set())
