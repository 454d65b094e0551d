"""The program that moves waiting messages between Artemis and Bascule, in both directions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bascule.client import Acknowledge, Context, Float, Int, Long, Message, Queue, Topic, connect
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from bench.artemis import Artemis
from tests.examples.pages import ROOT
from tests.support.speed import SLOWNESS
from tests.support.system import System

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]
PROGRAM = ROOT / "examples" / "move_messages.py"
RUN_TIMEOUT_S = 90.0 * SLOWNESS
#: Time within which a waiting message arrives.
SOON_S = 10.0 * SLOWNESS


@pytest.fixture(scope="module")
def artemis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artemis]:
    with Artemis(tmp_path_factory.mktemp("artemis") / "broker") as running:
        yield running


@pytest.fixture(scope="module")
def system(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("move"), prefix="move") as running:
        yield running


@pytest.fixture(params=["to-bascule", "to-artemis"])
def brokers(request: pytest.FixtureRequest, artemis: Artemis, system: System) -> tuple[str, str]:
    """The URLs of the broker to move messages from, and of the broker to move them to."""
    return (artemis.url, system.url) if request.param == "to-bascule" else (system.url, artemis.url)


def run_program(source: str, queue: str, target: str) -> str:
    command: list[str | Path] = [sys.executable, PROGRAM, source, queue, target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def waiting(context: Context, queue: str) -> list[Message]:
    return list(context.browse(Queue(queue)))


def sent_messages() -> list[Message]:
    properties = {"text": "a", "truth": True, "int": Int(5), "long": Long(5), "double": 0.1, "float": Float(0.5)}
    return [
        Message("text", properties=properties, correlation_id="c-1", reply_to=Topic("answers"), type="order"),
        Message(b"\x00\xff", group_id="g", group_sequence=3),
        Message({"n": 1}, priority=2),
        Message(["a", 1], time_to_live_s=3600, priority=1),
        Message(None, properties={"_AMQ_DUPL_ID": "order-4711"}, priority=0, persistent=False),
    ]


def comparable(message: Message) -> tuple[object, ...]:
    """Return everything that a message carries, types of numbers included. A move may only add the duplicate id."""
    properties = {name: (type(value).__name__, value) for name, value in message.properties.items() if name != "_AMQ_DUPL_ID"}
    fields = ("kind", "body", "message_id", "correlation_id", "reply_to", "type", "group_id", "group_sequence", "persistent", "priority")
    times = (message.timestamp_ms, message.expiration_ms)
    return (*(getattr(message, name) for name in fields), properties, times)


def test_moved_messages_keep_order_ids_headers_properties_and_expiry(brokers: tuple[str, str], queue: str) -> None:
    source_url, target_url = brokers
    with connect(source_url) as source, connect(target_url) as target:
        source.producer(Queue(queue)).send_many(sent_messages())
        before = waiting(source, queue)
        assert run_program(source_url, queue, target_url) == "5 moved\n"
        after = waiting(target, queue)
        assert [comparable(message) for message in after] == [comparable(message) for message in before]
        assert after[-1].properties["_AMQ_DUPL_ID"] == "order-4711"
        assert waiting(source, queue) == []


def test_message_sent_but_not_acknowledged_before_a_kill_is_stored_once(
    brokers: tuple[str, str], queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    pass_on: Callable[[Message, Context, Queue], None] = __import__("move_messages").pass_on
    source_url, target_url = brokers
    numbers = [f"order {number}" for number in range(10)]
    with connect(source_url) as filler:
        filler.producer(Queue(queue)).send_many(numbers)
    with connect(source_url, acknowledge=Acknowledge.CLIENT) as source, connect(target_url) as target:
        consumer = source.consumer(Queue(queue))
        for _ in range(4):
            message = consumer.receive(SOON_S)
            assert message is not None
            pass_on(message, target, Queue(queue))
    assert run_program(source_url, queue, target_url) == "10 moved\n"
    with connect(target_url) as target:
        assert [message.body for message in waiting(target, queue)] == numbers


def test_messages_sent_to_artemis_by_a_core_client_can_be_moved(artemis: Artemis, system: System, queue: str) -> None:
    java = {**os.environ, "JAVA_HOME": str(find_jdk().home)}
    command: list[str | Path] = [artemis.directory / "bin" / "artemis", "producer", "--url", artemis.url.replace("amqp", "tcp")]
    command += ["--protocol", "core", "--destination", f"queue://{queue}", "--message-count", "20", "--threads", "1"]
    subprocess.run(command, env=java, capture_output=True, timeout=RUN_TIMEOUT_S, check=True)
    with connect(artemis.url) as source, connect(system.url) as target:
        before = waiting(source, queue)
        assert len(before) == 20
        assert run_program(artemis.url, queue, system.url) == "20 moved\n"
        assert [comparable(message) for message in waiting(target, queue)] == [comparable(message) for message in before]
