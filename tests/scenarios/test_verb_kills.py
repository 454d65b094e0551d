"""Each verb about pipelines on one Kafka, broker and Spark, a part of which is killed with -9 meanwhile: the wanted state is reached.

The tests of each verb kill every part: test_control_kills, test_definition_kills, test_divert_definition and test_redrive_kills, all slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bascule.client import Context, Queue, Topic, connect
from bascule.kafka.admin import Topics
from tests.scenarios.bridge import Reader
from tests.scenarios.test_control_kills import REACHED_S, ask
from tests.scenarios.test_up import Running, up
from tests.scenarios.topics import create, produce
from tests.support.system import PYTHON_FAILOVER, wait_for

CONFIG = """
[[divert]]
name = "held"
from = "orders"
to = "held"

[[divert]]
name = "other"
from = "orders"
to = "other"

[[divert]]
name = "small"
from = "parcels"
to = "small"
"""
LARGE = [f"{number} {'x' * 3000}" for number in range(3)]


class Verbs:
    """An administrator who repeats requests that got no answer, and what has arrived in the topics."""

    def __init__(self, running: Running, client: Context) -> None:
        self.running, self.client = running, client
        self.kafka = f"127.0.0.1:{running.ports['kafka']}"
        self.topics = Topics({"bootstrap.servers": self.kafka})
        create(self.kafka, "held", "other", "late", "in")
        self.topics.create("small", 1, {"max.message.bytes": "2000"})
        self.reader = Reader(self.kafka, ("held", "other", "late", "small"))

    def arrived(self, topic: str) -> list[str]:
        self.reader.poll()
        return [(message.value() or b"").decode() for message in self.reader.seen if message.topic() == topic]

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        return wait_for(condition, partial(self._progress, what), REACHED_S)

    def _progress(self, what: str) -> str:
        return f"{what}; arrived: {[(topic, len(self.arrived(topic))) for topic in ('held', 'other', 'late', 'small')]}"

    def ask(self, method: str, path: str, **arguments: Any) -> Any:
        """Return the answer to a request that may be repeated."""
        return self.until(f"an answer to {method} {path}", lambda: ask(self.running, method, path, **arguments))

    def await_state(self, path: str, state: str) -> None:
        self.until(f"{path} to be {state}", lambda: (ask(self.running, "GET", f"{path}/status") or {}).get("state") == state)

    def waiting(self) -> int | None:
        found = ask(self.running, "GET", "redrive/letters?pipeline=divert:small")
        return None if found is None else len(found["letters"])

    def done(self, job: str) -> bool:
        return any((each["job"], each["state"]) == (job, "done") for each in ask(self.running, "GET", "redrive/jobs") or ())

    def define(self, collection: str, name: str, covered: bool, **settings: Any) -> None:
        """Create a pipeline, whether this request or an earlier one does it."""

        def created() -> bool:
            ask(self.running, "POST", collection, name=name, config=settings)
            status = ask(self.running, "GET", f"{collection}/{name}/status") or {}
            return status.get("revision") == 1 and (not covered or status.get("covered_from") is not None)

        self.until(f"{name} to be created", created)

    def names(self, collection: str) -> list[str] | None:
        found = ask(self.running, "GET", collection)
        return None if found is None else sorted(each["name"] for each in found)

    def received(self, queue: str, count: int) -> list[Any]:
        """Receive messages, and one more if there is one."""
        with self.client.consumer(Queue(queue)) as consumer:
            found = [consumer.receive(REACHED_S) for _ in range(count)]
            extra = consumer.receive(0.5)
        return [message and message.body for message in (*found, *([] if extra is None else [extra]))]


def connected(running: Running) -> Context:
    """Connect a client whose sends wait for the restart of a killed broker."""
    return connect(PYTHON_FAILOVER.format(running.url), timeout_s=REACHED_S)


@pytest.mark.timeout(1800)
def test_each_verb_reaches_the_wanted_state_though_a_part_is_killed(tmp_path: Path) -> None:
    config = tmp_path / "bascule.toml"
    config.write_text(CONFIG)
    with up(tmp_path / "data", "--config", str(config)) as running, connected(running) as client:
        verbs = Verbs(running, client)
        client.send(Queue("orders"), "0")
        for text in LARGE:
            client.send(Queue("parcels"), text)
        verbs.until("the first messages", lambda: verbs.arrived("held") == verbs.arrived("other") == ["0"])
        verbs.until("the dead letters", lambda: verbs.waiting() == len(LARGE))

        verbs.ask("PUT", "diverts/held/pause")
        verbs.define("diverts", "late", True, to="late", **{"from": "news"})
        client.send(Topic("news"), "n0")
        running.kill("broker")
        client.send(Topic("news"), "n1")
        verbs.define("ingresses", "made", False, topics=["in"], to="made", routing="anycast", unbound="keep")
        produce(verbs.kafka, "in", ["r0", "r1"])
        verbs.await_state("diverts/held", "paused")
        client.send(Queue("orders"), "1")
        verbs.until("the pipelines that run", lambda: (verbs.arrived("other"), verbs.arrived("late")) == (["0", "1"], ["n0", "n1"]))
        assert verbs.received("made", 2) == ["r0", "r1"]
        assert verbs.arrived("held") == ["0"]

        verbs.ask("PUT", "diverts/held/stop")
        verbs.await_state("diverts/held", "stopped")
        plan = verbs.ask("PATCH", "diverts/held/offsets", to="earliest")
        verbs.topics.set("small", {"max.message.bytes": "1000000"})
        job = verbs.ask("POST", "redrive/run", pipeline="divert:small")["job"]
        verbs.ask("PATCH", "diverts/held/offsets", token=plan["token"])
        running.kill("pipelines")
        verbs.until("the move", lambda: (ask(running, "GET", "diverts/held/offsets") or {"request": {}})["request"].get("state") == "done")
        verbs.until("the job", lambda: verbs.done(job))
        assert sorted(verbs.arrived("small")) == LARGE
        verbs.until("no dead letter that waits", lambda: verbs.waiting() == 0)
        verbs.ask("PUT", "diverts/held/resume")
        verbs.until("the repeated messages", lambda: verbs.arrived("held") == ["0", "0", "1"])

        verbs.ask("DELETE", "diverts/late")
        verbs.ask("DELETE", "ingresses/made")
        running.kill("kafka")
        verbs.until("the end of late", lambda: verbs.names("diverts") == ["held", "other", "small"])
        verbs.until("the end of made", lambda: verbs.names("ingresses") == [])
        client.send(Topic("news"), "nobody wants it any more")
        produce(verbs.kafka, "in", ["nobody reads it any more"])
        client.send(Queue("orders"), "2")
        client.send(Queue("parcels"), "3")
        verbs.until("the last messages", lambda: (verbs.arrived("held"), verbs.arrived("other")) == (["0", "0", "1", "2"], ["0", "1", "2"]))
        verbs.until("the next parcel", lambda: sorted(verbs.arrived("small")) == [*LARGE, "3"])
        assert verbs.arrived("late") == ["n0", "n1"]
        assert verbs.received("made", 0) == []
        verbs.reader.close()
