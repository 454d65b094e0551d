"""The journal is as short as queues, pipelines and the owner's retention allow, and old messages that are needed survive trimming."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from bascule.client import Message, Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from bascule.kafka.transactional import TransactionalWriter
from bascule.server.housekeeping import StoredMessages
from bascule.writer.pipeline_holds import DISABLED
from bascule.writer.position import BEGUN, POSITION_PARTITIONS, Position, position_key
from tests.scenarios.conftest import Connect
from tests.scenarios.crash_load import from_kafka
from tests.support.qpid import Session
from tests.support.system import PYTHON_FAILOVER, System, wait_for

PREFIX = "bounded"
CONFIG = """
[broker]
session_timeout_s = 30

[journal]
snapshot_records = 100
retention_s = 0
pinned_bytes = "1MiB"
"""
#: A send and its acknowledgement are two records, each in its own turn: this number of messages causes some snapshots.
MESSAGES = 300
#: This number of messages causes less than one snapshot.
FEW = 20


@pytest.fixture(scope="module")
def bounded(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp(PREFIX), prefix=PREFIX, config=CONFIG) as system:
        yield system


def first_offset(system: System, topic: str = "journal") -> int:
    return TopicHistory({"bootstrap.servers": system.bootstrap}, f"{PREFIX}.{topic}", 0).earliest()


def stored(system: System) -> int:
    return len(StoredMessages({"bootstrap.servers": system.bootstrap}, f"{PREFIX}.store").read())


def pin_of(system: System, keeper: str) -> dict[str, Any]:
    """Return the status of the first pin of a kind."""
    return next((pin for pin in system.status()["pins"] if pin["keeper"] == keeper), {})


def printed(system: System) -> str:
    """Return the status as the command line prints it."""
    command = [sys.executable, "-m", "bascule.cli", "status", "--admin", f"http://127.0.0.1:{system.admin_port}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def traffic(session: Session, queue: str, messages: int = MESSAGES) -> None:
    """Send and receive messages, some at a time."""
    producer, consumer = session.producer(queue), session.consumer(queue)
    for _ in range(messages // FEW):
        producer.send("{n}", count=FEW)
        assert len(consumer.receive_many(FEW)) == FEW
    consumer.close()
    producer.close()


def wait_in_traffic(session: Session, queue: str, condition: Callable[[], Any], what: str) -> Any:
    """Check while messages are sent and received: housekeeping needs new records, but fewer between two checks than a round handles."""

    def found() -> Any:
        traffic(session, queue, FEW)
        return condition()

    return wait_for(found, what)


def test_old_message_does_not_stop_the_trim_of_the_journal_and_survives_in_the_store(
    bounded: System, connect_to: Connect, name: str, queue: str
) -> None:
    session = connect_to(bounded.failover_url).session()
    session.producer(f"{queue}.old").send("old", properties={"n": 1})
    begun = first_offset(bounded)
    wait_in_traffic(session, queue, lambda: first_offset(bounded) - begun > MESSAGES, "the journal to be trimmed")
    wait_in_traffic(session, queue, lambda: stored(bounded) > 0, "the old message to be in the store")
    bounded.broker.restart()
    assert bounded.depth(f"{name}.old") == 1
    (old,) = connect_to(bounded.url).session().consumer(f"{queue}.old").receive_many(1)
    assert (old.body, old.properties["n"], old.redelivered) == ("old", 1, False)
    session = connect_to(bounded.url).session()
    wait_in_traffic(session, queue, lambda: stored(bounded) == 0, "the store to delete removed messages")
    bounded.broker.restart()
    assert bounded.depth(f"{name}.old") == 0


def test_ingress_topic_is_trimmed_after_the_journal_has_its_messages(bounded: System, connect_to: Connect, name: str, queue: str) -> None:
    session = connect_to(bounded.failover_url).session()
    session.producer(queue)  # creates the queue
    producer = clients.producer({"bootstrap.servers": bounded.bootstrap})
    for number in range(MESSAGES):
        producer.produce(f"{PREFIX}.ingress", from_kafka(name, str(number)))
    assert producer.flush(30) == 0
    bounded.wait_depth(name, MESSAGES)
    other = f"{queue}.other"
    wait_in_traffic(session, other, lambda: first_offset(bounded, "ingress") >= MESSAGES, "what ingresses brought to be trimmed")
    bounded.broker.restart()
    messages = connect_to(bounded.url).session().consumer(queue).receive_many(MESSAGES)
    assert [message.body for message in messages] == [str(number) for number in range(MESSAGES)]


def test_repeated_send_is_recognised_after_trim_and_broker_kill(bounded: System, connect_to: Connect, name: str, queue: str) -> None:
    kafka = {"bootstrap.servers": bounded.bootstrap}
    with connect(PYTHON_FAILOVER.format(bounded.url), timeout_s=60.0) as context:
        producer, own_id = context.producer(Queue(name)), {"_AMQ_DUPL_ID": name}
        first, second = producer.send("known by its message id"), producer.send(Message("by the sender's", properties=own_id))
        with context.consumer(Queue(name)) as consumer:
            assert [message and message.body for message in (consumer.receive(30), consumer.receive(30))] == [first.body, second.body]
        wait_for(lambda: bounded.depth(name) == 0, "the acknowledgements")
        end = TopicHistory(kafka, f"{PREFIX}.journal", 0).latest()
        session = connect_to(bounded.failover_url).session()
        wait_in_traffic(session, f"{queue}.traffic", lambda: first_offset(bounded) >= end, "the records of the sends to be trimmed")
        bounded.broker.restart()
        producer.repeat(first)
        producer.send(Message("by the sender's, in another message", properties=own_id))
        producer.send("new")
        assert [message.body for message in context.browse(Queue(name))] == ["new"]


def test_stalled_pipeline_pins_the_journal_up_to_the_configured_quota(bounded: System, connect_to: Connect, queue: str) -> None:
    kafka = {"bootstrap.servers": bounded.bootstrap}
    topics = Topics(kafka)
    topics.create(f"{PREFIX}.positions", POSITION_PARTITIONS, {"cleanup.policy": "compact"})
    topics.await_visible([f"{PREFIX}.positions"])
    at = TopicHistory(kafka, f"{PREFIX}.journal", 0).latest()
    key = position_key("divert:idle", f"{PREFIX}.journal", 0)
    writer = TransactionalWriter(kafka, f"{PREFIX}.idle", f"{PREFIX}.positions", key)
    began = Position(f"{PREFIX}.journal", "id", 0, 0, members=("idle",))  # this divert pins nothing
    writer.write([], None, replace(began, offset=at), {f"{BEGUN}idle": began})
    writer.close()

    session = connect_to(bounded.failover_url).session()
    wait_in_traffic(session, queue, lambda: pin_of(bounded, "pipeline").get("records", 0) > 0, "the pipeline to be shown with records")
    pin = pin_of(bounded, "pipeline")
    assert (pin["name"], pin["offset"], pin["reason"], pin["released"]) == ("divert:idle", at, DISABLED, False)
    assert pin["bytes"] > pin["records"]
    assert re.search(rf"^ *pipeline +divert:idle +{at} .* {DISABLED}", printed(bounded), re.MULTILINE)
    assert first_offset(bounded) <= at

    session.producer(queue).send("x" * 3_000_000)
    large = session.consumer(queue)
    assert len(large.receive_many(1)) == 1
    large.close()

    row = re.compile(r"^ *pipeline +divert:idle .* MiB .*; exceeds journal.pinned_bytes, unread records are deleted", re.MULTILINE)

    def released() -> bool:
        # The first round of housekeeping that counts the large message lists the queue; the round after the trim does not.
        return bool(pin_of(bounded, "pipeline").get("released")) and row.search(printed(bounded)) is not None

    wait_in_traffic(session, queue, released, "the quota to be used up")
    wait_in_traffic(session, queue, lambda: first_offset(bounded) > at, "the journal to be trimmed all the same")


def test_waiting_messages_and_records_without_snapshot_are_shown_as_pins(
    bounded: System, connect_to: Connect, name: str, queue: str
) -> None:
    session = connect_to(bounded.failover_url).session()
    session.producer(queue).send("{n}", count=20)  # so dense that several snapshots pass until the messages are moved to the store

    row = re.compile(rf"^ *queue +{re.escape(name)} .* the oldest message of the queue has not been consumed", re.MULTILINE)

    def shown() -> bool:
        return pin_of(bounded, "queue").get("name") == name and row.search(printed(bounded)) is not None

    wait_in_traffic(session, f"{queue}.other", shown, "the queue to be shown")
    # Another message may be in a queue at the moment of a snapshot; then it is the oldest.
    wait_in_traffic(
        session, f"{queue}.other", lambda: pin_of(bounded, "queue").get("name") != name, "the messages to be moved to the store"
    )
    uncovered = re.compile(r"^ *snapshot +\d+ .* no snapshot covers these records yet", re.MULTILINE)
    wait_in_traffic(session, f"{queue}.other", lambda: uncovered.search(printed(bounded)), "records without a snapshot to be shown")
