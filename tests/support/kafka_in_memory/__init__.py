"""A Kafka in memory behind the product's own code: topics, transactions with fences, consumer groups, and faults on demand.

``KafkaInMemory(monkeypatch)`` replaces the functions of ``bascule.kafka.clients``, so that all code above librdkafka is the code that
ships. Values are librdkafka's own classes (``Message``, ``KafkaError``, ``TopicPartition``). Other behaviour of Kafka (replication, delays,
brokers that move) is left to the scenarios and to the model of ``tests/sim``.
"""

from tests.support.kafka_in_memory.cluster import SETTINGS, KafkaInMemory
from tests.support.kafka_in_memory.consumer import MemoryConsumer

__all__ = ["SETTINGS", "KafkaInMemory", "MemoryConsumer"]
