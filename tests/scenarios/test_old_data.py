"""This version reads data that the first version stored: journal, snapshot, positions, branches, decisions, inbound log."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bascule.adapter.inbound import InboundLog
from bascule.adapter.inbound.state import Place
from bascule.client import Queue, Topic, connect
from bascule.core.xid import Xid
from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka
from bascule.xa import FileLog
from bascule.xa.errors import Code
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_log import KafkaLog
from bascule.xa.log import DecisionLog, Outcome
from bascule.xa.xid import branch
from tests.scenarios.topics import Reader, produce
from tests.support.client import SOON_S
from tests.support.system import PYTHON_FAILOVER, System

DATA = Path(__file__).parents[1] / "golden" / "data-v1"
FACTS: dict[str, Any] = json.loads((DATA / "facts.json").read_text())
GTRID, ROLLED_BACK = FACTS["gtrid"].encode(), FACTS["rolled_back"].encode()
#: Messages that were waiting, or delivered to a consumer and not settled.
DEPTHS: dict[str, int] = FACTS["depths"]
CONFIG = """
[[divert]]
name = "audit"
from = "flights"
to = "golden.flights"
start = "earliest"

[[ingress]]
name = "stock"
topics = ["golden.stock"]
to = "stock"
routing = "anycast"
unbound = "keep"
start = "earliest"
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("old-data")
    with tarfile.open(DATA / "data.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture(scope="module")
def old_kafka(directory: Path) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(directory / "kafka", jvm_options=SHORT_LIVED) as running:
        yield running


@pytest.fixture(scope="module")
def system(old_kafka: EmbeddedKafka, directory: Path) -> Iterator[System]:
    with System(old_kafka.bootstrap, directory / "system", prefix="bascule", config=CONFIG) as running:
        yield running


def decided(log: DecisionLog) -> None:
    state = log.read()
    commit, rollback = state.decisions[GTRID], state.decisions[ROLLED_BACK]
    assert (commit.outcome, commit.resources, commit.by) == (Outcome.COMMIT, ("jms", "kafka"), "golden/1")
    assert rollback.outcome is Outcome.ROLLBACK
    heuristic = state.heuristics[branch(ROLLED_BACK, "db")]
    assert (heuristic.code, heuristic.wanted, heuristic.text) == (Code.XA_HEURCOM, Outcome.ROLLBACK, "by hand")
    log.close()


def test_decision_log_file_of_the_first_version_is_readable(directory: Path) -> None:
    decided(FileLog(directory / "golden.xalog"))


def test_kafka_decision_log_of_the_first_version_is_readable(old_kafka: EmbeddedKafka) -> None:
    decided(KafkaLog({"bootstrap.servers": old_kafka.bootstrap}))


def test_inbound_log_of_the_first_version_is_readable(old_kafka: EmbeddedKafka) -> None:
    log = InboundLog("inbound", {"bootstrap.servers": old_kafka.bootstrap}, group="golden")
    flights = log.flights(Place("payments", 0))
    assert set(flights.keys) == {17, 18}
    assert flights.claims == {branch(GTRID, "inbound"): 17}
    log.close()


def test_messages_of_the_first_version_keep_their_queues_and_order(system: System) -> None:
    assert {queue["name"]: queue["messages"] + queue["delivering"] for queue in system.status()["queues"]} | {"later": 0} == DEPTHS
    with connect(system.url, client_id="golden") as context:
        orders = [message.body for message in context.browse(Queue("orders"))]
        assert orders == [f"order {number}" for number in range(1, 60)]
        with context.durable_consumer(Topic("news"), "reader", selector="n > 1") as reader:
            message = reader.receive(SOON_S)
            assert message is not None
            assert message.body == "news 2"
        with context.consumer(Queue("grouped")) as consumer:
            message = consumer.receive(SOON_S)
            assert message is not None
            assert message.group_id == "a"


def test_prepared_branches_of_the_first_version_are_listed_and_can_be_committed(system: System, old_kafka: EmbeddedKafka) -> None:
    jms = JmsResource("jms", PYTHON_FAILOVER.format(system.url), timeout_s=SOON_S)
    kafka = KafkaResource("kafka", {"bootstrap.servers": old_kafka.bootstrap})
    xids = {"jms": Xid.parse(FACTS["xid"]), "kafka": branch(GTRID, "kafka")}
    for resource, xid in ((jms, xids["jms"]), (kafka, xids["kafka"])):
        assert list(resource.recover()) == [xid]
        resource.commit(xid)
        assert list(resource.recover()) == []
        resource.close()
    with connect(system.url) as context:
        assert [message.body for message in context.browse(Queue("bill.out"))] == ["billed 0"]
        assert [message.body for message in context.browse(Queue("bill.in"))] == ["bill 1", "bill 2"]
    produce(old_kafka.bootstrap, "golden.paid", ["last"])
    with closing(Reader(old_kafka.bootstrap, "golden.paid")) as reader:
        assert reader.read_until("last") == ["paid 1", "paid 2", "last"]


@pytest.mark.slow
def test_pipelines_resume_from_positions_of_the_first_version(system: System, old_kafka: EmbeddedKafka) -> None:
    produce(old_kafka.bootstrap, "golden.flights", ["mark"])
    with connect(system.url) as context:
        context.send(Queue("flights"), "flight 5")
    system.pipelines.start()
    with closing(Reader(old_kafka.bootstrap, "golden.flights")) as reader:
        values = reader.read_until("flight 5")
    # Kafka deletes the records of the first run after its retention time.
    assert values[values.index("mark") :] == ["mark", "flight 5"]
    produce(old_kafka.bootstrap, "golden.stock", ["stock 4"])
    system.wait_depth("stock", DEPTHS["stock"] + 1)
    with connect(system.url) as context:
        bodies = [message.body for message in context.browse(Queue("stock"))]
    assert bodies == [f"stock {number}" for number in range(5)]
