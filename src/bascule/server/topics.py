"""Bascule's own topics that a broker makes, with the settings that its promises rest on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from bascule.config.settings import Journal
from bascule.kafka.admin import Topics
from bascule.kafka.guards import Finding, Role, guard
from bascule.kafka.log import RECORD_BYTES_MAX

Name = Literal["journal", "ingress", "snapshots", "store"]

_FOREVER = {"retention.ms": "-1", "retention.bytes": "-1"}
_SAFE = {"unclean.leader.election.enable": "false", "max.message.bytes": str(RECORD_BYTES_MAX)}
TOPIC_SETTINGS: Final[Mapping[Name, Mapping[str, str]]] = {
    # What is trimmed leaves the disk with its segment, which must have room for the largest record.
    "journal": {"cleanup.policy": "delete", "segment.bytes": str(2 * RECORD_BYTES_MAX), **_FOREVER, **_SAFE},
    "ingress": {"cleanup.policy": "delete", "segment.bytes": str(2 * RECORD_BYTES_MAX), **_FOREVER, **_SAFE},
    # A start reads the whole topic, and Kafka cleans closed segments only: at its default of 1 GiB old snapshots would be read for weeks.
    "snapshots": {"cleanup.policy": "compact", "segment.bytes": str(16 << 20), **_SAFE},
    "store": {"cleanup.policy": "compact", "segment.bytes": str(2 * RECORD_BYTES_MAX), **_SAFE},
}
TOPIC_ROLES: Final[Mapping[Name, Role]] = {"journal": Role.LOG, "ingress": Role.LOG, "snapshots": Role.TABLE, "store": Role.STORE}


def ensure(kafka: Mapping[str, Any], journal: Journal) -> list[Finding]:
    """Make those that are not there. Returns what weakens a promise; blocks. Raises Unavailable, UnsafeTopic."""
    topics = Topics(kafka)
    topics.reach()
    for name, config in TOPIC_SETTINGS.items():
        topics.create(
            journal.topic(name),
            1,
            {**config, "min.insync.replicas": str(journal.min_insync_replicas)},
            replication_factor=journal.replication_factor,
        )
    topics.await_visible(map(journal.topic, TOPIC_SETTINGS))
    return guard(kafka, {journal.topic(name): (role, 1) for name, role in TOPIC_ROLES.items()})
