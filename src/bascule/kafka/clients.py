"""The clients of Kafka: each one of the product is made here, so that a test can give the whole product another Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

if TYPE_CHECKING:
    from bascule.core.log import ClientLog


def producer(settings: Mapping[str, Any], logger: ClientLog | None = None) -> Producer:
    """Make a producer, which hands its own lines of log to ``logger``. Raises KafkaException for settings that librdkafka refuses."""
    return Producer(dict(settings)) if logger is None else Producer(dict(settings), logger=logger)


def consumer(settings: Mapping[str, Any]) -> Consumer:
    """Make a consumer. Raises KafkaException for settings that librdkafka refuses, or where it cannot start a thread."""
    return Consumer(dict(settings))


def admin(settings: Mapping[str, Any]) -> AdminClient:
    """Make a client for questions about topics and offsets. Raises KafkaException for settings that librdkafka refuses."""
    return AdminClient(dict(settings))
