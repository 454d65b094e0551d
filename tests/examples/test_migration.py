"""The guides for migrations: what they let readers type is taken by Qpid JMS and by the broker."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from tests.examples.pages import ROOT, blocks
from tests.support.java import JARS, SMALL_JVM
from tests.support.speed import SLOWNESS
from tests.support.system import System

GUIDE = ROOT / "docs" / "guides" / "migrate-core-openwire.md"
RUN_TIMEOUT_S = 120.0 * SLOWNESS
#: A client that knows JNDI and JMS only; the properties name the rest.
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
