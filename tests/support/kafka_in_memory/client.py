"""The common part of the clients of the Kafka in memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from bascule.kafka.replication import of_librdkafka
from tests.support.kafka_in_memory.state import failure
from tests.support.librdkafka import refused

if TYPE_CHECKING:
    from tests.support.kafka_in_memory.cluster import KafkaInMemory


class MemoryClient:
    """A client. Raises KafkaException for settings that librdkafka refuses, as the client that ships does."""

    def __init__(self, kafka: KafkaInMemory, settings: Mapping[str, Any]) -> None:
        settings = of_librdkafka(settings)
        if why := refused(settings):
            raise failure(KafkaError._INVALID_ARG, reason=why)
        self.kafka = kafka
        self.settings = dict(settings)
        self.knows_controller = kafka.brokers > 0

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self.kafka.meet("list_topics")
        with self.kafka.turn:
            self.knows_controller = self.kafka.brokers > 0
            listed = {
                name: SimpleNamespace(
                    error=None,
                    partitions={
                        number: SimpleNamespace(leader=1, replicas=[1] * each.replicas, isrs=[1] * each.in_sync)
                        for number in range(len(each.partitions))
                    },
                )
                for name, each in self.kafka.topics.items()
                if topic in (None, name)
            }
        return SimpleNamespace(topics=listed, brokers=dict.fromkeys(range(self.kafka.brokers)))
