"""Kafka records as plain values, read or to be written. Creating one needs no Kafka client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

Headers = list[tuple[str, str | bytes | None]]


class KafkaRecord(NamedTuple):
    """A record read from ``partition`` of ``topic`` at ``offset``. ``timestamp_ms`` is in ms since the epoch.

    ``fault`` says why the client could not read the headers, which are then empty.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    timestamp_ms: int
    fault: str = ""


#: A partition, by topic and number.
Place = tuple[str, int]


class SourceStart(NamedTuple):
    """The first offset to read of a source partition.

    ``topic_id`` is the id of the topic to which the offset belongs, "" if it is not known. ``leader_epoch`` is a leader epoch in which the
    log reached the offset, -1 if none is known: the records must come from the leader of this epoch or of a later one.
    """

    offset: int
    topic_id: str = ""
    leader_epoch: int = -1


#: Returns how long, in seconds, records of a partition are gathered before it is a tail.
Gather = Callable[[Place], float]


class Taken(NamedTuple):
    """Records taken from source partitions at once.

    ``tails`` are the partitions without many records after these. ``ends`` has the end offsets of partitions that have no record between
    the last one taken and this offset, although the reader has waited for one for a while.
    """

    records: Sequence[KafkaRecord]
    tails: Collection[Place] = ()
    ends: Mapping[Place, int] = {}


class GroupOffset(NamedTuple):
    """The offset at which a consumer group continues to read a partition.

    ``by_member``: a member committed the offset, perhaps late. Otherwise an operator set it, and it overrides other positions.
    """

    offset: int
    by_member: bool = True


class Outgoing(NamedTuple):
    """A record to write. ``value`` None deletes a table's key; ``partition`` -1 is chosen by the key, ``timestamp_ms`` 0 by the client."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] = []  # noqa: RUF012 - never changed
    partition: int = -1
    timestamp_ms: int = 0


class Output(NamedTuple):
    """A record to write in one transaction with a position. If ``timestamp_ms`` is 0, the client sets the time of the write.

    ``value`` is None in the dead letter of a record without a value.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int = 0

    @property
    def size_bytes(self) -> int:
        """The size of value, key and headers in bytes."""
        size = len(self.value or b"") + len(self.key or b"")
        for name, value in self.headers:
            size += len(name) + len(value or b"")
        return size
