"""Reads on which a decision rests: a barrier record is written first, and the table is read up to it.

A former leader of a partition, cut off from its peers and not from clients, answers with an old high watermark for as long as it does not
know of its successor. It cannot acknowledge a record that all in-sync replicas must have. What was committed before the barrier was
written is therefore before the barrier, whichever node answers the read.

The barrier is written outside of transactions by an idempotent producer with ``acks=all``: the acknowledgement is the proof. A transaction
would add two requests to the coordinator and a marker, and proves no more. The record is a tombstone under ``BARRIER_KEY``: readers of the
table, also those of earlier releases, find nothing under the key, and compaction keeps the newest one for a while and then none.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from bascule.core.errors import Unavailable

T_co = TypeVar("T_co", covariant=True)

#: How long barrier records are written again. A transaction that was left open ends after ``transaction.timeout.ms``, 30 s but for a second
#: try: a read waits somewhat longer than that.
READ_TIMEOUT_S: Final = 90.0
#: The key of barrier records, unless a table's reader is given another one.
BARRIER_KEY: Final = b"barrier"


class ReadingViolation(enum.StrEnum):
    """Rules of reads that decide, broken on purpose by the simulation."""

    NO_BARRIER = "the table is read up to the high watermark that a node names"
    LAST_STABLE_OFFSET = "the table is read up to the last stable offset"
    UNKNOWN_OFFSET_TRUSTED = "a barrier whose offset is not known counts as reached"


class BarrierEffects(Protocol):
    """Partitions of a topic that barrier records are written to."""

    def now_s(self) -> float:
        """Time of a monotonic clock."""
        ...

    @property
    def partitions(self) -> Sequence[int]:
        """The partitions that are read."""
        ...

    async def write_barriers(self, partitions: Sequence[int]) -> Mapping[int, int | None]:
        """Store a barrier record in each partition; return its offset, None where it is stored at an unknown offset. Raises Unavailable."""
        ...


class TableEffects(BarrierEffects, Protocol[T_co]):
    """Partitions of a compacted topic. Each method may raise Unavailable."""

    async def ends(self, *, stable: bool = False) -> Mapping[int, int]:
        """Return each partition's high watermark (or last stable offset), as some node names it."""
        ...

    async def read_to(self, ends: Mapping[int, int]) -> T_co:
        """Return the table with all committed records before these offsets; waits for open transactions before them."""
        ...


async def store_barriers(
    table: BarrierEffects, timeout_s: float = READ_TIMEOUT_S, *, violations: Collection[enum.StrEnum] = frozenset()
) -> dict[int, int]:
    """Store a barrier record in each partition and return the offset behind it.

    A record at an unknown offset proves nothing: another one is written, for ``timeout_s``. Raises Unavailable.
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
    """Return all that was committed when the call began, whichever node answers. Raises Unavailable."""
    if ReadingViolation.NO_BARRIER in violations or ReadingViolation.LAST_STABLE_OFFSET in violations:
        return await read_latest(table, violations=violations)
    return await table.read_to(await store_barriers(table, timeout_s, violations=violations))


async def read_latest(table: TableEffects[T_co], *, violations: Collection[enum.StrEnum] = frozenset()) -> T_co:
    """Return what was committed by the high watermark that a node names. No decision may rest on it. Raises Unavailable."""
    return await table.read_to(await table.ends(stable=ReadingViolation.LAST_STABLE_OFFSET in violations))
