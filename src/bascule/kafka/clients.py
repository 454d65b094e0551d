"""The clients of Kafka: each one of the product is made here, so that a test can give the whole product another Kafka.

librdkafka writes its log to standard error, a line for each connection that fails. Bascule reports failures of Kafka itself, so a client
writes only what ends it, unless its settings have a ``log_level``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

if TYPE_CHECKING:
    from bascule.core.log import ClientLog

#: Syslog's "critical".
_LOG_LEVEL: Final = 2
#: How often a client asks who leads, without a reason. A node that is cut off from its peers, and not from the client, goes on calling
#: itself the leader, and gives no reason.
_REFRESH_MS: Final = 10_000


def producer(settings: Mapping[str, Any], logger: ClientLog | None = None) -> Producer:
    """Make a producer, which hands its own lines of log to ``logger``. Raises KafkaException for settings that librdkafka refuses."""
    return Producer(_quiet(settings)) if logger is None else Producer(_quiet(settings), logger=logger)


def consumer(settings: Mapping[str, Any]) -> Consumer:
    """Make a consumer. Raises KafkaException for settings that librdkafka refuses, or where it cannot start a thread."""
    return Consumer(_quiet(settings))


def admin(settings: Mapping[str, Any]) -> AdminClient:
    """Make a client for questions about topics and offsets. Raises KafkaException for settings that librdkafka refuses."""
    return AdminClient(_quiet(settings))


def _quiet(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"log_level": _LOG_LEVEL, "topic.metadata.refresh.interval.ms": _REFRESH_MS, **settings}
