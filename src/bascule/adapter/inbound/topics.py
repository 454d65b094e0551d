"""The topics of a group: the first activation creates them, and each activation checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bascule.adapter.inbound.spec import ActivationSpec
from bascule.kafka.admin import Topics
from bascule.kafka.appender import CLIENT_SETTINGS
from bascule.kafka.guards import TopicRole, ensure

#: Room for the headers that a failed record gets.
HEADERS_BYTES_MAX = 16 << 10
RETRY_PARTITIONS = 4
#: Kafka's default for the maximum record size.
RECORD_BYTES = 1 << 20


def set_up(kafka: Mapping[str, Any], spec: ActivationSpec) -> None:
    """Create the retry and dead-letter topics, for records as large as the sources'. Raises Unavailable, InvalidInput, UnsafeTopic."""
    kafka = {**CLIENT_SETTINGS, **kafka}
    topics = Topics(kafka)
    topics.reach()
    there = topics.partitions()
    sizes = [int(topics.config(topic)["max.message.bytes"]) for topic in there if spec.reads(topic)]
    largest = max([RECORD_BYTES, *sizes]) + HEADERS_BYTES_MAX
    config = {"retention.ms": "-1", "max.message.bytes": str(largest)}
    for topic, partitions in ((spec.retry_topic, RETRY_PARTITIONS), (spec.dead_letter_topic, 1)):
        ensure(kafka, topic, TopicRole.WAITING, partitions, config, record_bytes=largest)


def missing(kafka: Mapping[str, Any], spec: ActivationSpec) -> list[str]:
    """Return the sources that do not exist. Raises Unavailable."""
    return spec.missing(Topics({**CLIENT_SETTINGS, **kafka}).partitions())
