"""Kafka in memory, behind the product's own code: topics, transactions with fences, consumer groups, and faults on demand.

``KafkaInMemory(monkeypatch)`` takes the place of the functions of ``bascule.kafka.clients``, so that everything above librdkafka is the
code that ships. Values are librdkafka's own classes (``Message``, ``KafkaError``, ``TopicPartition``). What the real Kafka does beyond this
(replication, delays, brokers that move) is left to the scenarios and to the model of ``tests/sim``.
"""

from tests.support.kafka_in_memory.cluster import SETTINGS, KafkaInMemory
from tests.support.kafka_in_memory.consumer import MemoryConsumer

__all__ = ["SETTINGS", "KafkaInMemory", "MemoryConsumer"]
