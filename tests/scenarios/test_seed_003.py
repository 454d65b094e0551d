"""The flows of a bridge, from a JMS publisher to a Kafka consumer and back, with disturbances."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from tests.scenarios.bridge import Reader as RawReader
from tests.scenarios.conftest import Connect
from tests.scenarios.topics import Reader
from tests.support.qpid import MessageType
from tests.support.system import System, wait_for

pytestmark = pytest.mark.timeout(600)
LARGE = str(8 << 20)
#: Larger than Kafka's default limit of a record.
LARGE_BODY_BYTES = 3_000_000
#: Time for pipelines to start Spark and to run the first batch.
ARRIVAL_S = 240.0
CONFIG = """
[pipelines]
dead_letter_topic = "seed-003.dead"
master = "local[2]"

[[divert]]
name = "orders"
from = "orders"
selector = "region = 'EU'"
to = "seed-003.orders"
exclusive = true
start = "earliest"

[[divert]]
name = "bodies"
from = "bodies"
to = "seed-003.bodies"
start = "earliest"

[[ingress]]
name = "back"
topics = ["seed-003.orders", "seed-003.in"]
to = "orders"
routing = "multicast"
start = "earliest"

[[ingress]]
name = "kept"
topics = ["seed-003.kept"]
to = "kept"
routing = "anycast"
body = "map"
unbound = "keep"
start = "earliest"
"""


@pytest.fixture(scope="module")
def bridge(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    for name in ("orders", "bodies", "in", "kept"):
        Topics({"bootstrap.servers": kafka.bootstrap}).create(f"seed-003.{name}", 1, {"max.message.bytes": LARGE})
    with System(kafka.bootstrap, tmp_path_factory.mktemp("seed-003"), prefix="seed-003", config=CONFIG) as running:
        running.pipelines.start()
        yield running


def text(headers: dict[str, bytes | str | None], name: str) -> str:
    value = headers[name]
    assert isinstance(value, bytes)
    return value.decode()


def test_exclusively_diverted_jms_message_reaches_kafka_and_no_jms_subscription(bridge: System, connect_to: Connect) -> None:
    connection = connect_to(bridge.url, client_id="seed-003")
    session = connection.session()
    subscriber = session.consumer("topic:orders", name="all", durable=True)
    producer = session.producer("topic:orders")
    begun_ms = int(time.time() * 1000)
    producer.send("to Kafka", properties={"region": "EU", "amount": 90}, correlation_id="c-1", jms_type="order")
    producer.send("stays here", properties={"region": "US"})
    with closing(Reader(bridge.bootstrap, "seed-003.orders")) as reader:
        assert reader.read_until("to Kafka") == ["to Kafka"]
        (headers,) = reader.headers
    names = ("bascule.origin", "jms.region", "jms.int.amount", "jms.JMSCorrelationID", "jms.JMSType", "jms.JMSDestination")
    assert [text(headers, name) for name in names] == ["seed-003", "EU", "90", "c-1", "order", "topic://orders"]
    assert begun_ms <= int(text(headers, "jms.JMSTimestamp")) <= int(time.time() * 1000)  # a time, not the name of a topic
    # The message of the exclusive divert is only in Kafka, and does not come back from there.
    assert [message.body for message in subscriber.receive_many(1, ARRIVAL_S)] == ["stays here"]
    assert subscriber.receive_many(1, 0) == []


def test_kafka_record_reaches_jms_subscriber_and_is_not_diverted_back(bridge: System, connect_to: Connect) -> None:
    session = connect_to(bridge.url, client_id="seed-003-reader").session()
    subscriber = session.consumer("topic:orders", name="from Kafka", durable=True, selector="source = 'kafka'")
    producer = clients.producer({"bootstrap.servers": bridge.bootstrap})
    producer.produce("seed-003.in", "from Kafka", headers={"source": b"kafka"})
    assert producer.flush(30) == 0
    (message,) = subscriber.receive_many(1, ARRIVAL_S)
    assert message.body == "from Kafka"
    # It is not diverted again, although the selector of the divert may match it.
    producer.produce("seed-003.in", "no data cycle", headers={"source": b"kafka", "region": b"EU"})
    assert producer.flush(30) == 0
    (message,) = subscriber.receive_many(1, ARRIVAL_S)
    assert message.body == "no data cycle"
    with closing(Reader(bridge.bootstrap, "seed-003.orders")) as reader:
        session.producer("topic:orders").send("behind it", properties={"region": "EU"})
        assert "no data cycle" not in reader.read_until("behind it")


def test_committed_kafka_records_wait_for_a_later_consumer_and_aborted_records_do_not_arrive(bridge: System, connect_to: Connect) -> None:
    producer = clients.producer({"bootstrap.servers": bridge.bootstrap, "transactional.id": "seed-003"})
    producer.init_transactions(30)
    for value, commit in (('{"n": 1}', True), ('{"n": 2}', False), ("no json", True), ('{"n": 3}', True)):
        producer.begin_transaction()
        producer.produce("seed-003.kept", value)
        assert producer.flush(30) == 0
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
    # No client has used the queue.
    wait_for(lambda: bridge.depth("kept") == 2, "the records", ARRIVAL_S)
    found = connect_to(bridge.url).session().consumer("queue:kept").receive_all(2)
    assert [message.body["n"] for message in found] == [1, 3]
    # A record that is not a valid message is dead-lettered in Kafka, with the reason.
    with closing(Reader(bridge.bootstrap, "seed-003.dead")) as dead:
        assert dead.read_until("no json")[-1] == "no json"
        assert "JSON" in text(dead.headers[-1], "__connect.errors.exception.message")


def test_no_body_type_is_diverted_as_null_and_large_bodies_are_diverted(bridge: System, connect_to: Connect) -> None:
    producer = connect_to(bridge.url).session().producer("queue:bodies")
    bodies: list[tuple[MessageType, Any]] = [
        ("map", {"price": 12.5}), ("stream", ["a", 7]), ("bytes", b"\x00\x01"), ("object", "serialized"), ("message", None),
        ("text", "x" * LARGE_BODY_BYTES),
    ]  # fmt: skip
    for kind, body in bodies:
        producer.send(body, type=kind)
    with closing(RawReader(bridge.bootstrap, ("seed-003.bodies",))) as reader:
        reader.wait_for(len(bodies))
        values = [message.value() for message in reader.seen]
    assert None not in values
    assert json.loads(values[0] or b"")["price"]["value"] == 12.5
    assert [each["value"] for each in json.loads(values[1] or b"")] == ["a", 7]
    assert values[2] == b"\x00\x01"
    assert b"serialized" in (values[3] or b"")
    assert values[4] == b""
    assert len(values[5] or b"") == LARGE_BODY_BYTES
