"""The number of replicas of the topics that a program creates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bascule.adapter.inbound.log import InboundLog
from bascule.adapter.inbound.spec import ActivationSpec
from bascule.adapter.inbound.state import Place
from bascule.adapter.inbound.topics import set_up
from bascule.core.errors import InvalidInput
from bascule.kafka import clients
from bascule.kafka.replication import MIN_INSYNC_REPLICAS, REPLICATION_FACTOR, Replication, replication_of
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_log import KafkaLog
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory

REPLICATED: Mapping[str, Any] = {**SETTINGS, REPLICATION_FACTOR: 3, MIN_INSYNC_REPLICAS: "2"}


def use_transactions(kafka: Mapping[str, Any]) -> None:
    log, resource = KafkaLog(kafka, topic="decisions"), KafkaResource("kafka", kafka, prefix="xa")
    log.read()
    resource.recover()
    resource.close()
    log.close()


def use_adapter(kafka: Mapping[str, Any]) -> None:
    set_up(kafka, ActivationSpec(topics=("source",), group="shop"))
    log = InboundLog("inbound", kafka, group="shop")
    log.owner(Place("source", 0))
    log.close()


@pytest.mark.parametrize(
    ("use", "topics"),
    [(use_transactions, {"decisions", "xa.side", "xa.log"}), (use_adapter, {"shop.retry", "shop.dead-letter", "shop.inbound"})],
)
def test_topics_of_program_have_number_of_replicas_that_its_settings_say(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[Mapping[str, Any]], None], topics: set[str]
) -> None:
    kafka = KafkaInMemory(monkeypatch)
    kafka.create("source")
    use(REPLICATED)
    created = {name: (topic.replicas, topic.config["min.insync.replicas"]) for name, topic in kafka.topics.items() if name != "source"}
    assert created == dict.fromkeys(topics, (3, "2"))


def test_program_without_these_settings_gets_defaults_of_cluster() -> None:
    assert replication_of(SETTINGS) == Replication(-1, None)
    assert replication_of({REPLICATION_FACTOR: "2"}) == Replication(2, None)
    assert replication_of({}).settings == {}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({REPLICATION_FACTOR: 0}, "invalid bascule.replication.factor=0"),
        ({MIN_INSYNC_REPLICAS: "many"}, "invalid bascule.min.insync.replicas='many'"),
        ({REPLICATION_FACTOR: 1, MIN_INSYNC_REPLICAS: 2}, "bascule.min.insync.replicas=2 is more than bascule.replication.factor=1"),
        ({"bascule.replicas": 3}, "unknown setting 'bascule.replicas'; expected 'bascule.replication.factor'"),
    ],
)
def test_wrong_number_of_replicas_is_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        replication_of(settings)


def test_librdkafka_does_not_get_settings_of_bascule() -> None:
    clients.admin({"bootstrap.servers": "127.0.0.1:1", REPLICATION_FACTOR: 3})
    with pytest.raises(InvalidInput, match="setting for programs"):
        clients.check_settings({REPLICATION_FACTOR: 3})
