"""The state of the Kafka in memory: topics with their partitions and records, and transactional ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException

At = tuple[str, int]
#: Kafka's defaults for topic settings.
DEFAULTS = {
    "cleanup.policy": "delete",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "max.message.bytes": "1048588",
    "min.insync.replicas": "1",
    "unclean.leader.election.enable": "false",
}


def failure(code: int, **flags: Any) -> KafkaException:
    """Return the exception of a failed call."""
    return KafkaException(KafkaError(code, **flags))


@dataclass
class Stored:
    """A record of a partition; ``marker`` is true for the end of a transaction."""

    key: bytes | None
    value: bytes | None
    headers: Any
    timestamp_ms: int
    transaction: object = None
    marker: bool = False


@dataclass
class Partition:
    """A log. A transaction is open from its first record to its marker. ``epochs`` is the first offset of each leader, by its epoch."""

    first: int = 0
    end: int = 0
    records: dict[int, Stored] = field(default_factory=dict)
    open: dict[object, int] = field(default_factory=dict)
    aborted: set[object] = field(default_factory=set)
    epochs: dict[int, int] = field(default_factory=lambda: {0: 0})

    @property
    def leader_epoch(self) -> int:
        return max(self.epochs)

    def new_leader(self, end: int | None = None) -> None:
        """Let another replica lead from now on. A replica that lagged has no records behind ``end``."""
        if end is not None and end < self.end:
            self.end = end
            self.records = {offset: record for offset, record in self.records.items() if offset < end}
            self.epochs = {epoch: min(start, end) for epoch, start in self.epochs.items()}
        self.epochs[self.leader_epoch + 1] = self.end

    def end_of(self, leader_epoch: int) -> int:
        """Return the end of a leader epoch, as Kafka answers OffsetForLeaderEpoch; -1 for an unknown epoch."""
        if leader_epoch > self.leader_epoch:
            return -1
        return min((start for epoch, start in self.epochs.items() if epoch > leader_epoch), default=self.end)

    @property
    def stable(self) -> int:
        return min(self.open.values(), default=self.end)

    def append(self, record: Stored) -> int:
        if record.transaction is not None and not record.marker:
            self.open.setdefault(record.transaction, self.end)
        self.records[self.end] = record
        self.end += 1
        return self.end - 1

    def mark(self, transaction: object, *, committed: bool) -> None:
        if self.open.pop(transaction, None) is not None:
            self.append(Stored(None, None, None, 0, transaction, marker=True))
            if not committed:
                self.aborted.add(transaction)

    def delete(self, end: int) -> None:
        self.first = max(self.first, end)
        self.records = {offset: record for offset, record in self.records.items() if offset >= self.first}

    def compact(self) -> None:
        """Keep only the newest record of each key, and no deletions."""
        newest = {record.key: offset for offset, record in self.records.items() if not record.marker}
        self.records = {
            at: each for at, each in self.records.items() if not each.marker and newest[each.key] == at and each.value is not None
        }


@dataclass
class Topic:
    """Partitions and settings. A recreated topic of the same name has another id."""

    id: str
    partitions: list[Partition]
    config: dict[str, str]
    replicas: int = 1
    in_sync: int = 1


@dataclass
class Transactional:
    """The coordinator's state of a transactional id."""

    producer_id: int
    epoch: int = -1
    open: object = None
    touched: set[At] = field(default_factory=set)


def readable(partition: Partition, offset: int, record: Stored, *, committed: bool) -> bool:
    if record.marker:
        return False
    return not committed or (offset < partition.stable and record.transaction not in partition.aborted)
