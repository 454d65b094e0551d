"""Driver, broker and Kafka are killed with -9 during each verb: the wanted state is reached, and nothing is lost, doubled or reordered."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bascule.client import Queue, connect
from bascule.core.crash import ARMED_VARIABLE, ONCE_VARIABLE
from tests.scenarios.bridge import Reader
from tests.scenarios.test_up import Running, up
from tests.scenarios.topics import create, produce
from tests.support.system import PYTHON_FAILOVER, wait_for

CONTROL = ["hold.before", "hold.after", "offsets.before", "offsets.after"]
#: A verb, and the state that it brings about.
VERBS = (("pause", "paused"), ("resume", "running"), ("stop", "stopped"), ("restart", "stopped"), ("resume", "running"))
#: The driver starts with Spark again after each kill, on a busy machine.
REACHED_S = 240.0
CONFIG = """
[[divert]]
name = "taking"
from = "orders"
to = "out.taking"
exclusive = true

[[divert]]
name = "other"
from = "orders"
to = "out.other"

[[divert]]
name = "apart"
from = "orders"
to = "out.apart"
group = "apart"

[[ingress]]
name = "back"
topics = ["in"]
to = "back"
routing = "anycast"
unbound = "keep"
"""


def ask(running: Running, method: str, path: str, **arguments: Any) -> Any:
    """Return the answer of the admin server, None while there is none."""
    body = json.dumps(arguments).encode() if arguments else None
    request = urllib.request.Request(f"http://127.0.0.1:{running.ports['admin']}/{path}", body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except (OSError, urllib.error.URLError):
        return None


def _move_back(running: Running, pipeline: str, part: str, awaited: Callable[[str, Callable[[], Any]], None]) -> None:
    """Move a pipeline to its first record while a part is killed, and resume it."""
    answers: list[Any] = []

    def answered(method: str, path: str, **arguments: str) -> bool:
        answers.append(ask(running, method, f"{pipeline}/{path}", **arguments))
        return answers[-1] is not None

    awaited("an answer to stop", lambda: answered("PUT", "stop"))
    awaited("stopped", lambda: answered("GET", "status") and answers[-1]["state"] == "stopped")
    awaited("a plan", lambda: answered("PATCH", "offsets", to="earliest"))
    assert answers[-1]["moves"]
    token = answers[-1]["token"]
    awaited("the confirmation", lambda: answered("PATCH", "offsets", token=token))
    running.kill(part)
    awaited("the move", lambda: answered("GET", "offsets") and answers[-1]["request"]["state"] == "done")
    awaited("an answer to resume", lambda: answered("PUT", "resume"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", ["pipelines", "broker", "kafka"])
def test_verbs_reach_the_wanted_state_though_driver_broker_and_kafka_are_killed(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "crashed"
    once.mkdir()
    if part == "pipelines":
        monkeypatch.setenv(ARMED_VARIABLE, ",".join(CONTROL))
        monkeypatch.setenv(ONCE_VARIABLE, str(once))
    config = tmp_path / "bascule.toml"
    config.write_text(CONFIG)
    with up(tmp_path / "data", "--config", str(config)) as running, connect(PYTHON_FAILOVER.format(running.url)) as client:
        kafka = f"127.0.0.1:{running.ports['kafka']}"
        create(kafka, "in")  # not the topic of a divert: an ingress leaves out what its own bridge has written
        producer = client.producer(Queue("orders"))
        reader = Reader(kafka, ("out.taking", "out.other", "out.apart"))
        sent: list[str] = []

        def send() -> None:
            sent.append(str(len(sent)))
            producer.send(sent[-1])
            produce(kafka, "in", sent[-1:])

        def received(count: int) -> list[Any]:
            with client.consumer(Queue("back")) as consumer:
                found = [consumer.receive(REACHED_S) for _ in range(count)]
                extra = consumer.receive(1.0)
            return [message and message.body for message in (*found, *([] if extra is None else [extra]))]

        def arrived(topic: str) -> list[str]:
            reader.poll()
            return [(message.value() or b"").decode() for message in reader.seen if message.topic() == topic]

        def progress(what: str) -> str:
            return f"{what}; sent {len(sent)}, {[len(arrived(f'out.{name}')) for name in ('taking', 'other', 'apart')]}"

        def awaited(what: str, condition: Callable[[], Any]) -> None:
            wait_for(condition, partial(progress, what), REACHED_S)

        send()
        awaited("the first message", lambda: arrived("out.taking") == arrived("out.apart") == sent)
        for verb, state in VERBS:
            send()
            method = "POST" if verb == "restart" else "PUT"
            for pipeline in ("diverts/taking", "ingresses/back"):
                awaited(f"an answer to {verb}", lambda pipeline=pipeline: ask(running, method, f"{pipeline}/{verb}"))  # noqa: B023
            running.kill(part)
            send()
            for pipeline in ("diverts/taking", "ingresses/back"):
                awaited(
                    f"{verb} of {pipeline}",
                    lambda pipeline=pipeline: (ask(running, "GET", f"{pipeline}/status") or {}).get("state") == state,  # noqa: B023
                )
            held = len(arrived("out.taking"))
            send()
            awaited("the other diverts", lambda: arrived("out.other") == arrived("out.apart") == sent)
            if state == "running":
                awaited("the resumed divert", lambda: arrived("out.taking") == sent)
            else:
                assert len(arrived("out.taking")) == held, "the divert carries although it is held"
        for name in ("taking", "other", "apart"):
            assert arrived(f"out.{name}") == sent
        assert received(len(sent)) == sent
        for pipeline in ("diverts/taking", "ingresses/back"):
            _move_back(running, pipeline, part, awaited)
        awaited("the repeated records", lambda: arrived("out.taking") == 2 * sent)
        send()
        awaited("the next record", lambda: arrived("out.taking") == [*sent[:-1], *sent])
        assert arrived("out.other") == arrived("out.apart") == sent
        assert received(len(sent)) == sent
        reader.close()
    assert {each.name for each in once.iterdir()} == (set(CONTROL) if part == "pipelines" else set())
