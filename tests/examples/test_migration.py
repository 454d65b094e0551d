"""The guides for migration: Qpid JMS and the broker accept what the guides tell readers to type."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer

from bascule.client import Message, Topic, connect
from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from tests.examples.pages import ROOT, blocks
from tests.support.java import JARS, SMALL_JVM
from tests.support.speed import SLOWNESS
from tests.support.system import System

GUIDE = ROOT / "docs" / "guides" / "migrate-core-openwire.md"
BRIDGE_GUIDE = ROOT / "docs" / "guides" / "migrate-jms-bridge.md"
#: Time for a message or record to pass through Spark.
SOON_S = 120.0 * SLOWNESS
RUN_TIMEOUT_S = 120.0 * SLOWNESS
#: A client that knows only JNDI and JMS; the properties name the rest.
CLIENT = """
import jakarta.jms.*;
import javax.naming.InitialContext;

public final class Lookup {
    public static void main(String[] arguments) throws Exception {
        InitialContext names = new InitialContext();
        ConnectionFactory factory = (ConnectionFactory) names.lookup("ConnectionFactory");
        Queue orders = (Queue) names.lookup("queues/orders");
        Topic prices = (Topic) names.lookup("topics/prices");
        Queue dynamic = (Queue) names.lookup("dynamicQueues/orders");
        Topic dynamicTopic = (Topic) names.lookup("dynamicTopics/prices");
        try (JMSContext context = factory.createContext()) {
            JMSConsumer subscriber = context.createConsumer(dynamicTopic);
            context.createProducer().send(orders, "order").send(prices, "price");
            System.out.println(context.createConsumer(dynamic).receiveBody(String.class, 30_000));
            System.out.println(subscriber.receiveBody(String.class, 30_000));
        }
    }
}
"""


@pytest.mark.services
@pytest.mark.timeout(300)
def test_destinations_and_factory_of_the_guide_are_found_by_jndi(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    (properties,) = blocks(GUIDE, "jndi")
    (tmp_path / "Lookup.java").write_text(CLIENT)
    with System(kafka.bootstrap, tmp_path / "broker", prefix=topic_prefix) as system:
        (tmp_path / "jndi.properties").write_text(properties.text.replace("amqp://127.0.0.1:5672", system.url))
        path = os.pathsep.join(map(str, [tmp_path, *classpath(JARS)]))
        done = subprocess.run(
            [find_jdk().executable, *SMALL_JVM, "-cp", path, tmp_path / "Lookup.java"],
            capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "order\nprice\n"), done.stderr


#: Key, value and headers.
Record = tuple[bytes | None, bytes | None, dict[str, bytes | None]]


def records(bootstrap: str, topic: str, count: int) -> list[Record]:
    """Return the first records of a topic."""
    settings = {"group.id": topic, "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
    consumer = Consumer({"bootstrap.servers": bootstrap, "topic.metadata.refresh.interval.ms": 500, **settings})
    consumer.subscribe([topic])
    try:
        found: list[Record] = []
        deadline = time.monotonic() + SOON_S
        while len(found) < count and time.monotonic() < deadline:
            record = consumer.poll(0.2)
            if record is not None and record.error() is None:
                found.append((record.key(), record.value(), dict(record.headers() or ())))
        return found
    finally:
        consumer.close()


@pytest.mark.services
@pytest.mark.timeout(600)
def test_bridge_of_the_guide_carries_messages_in_both_directions(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    (config,) = (block.text for block in blocks(BRIDGE_GUIDE, "config") if "[[divert]]" in block.text)
    orders, binary = Topic("kafka.orders.new"), [("jms.long.JMSMessageID", struct.pack(">q", 17))]
    with System(kafka.bootstrap, tmp_path / "system", prefix=topic_prefix, config=config) as system:
        system.pipelines.start()
        with connect(system.url) as context, context.consumer(orders) as subscriber:
            with_id = context.send(orders, Message("one", correlation_id="c-1", properties={"n": 5}))
            without = context.send(orders, "two")
            written = records(kafka.bootstrap, "orders.new", 2)
            assert [(key, value) for key, value, _ in written] == [(b"c-1", b"one"), ((without.message_id or "").encode(), b"two")]
            headers = written[0][2]
            assert (headers["jms.JMSMessageID"], headers["jms.body"], headers["jms.int.n"]) == (
                (with_id.message_id or "").encode(),
                b"text",
                b"5",
            )
            producer = Producer({"bootstrap.servers": kafka.bootstrap})
            producer.produce("orders.new", b"of the JMS Bridge", headers=binary)
            producer.produce("orders.new", b"three", key=b"k", headers=[("jms.int.n", b"6")])
            producer.flush()
            got = [subscriber.receive(SOON_S) for _ in range(3)]
            assert [message and message.body for message in got] == ["one", "two", b"three"]
            assert got[2] is not None
            assert (got[2].properties["n"], got[2].properties["kafka_topic"], got[2].properties["kafka_key"]) == (6, "orders.new", "k")
            ((_, value, _),) = records(kafka.bootstrap, f"{topic_prefix}.dead-letter", 1)
            assert value == b"of the JMS Bridge"
