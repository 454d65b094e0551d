"""The topics of a group: made by the first activation where they are not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bascule.adapter.inbound.spec import ActivationSpec
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import CLIENT_SETTINGS

#: For the headers that a record is given when it has failed.
HEADERS_BYTES_MAX = 16 << 10
RETRY_PARTITIONS = 4
#: Kafka's default for the largest record.
RECORD_BYTES = 1 << 20


def set_up(kafka: Mapping[str, Any], spec: ActivationSpec) -> None:
    """Creates the retry and dead-letter topics, for records as large as the sources'. Raises Unavailable, InvalidInput."""
    topics = Topics({**CLIENT_SETTINGS, **kafka})
    topics.reach()
    there = topics.partitions()
    if missing := [topic for topic in (spec.retry_topic, spec.dead_letter_topic) if topic not in there]:
        sizes = [int(topics.config(topic)["max.message.bytes"]) for topic in spec.topics if topic in there]
        config = {"retention.ms": "-1", "max.message.bytes": str(max([RECORD_BYTES, *sizes]) + HEADERS_BYTES_MAX)}
        for topic in missing:
            topics.create(topic, RETRY_PARTITIONS if topic == spec.retry_topic else 1, config)
        topics.await_visible(missing)
