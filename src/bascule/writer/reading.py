"""Reads that a decision depends on: the reader first writes a barrier record, and then reads the table up to it.

A former leader of a partition that is cut off from its peers, but not from clients, answers with an old high watermark until it learns of
its successor. It cannot acknowledge a record that all in-sync replicas must have. Records that were committed before the barrier was
written are therefore before the barrier, whichever node answers the read.

An idempotent producer with ``acks=all`` writes the barrier outside of transactions: the acknowledgement is the proof. A transaction would
add two requests to the coordinator and a marker, and prove no more. The record is a tombstone under ``BARRIER_KEY``: readers of the table,
also those of earlier releases, find nothing under the key, and compaction keeps the newest tombstone for a while and then none.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from bascule.core.errors import Unavailable

T_co = TypeVar("T_co", covariant=True)

#: How long barrier records are repeated, in seconds. An open transaction ends after ``transaction.timeout.ms``, 30 s except for a second
#: attempt: a read waits somewhat longer than that.
READ_TIMEOUT_S: Final = 90.0
#: The key of barrier records, unless the reader of a table is given another key.
BARRIER_KEY: Final = b"barrier"


class ReadingViolation(enum.StrEnum):
    """Rules of reads that decide, which the simulation breaks on purpose."""

    NO_BARRIER = "the table is read up to the high watermark that a node reports"
    LAST_STABLE_OFFSET = "the table is read up to the last stable offset"
    UNKNOWN_OFFSET_TRUSTED = "a barrier whose offset is not known counts as reached"


class BarrierEffects(Protocol):
    """Writes barrier records to partitions of a topic."""

    def now_s(self) -> float:
        """Return the time of a monotonic clock in seconds."""
        ...

    @property
    def partitions(self) -> Sequence[int]:
        """Return the partitions that are read."""
        ...

    async def write_barriers(self, partitions: Sequence[int]) -> Mapping[int, int | None]:
        """Store a barrier record in each partition, and return its offset by partition, or None if the offset is unknown.

        Raises Unavailable.
        """
        ...


class TableEffects(BarrierEffects, Protocol[T_co]):
    """Partitions of a compacted topic. Each method may raise Unavailable."""

    async def ends(self, *, stable: bool = False) -> Mapping[int, int]:
        """Return the high watermark (or last stable offset) of each partition, as some node reports it."""
        ...

    async def read_to(self, ends: Mapping[int, int]) -> T_co:
        """Return the table with all committed records before these offsets. Waits for transactions that are open before them."""
        ...


async def store_barriers(
    table: BarrierEffects, timeout_s: float = READ_TIMEOUT_S, *, violations: Collection[enum.StrEnum] = frozenset()
) -> dict[int, int]:
    """Store a barrier record in each partition, and return the offset after it by partition.

    A record at an unknown offset proves nothing: another record is written, until ``timeout_s``. Raises Unavailable.
    """
    ends: dict[int, int] = {}
    since_s = table.now_s()
    while missing := [partition for partition in table.partitions if partition not in ends]:
        if table.now_s() - since_s > timeout_s:
            raise Unavailable(f"Kafka did not return the offsets of barrier records in {missing} within {timeout_s:.0f} s")
        for partition, offset in (await table.write_barriers(missing)).items():
            if offset is not None:
                ends[partition] = offset + 1
            elif ReadingViolation.UNKNOWN_OFFSET_TRUSTED in violations:
                ends[partition] = 0
    return ends


async def read_behind_barrier(
    table: TableEffects[T_co], timeout_s: float = READ_TIMEOUT_S, *, violations: Collection[enum.StrEnum] = frozenset()
) -> T_co:
    """Return everything that was committed when the call began, whichever node answers. Raises Unavailable."""
    if ReadingViolation.NO_BARRIER in violations or ReadingViolation.LAST_STABLE_OFFSET in violations:
        return await read_latest(table, violations=violations)
    return await table.read_to(await store_barriers(table, timeout_s, violations=violations))


async def read_latest(table: TableEffects[T_co], *, violations: Collection[enum.StrEnum] = frozenset()) -> T_co:
    """Return what was committed up to the high watermark that a node reports. No decision may depend on it. Raises Unavailable."""
    return await table.read_to(await table.ends(stable=ReadingViolation.LAST_STABLE_OFFSET in violations))
