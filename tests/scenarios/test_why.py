"""`bascule why` on a real broker with pipelines: the life of messages from the journal, the target topic and the audit topic."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bascule.client import Acknowledge, ConnectionFactory, Queue
from bascule.client.message import Message
from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.topics import create
from tests.support.speed import SLOWNESS
from tests.support.system import System, wait_for

TARGET, AUDIT = "why.orders", "why.audit"
CONFIG = f"""
[audit]
topic = "{AUDIT}"
messages = true
[pipelines]
master = "local[2]"
[[address]]
match = "failing"
max_delivery_attempts = 1
[[divert]]
name = "orders"
from = "orders"
to = "{TARGET}"
"""
#: A first pass through Spark, on a loaded machine.
FOLLOW_TIMEOUT_S = 300 * SLOWNESS

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def running(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    create(kafka.bootstrap, TARGET, AUDIT)
    with System(kafka.bootstrap, tmp_path_factory.mktemp("why"), prefix="why", config=CONFIG) as system:
        system.pipelines.start()
        yield system


def environment(system: System) -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "BASCULE_CONFIG": str(system.data_dir / "bascule.toml"),
        "BASCULE_BRIDGE__ID": system.prefix, "BASCULE_JOURNAL__PREFIX": system.prefix,
        "BASCULE_KAFKA__BOOTSTRAP_SERVERS": system.bootstrap, "BASCULE_EMBEDDED__DATA_DIR": str(system.data_dir),
    }  # fmt: skip


def command(system: System, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bascule", "why", *arguments, "--format", "json"],
        env=environment(system), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def why(system: System, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Return the answer of one search, after its last event in a search that follows."""
    process = command(system, *arguments)
    out, err = process.communicate(timeout=FOLLOW_TIMEOUT_S)
    assert process.returncode == code, err
    story: dict[str, Any] = json.loads(out if "--follow" not in arguments else out.splitlines()[-1])
    return story


def whats(story: dict[str, Any]) -> list[str]:
    return [event["what"] for event in story["events"]]


def send(system: System, queue: str) -> str:
    with ConnectionFactory(system.url).connect() as context:
        return str(context.send(Queue(queue), Message("content")).message_id)


def receive(system: System, queue: str) -> None:
    with ConnectionFactory(system.url).connect() as context, context.consumer(Queue(queue)) as consumer:
        assert consumer.receive(60 * SLOWNESS) is not None


def test_follow_ends_when_the_message_is_acknowledged_and_diverted(running: System) -> None:
    message_id = send(running, "orders")
    following = command(running, message_id, "--follow")
    assert following.stdout is not None
    first = json.loads(following.stdout.readline())
    assert first["what"] in ("accepted", "sent by a client")
    receive(running, "orders")
    out, err = following.communicate(timeout=FOLLOW_TIMEOUT_S)
    assert following.returncode == 0, err
    story = json.loads(out.splitlines()[-1])
    assert story["ended"]
    (message,) = story["messages"]
    (queue,), (divert,) = message["queues"], message["diverts"]
    assert (message["address"], queue["queue"], queue["held"]) == ("orders", "orders", False)
    assert (divert["divert"], divert["state"], divert["topic"], divert["partition"], divert["offset"]) == (
        "orders",
        "written",
        TARGET,
        0,
        0,
    )
    found = why(running, message_id.removeprefix("ID:"))
    assert {"sent by a client", "accepted", "transferred to a client", "left the queue", "diverted"} <= set(whats(found))
    assert found["journal"]["first"] == 0


def test_following_an_unknown_id_ends_with_an_interrupt(running: System) -> None:
    following = command(running, "ID:nobody", "--follow")
    reads = f"/proc/{following.pid}/task"
    wait_for(lambda: len(os.listdir(reads)) > 3, "the Kafka client of the command")
    following.send_signal(signal.SIGINT)
    out, _ = following.communicate(timeout=FOLLOW_TIMEOUT_S)
    assert following.returncode in (1, 130)
    assert "messages" not in out or json.loads(out.splitlines()[-1])["messages"] == []


def test_unknown_id_is_a_negative_result_with_its_reasons(running: System) -> None:
    story = why(running, "ID:nobody", code=1)
    assert story["messages"] == []
    assert any(sentence.startswith("No message with this id") for sentence in story["unrecorded"])


def test_dead_letter_and_its_purge_are_in_one_life(running: System) -> None:
    message_id = send(running, "failing")
    with ConnectionFactory(running.url).connect(Acknowledge.CLIENT) as context, context.consumer(Queue("failing")) as consumer:
        message = consumer.receive(60 * SLOWNESS)
        assert message is not None
        context.recover()
    wait_for(lambda: running.depth("DLQ") == 1, "the dead letter")
    running.act("queues/purge", name="DLQ")
    story = why(running, message_id)
    original, dead = story["messages"]
    assert original["queues"][0]["state"] == "dead-lettered"
    assert (dead["copied_from"], dead["address"], dead["reason"]) == (original["message"], "DLQ", "delivery-attempts")
    assert "administration" in whats(story)
    assert story["ended"]
