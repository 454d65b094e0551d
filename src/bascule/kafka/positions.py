"""Positions: the one record of what a pipeline has done (docs/adr/0010-positions.md).

A position is a record of the compacted topic ``bascule.positions``, written in the same Kafka transaction as the output it stands for.
It alone decides where a pipeline goes on; Spark's checkpoints and consumer groups decide nothing.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from bascule.core.errors import BasculeError, Unavailable
from bascule.kafka.history import partition_offsets, passing

#: Keys are spread over this many partitions, so that a writer seldom waits for another one's open transaction.
POSITION_PARTITIONS = 16
#: A transaction that was left open ends after ``transaction.timeout.ms`` at the latest: wait somewhat longer than that.
READ_TIMEOUT_S = 90.0


class PositionLost(BasculeError):
    """The position of a known pipeline is missing or belongs to another topic. Nothing is guessed: the pipeline stops."""


class PositionTaken(BasculeError):
    """Another driver has taken the pipeline over; this one must stop."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a pipeline has come in one source partition.

    ``offset`` is the next one to take. ``epoch``, ``sequence`` and ``exclusive`` are where the journal's fence stands (unused elsewhere).
    ``members`` are the diverts that share the position, ``owner`` is the driver run that holds it.
    """

    topic: str
    topic_id: str
    partition: int
    offset: int
    epoch: int = -1
    sequence: int = -1
    exclusive: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    owner: str = ""

    def encode(self) -> bytes:
        """The record's value."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> Position:
        """The position that a record's value holds. Raises PositionLost."""
        try:
            fields: dict[str, Any] = json.loads(value)
            position = cls(**fields)
        except (ValueError, TypeError) as error:
            raise PositionLost(f"unreadable position {value[:200]!r}: {error}") from error
        return replace(position, exclusive=tuple(position.exclusive), members=tuple(position.members))


def position_key(pipeline: str, topic: str, partition: int) -> str:
    """The key of a pipeline's position in a source partition."""
    return f"{pipeline}/{topic}/{partition}"


def position_partition(key: str) -> int:
    """The partition of ``bascule.positions`` that holds ``key``."""
    return zlib.crc32(key.encode()) % POSITION_PARTITIONS


class PositionReader:
    """Reads partitions of the positions to their high watermarks, each time from where it stopped the last time."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, partitions: Sequence[int], *, committed: bool = True) -> None:
        """``committed=False`` does not wait for open transactions: enough to learn which keys there are."""
        self._at = [TopicPartition(topic, partition) for partition in partitions]
        self._admin = AdminClient(dict(kafka))
        self._consumer = Consumer(
            {
                **kafka,
                "group.id": "bascule.positions.unused",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 10,
            }
        )
        self._reached: dict[int, int] = {}
        self._positions: dict[str, Position] = {}

    def read(self, timeout_s: float = READ_TIMEOUT_S) -> dict[str, Position]:
        """All positions of the partitions, as of now, by key.

        "Now" is the high watermark when the call begins, not the last stable offset: a reader that stops there can miss its own last
        commit behind a neighbour's open transaction. Raises Unavailable when that offset is not reached in time.
        """
        deadline = time.monotonic() + timeout_s
        if not self._reached:
            self._reached = partition_offsets(self._admin, self._at, OffsetSpec.earliest(), timeout_s)
            self._consumer.assign([TopicPartition(at.topic, at.partition, self._reached[at.partition]) for at in self._at])
        # The consumer's own query would answer the last stable offset, since it reads committed records only.
        ends = partition_offsets(self._admin, self._at, OffsetSpec.latest(), timeout_s)
        while any(self._reached[partition] < end for partition, end in ends.items()):
            self._take(deadline)
        return dict(self._positions)

    def close(self) -> None:
        """Frees the client."""
        self._consumer.close()

    def _take(self, deadline: float) -> None:
        message = self._consumer.poll(min(1.0, max(0.0, deadline - time.monotonic())))
        if message is None:
            if time.monotonic() >= deadline:
                raise Unavailable(f"a transaction stayed open in {self._at[0].topic}, partitions and offsets {self._reached}")
            return
        failure = message.error()
        if failure is not None and passing(failure):
            return
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        if failure is None:
            self._apply(message.key(), message.value())
            self._reached[partition] = offset + 1
        elif failure.code() == KafkaError._PARTITION_EOF:
            self._reached[partition] = max(self._reached[partition], offset)
        else:
            raise Unavailable(f"positions in {self._at[0].topic} are not readable: {failure.str()}")

    def _apply(self, key: Any, value: Any) -> None:
        name = (key or b"").decode()
        if value is None:
            self._positions.pop(name, None)
        else:
            self._positions[name] = Position.decode(value)
