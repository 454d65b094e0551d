"""Bascule's own topics that a broker makes, with the settings that its promises rest on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from bascule.config.settings import MESSAGE_BYTES_MAX, Journal
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka.admin import Topics
from bascule.kafka.guards import Finding, Role, UnsafeTopic, guard, too_small

#: Of a journal record, so much is for what stands around a message or a transaction; half of it is enough.
AROUND_BYTES = RECORD_BYTES_MAX - MESSAGE_BYTES_MAX
#: With less the journal cannot work at all: what is small is gathered up to a quarter of it, and Kafka's client gathers on.
RECORD_BYTES_MIN = 1_000_000
#: What Kafka counts as a record's size beside its value: a batch's header, its own, its key.
FRAME_BYTES = 128

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
TOPIC_ROLES: Final[Mapping[Name, Role]] = {"journal": Role.JOURNAL, "ingress": Role.LOG, "snapshots": Role.TABLE, "store": Role.STORE}


def ensure(kafka: Mapping[str, Any], journal: Journal, message_bytes: int = MESSAGE_BYTES_MAX) -> list[Finding]:
    """Make those that are not there. Returns what weakens a promise, of messages so large; blocks. Raises Unavailable, UnsafeTopic."""
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
    return guard(kafka, {journal.topic(name): (role, 1) for name, role in TOPIC_ROLES.items()}, _record_bytes(message_bytes))


def _record_bytes(message_bytes: int) -> int:
    return max(RECORD_BYTES_MIN, min(message_bytes + AROUND_BYTES, 2 * message_bytes))


@dataclass(frozen=True, slots=True)
class Room:
    """What the journal's topic has room for as it is now: records of ``record_bytes``, where it should be ``needed_bytes``."""

    topic: str
    record_bytes: int
    needed_bytes: int

    @property
    def content_bytes(self) -> int:
        """The largest message, or transaction."""
        return max(self.record_bytes - AROUND_BYTES, self.record_bytes // 2)

    @property
    def shortage(self) -> Finding | None:
        """What is wrong, if anything."""
        return too_small(self.topic, self.record_bytes, self.needed_bytes) if self.record_bytes < self.needed_bytes else None

    def check(self, value_bytes: Iterable[int]) -> None:
        """Of records that an epoch could not store. Raises UnsafeTopic for one that the next epoch could not store, either."""
        largest = max(value_bytes, default=0) + FRAME_BYTES
        if largest > self.record_bytes:
            raise UnsafeTopic(str(too_small(self.topic, self.record_bytes, max(largest, self.needed_bytes))))


def room(kafka: Mapping[str, Any], journal: Journal, message_bytes: int) -> Room:
    """For an epoch that is to take messages of so many bytes; blocks. Raises Unavailable, and UnsafeTopic where none could be served."""
    topic = journal.topic("journal")
    found = Room(topic, int(Topics(kafka).config(topic)["max.message.bytes"]), _record_bytes(message_bytes))
    if found.record_bytes < RECORD_BYTES_MIN:
        raise UnsafeTopic(str(found.shortage))
    return found
