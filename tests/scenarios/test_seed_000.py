"""The two sequences that made other bridges produce doubles (a crash between a step and the saving of its state), step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.scenarios.conftest import Connect
from tests.scenarios.topics import Reader, create, produce

from bascule.embedded.kafka import EmbeddedKafka
from bascule.testing.proxy import Proxy
from bascule.testing.system import System, failover

pytestmark = pytest.mark.timeout(600)
CONFIG = """
[pipelines]
master = "local[2]"

[[divert]]
name = "orders"
from = "orders"
to = "seed-000.out"
start = "earliest"

[[ingress]]
name = "payments"
topics = ["seed-000.in"]
to = "payments"
routing = "anycast"
unbound = "keep"
"""


@pytest.fixture(scope="module")
def bridge(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    create(kafka.bootstrap, "seed-000.out", "seed-000.in")
    with System(kafka.bootstrap, tmp_path_factory.mktemp("seed-000"), prefix="seed-000", config=CONFIG) as running:
        running.pipelines.start()
        yield running


def start_again(bridge: System) -> None:
    """As after the crash of a machine: both come back at once."""
    for part in (bridge.broker, bridge.pipelines):
        part.kill()
        part.launch()
    bridge.broker.wait_ready()


def test_jms_to_kafka_messages_2_and_3_are_on_their_way_and_4_is_stored_and_not_answered_when_all_dies(
    connect_to: Connect, bridge: System
) -> None:
    with (
        Proxy(bridge.port) as proxy,
        closing(Reader(bridge.bootstrap, "seed-000.out")) as topic,
        closing(Reader(bridge.bootstrap, "seed-000.out", committed=False)) as topic_in_flight,
    ):
        producer = connect_to(failover(proxy.url)).session().producer("queue:orders")
        producer.send("message 1")
        topic.read_until("message 1")
        producer.send("message 2")
        producer.send("message 3")
        topic_in_flight.read_until("message 2")
        bridge.pipelines.kill()
        proxy.hold_answers()
        unanswered = producer.submit_send("message 4")
        bridge.wait_depth("orders", 4)
        assert not unanswered.done()
        bridge.broker.kill()
        proxy.cut()
        start_again(bridge)
        unanswered.result(30)
        assert proxy.requests.count(b"message 4") == 2, "the client has not repeated it"
        producer.send("the end")
        expected = ["message 1", "message 2", "message 3", "message 4", "the end"]
        bridge.pipelines.wait_ready()
        assert topic.read_until("the end") == expected, topic.ids
        messages = connect_to(bridge.url).session().consumer("queue:orders").receive_all(5)
        assert [message.body for message in messages] == expected


def test_kafka_to_jms_records_4_and_5_are_in_the_queue_and_6_is_not_when_all_dies(connect_to: Connect, bridge: System) -> None:
    produce(bridge.bootstrap, "seed-000.in", ["record 1", "record 2", "record 3"])
    bridge.wait_depth("payments", 3)
    produce(bridge.bootstrap, "seed-000.in", ["record 4", "record 5"])
    bridge.wait_depth("payments", 5)
    produce(bridge.bootstrap, "seed-000.in", ["record 6"])
    start_again(bridge)
    produce(bridge.bootstrap, "seed-000.in", ["record 7"])
    bridge.pipelines.wait_ready()
    bridge.wait_depth("payments", 7)
    messages = connect_to(bridge.url).session().consumer("queue:payments").receive_all(7)
    assert [message.body for message in messages] == [f"record {number}" for number in range(1, 8)]
