"""The clients of Kafka. All clients of the product are made here, so that a test can replace Kafka for the whole product.

librdkafka writes its log to standard error, one line for each connection that fails. Bascule itself reports failures of Kafka, so a
client logs only fatal errors, unless its settings have a ``log_level``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from bascule.core.errors import InvalidInput
from bascule.kafka.errors import words
from bascule.kafka.event_producer import EventProducer, available
from bascule.kafka.replication import PREFIX, of_librdkafka

if TYPE_CHECKING:
    from bascule.core.log import ClientLog

#: Syslog's level "critical".
_LOG_LEVEL: Final = 2
#: How often a client asks for the leader without a reason. A node that is cut off from its peers, but not from the client, continues to
#: call itself the leader and gives no reason.
_REFRESH_MS: Final = 10_000
#: How long a client for questions waits for an answer about the cluster before it asks another node. A suspended node never answers.
_CLUSTER_ANSWER_MS: Final = 10_000
#: How long a consumer waits for its connection before its assignment. After a second it would find its partitions without this wait.
_INTRODUCTION_S: Final = 1.0


def producer(settings: Mapping[str, Any], logger: ClientLog | None = None) -> Producer:
    """Make a producer that passes its log lines to ``logger``. Raises KafkaException for settings that librdkafka refuses."""
    return Producer(_quiet(settings)) if logger is None else Producer(_quiet(settings), logger=logger)


def event_producer(settings: Mapping[str, Any], topic: str) -> EventProducer | None:
    """Make a producer for one topic that reports to a file descriptor; None if the installed Kafka client has none, or no such settings.

    Raises KafkaException for settings that librdkafka refuses.
    """
    quiet = _quiet(settings)
    return EventProducer(quiet, topic) if available(quiet) else None


def consumer(settings: Mapping[str, Any], logger: ClientLog | None = None) -> Consumer:
    """Make a consumer that passes its log lines to ``logger``.

    Raises KafkaException for settings that librdkafka refuses, or if librdkafka cannot start a thread.
    """
    return Consumer(_quiet(settings)) if logger is None else Consumer(_quiet(settings), logger=logger)


def admin(settings: Mapping[str, Any]) -> AdminClient:
    """Make a client for requests about topics and offsets. Raises KafkaException for settings that librdkafka refuses."""
    return AdminClient(_quiet({"socket.timeout.ms": _CLUSTER_ANSWER_MS, **settings}))


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check settings of librdkafka without a connection. Raises InvalidInput for settings that librdkafka refuses.

    librdkafka checks the value of each setting, reads the certificates, and knows which SASL mechanisms it was built with.
    """
    if own := sorted(name for name in settings if name.startswith(PREFIX)):
        raise InvalidInput(
            f"kafka.client: {own[0]} is a setting for programs; use journal.replication_factor and journal.min_insync_replicas"
        )
    try:
        admin({name: value for name, value in settings.items() if name != "bootstrap.servers"})
    except KafkaException as error:
        raise InvalidInput(f"kafka.client: librdkafka refuses the settings: {words(error)}") from error


def introduce(client: Producer | Consumer, topic: str, timeout_s: float) -> None:
    """Wait until a new client has a connection and knows a topic. Raises KafkaException.

    A client that looks for a topic, a coordinator or a producer id while it has no connection tries again after 500 ms to 1 s.
    """
    client.list_topics(topic, timeout=timeout_s)


def assign(consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
    """Assign partitions to a consumer. The first record comes after some 20 to 70 ms; without the introduction often after a second."""
    with suppress(KafkaException):  # the consumer itself goes on trying
        introduce(consumer, partitions[0].topic, _INTRODUCTION_S)
    consumer.assign(list(partitions))


def _quiet(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"log_level": _LOG_LEVEL, "topic.metadata.refresh.interval.ms": _REFRESH_MS, **of_librdkafka(settings)}
