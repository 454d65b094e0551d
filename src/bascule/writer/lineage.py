"""Checks whether a partition still has the records that were read: compares a position with the end and the leader epochs of the log.

This module has no IO. A position contains a leader epoch: that of a leader whose log reached the position. The log of a leader only grows.
So an end below the position is stale if the leader of this epoch, or of an earlier one, reports it: the node is cut off from its peers, or
does not know the high watermark yet. If the log of a later leader has less of that epoch, the tail is lost, however long the log is now.

:mod:`bascule.kafka.lineage` performs the effects with Kafka's client.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Final, NamedTuple, Protocol

from bascule.core.errors import Unavailable
from bascule.writer.position import UNKNOWN_EPOCH, PositionLost

#: A new leader knows the high watermark within milliseconds, and a client learns of another leader within a second. After this timeout, in
#: seconds, the answering node is cut off: its pipeline restarts with a pause.
STALE_TIMEOUT_S: Final = 10.0
RETRY_S: Final = 0.2


#: In place of the leader epoch of a reader that may have read from any leader.
READ_ANYWHERE: Final = -2


class LineageViolation(enum.StrEnum):
    """Rules of the lineage that a test may break."""

    STALE_END_BELIEVED = "an end below the position counts as a lost tail, whichever leader reports it"
    GROWTH_NOT_CHECKED = "a log that reaches the position counts as the log that was read"


class LogEnd(NamedTuple):
    """The end of a partition as a node reports it, and the leader epoch in which the node answers."""

    offset: int
    leader_epoch: int = UNKNOWN_EPOCH


class SeenRecord(NamedTuple):
    """A record as it was read. Without a timestamp, the value may be only the beginning of the record's value."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int | None = None


class LineageEffects(Protocol):
    """The operations on a partition. ``place`` names the partition in messages. Coroutines may raise Unavailable."""

    place: str

    def now_s(self) -> float:
        """Return the time of a monotonic clock in seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    async def end(self, *, again: bool = False) -> LogEnd:
        """Return the high watermark. ``again``: find the leader first, because the last answer was stale."""
        ...

    async def reached(self, offset: int, leader_epoch: int) -> bool | None:
        """Return whether the leader's log reaches ``offset`` in leader epochs up to ``leader_epoch``, None if the node does not know."""
        ...

    async def has(self, record: SeenRecord) -> bool:
        """Return True if the log has this record."""
        ...


async def check_tail(
    effects: LineageEffects, offset: int, leader_epoch: int, *, timeout_s: float = STALE_TIMEOUT_S,
    violations: Collection[enum.StrEnum] = frozenset(),
) -> int:  # fmt: skip
    """Return a leader epoch in which the log has all records before ``offset``, which was read in ``leader_epoch``.

    Raises PositionLost if the log has lost its tail, and Unavailable if no node that knows answers in time. The position of an earlier
    version has no leader epoch: if the end stays below it until the timeout, the tail counts as lost.
    """
    until_s = effects.now_s() + timeout_s
    end = await effects.end()
    while True:
        if end.offset < offset and LineageViolation.STALE_END_BELIEVED in violations:
            raise _lost(effects, offset, leader_epoch, end)
        known = UNKNOWN_EPOCH not in (leader_epoch, end.leader_epoch)
        if known and end.leader_epoch > leader_epoch and LineageViolation.GROWTH_NOT_CHECKED not in violations:
            reached = await effects.reached(offset, leader_epoch)
            if reached is False:
                raise _lost(effects, offset, leader_epoch, end)
            if reached and end.offset >= offset:
                return end.leader_epoch
        elif end.offset >= offset and (not known or end.leader_epoch >= leader_epoch):
            return end.leader_epoch
        if not known and effects.now_s() >= until_s:
            raise _lost(effects, offset, leader_epoch, end)
        end = await _ask_again(effects, offset, end, until_s)


async def check_read(
    effects: LineageEffects, leader_epoch: int, last: SeenRecord, offset: int, *, timeout_s: float = STALE_TIMEOUT_S
) -> int:
    """Return a leader epoch in which the log has the records that were read up to ``offset``. ``last`` is the last of them.

    All records before were read in ``leader_epoch``, or from any leaders if it is READ_ANYWHERE. If the leader is the same, nothing was
    lost since. Otherwise the current leader must have the last record, because a log with this record has all records before it. Raises
    Unavailable if the leader has another record, which must be read instead.
    """
    until_s = effects.now_s() + timeout_s
    end = await effects.end()
    while end.leader_epoch != UNKNOWN_EPOCH and (end.offset < offset or end.leader_epoch < leader_epoch):
        end = await _ask_again(effects, offset, end, until_s)
    if UNKNOWN_EPOCH in (leader_epoch, end.leader_epoch) or end.leader_epoch == leader_epoch or await effects.has(last):
        return end.leader_epoch
    raise Unavailable(
        f"the record at offset {last.offset} of {effects.place} has changed: the new leader (leader epoch {end.leader_epoch}) lost the"
        " record that was read. The records will be read again"
    )


def still_leads(end: LogEnd, leader_epoch: int, offset: int) -> bool:
    """Return True if the leader of this epoch has answered, and its log reaches ``offset``: then it has lost nothing that it had.

    Of a cluster without leader epochs, nothing can be said; each answer counts.
    """
    return end.leader_epoch == leader_epoch and (leader_epoch == UNKNOWN_EPOCH or end.offset >= offset)


async def _ask_again(effects: LineageEffects, offset: int, end: LogEnd, until_s: float) -> LogEnd:
    if effects.now_s() >= until_s:
        raise Unavailable(
            f"stale end offset {end.offset} of {effects.place} (leader epoch {end.leader_epoch}): offset {offset} was already read. The"
            " answering Kafka node is cut off from the cluster, or has just become the leader"
        )
    await effects.sleep(RETRY_S)
    return await effects.end(again=True)


def _lost(effects: LineageEffects, offset: int, leader_epoch: int, end: LogEnd) -> PositionLost:
    return PositionLost(
        f"{effects.place} has lost its tail: records up to offset {offset} (leader epoch {leader_epoch}) were read, and the leader of"
        f" epoch {end.leader_epoch} does not have all of these records. The log ends at offset {end.offset}"
    )
