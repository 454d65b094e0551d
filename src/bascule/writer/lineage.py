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
from bascule.writer.position import UNKNOWN_EPOCH, Position, PositionLost

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
    LEADER_NOT_CONFIRMED = "a transaction is committed whether or not the leader of its source has changed"
    RECORDS_NOT_COMPARED = "a new leader counts as having the records that were read"
    POSITION_NOT_CHECKED = "a leader that has the records that were read counts as having the records before the position"
    FORMER_LEADER_ASKED = "a former leader may say which records the log of the current leader has"


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

    async def reached(self, offset: int, leader_epoch: int, since: int) -> bool | None:
        """Return whether the leader's log reaches ``offset`` in leader epochs up to ``leader_epoch``.

        Return None if the node does not know, or if it may lead in an epoch before ``since``.
        """
        ...

    async def has(self, record: SeenRecord, since: int) -> bool | None:
        """Return whether the log has this record; None if the node may lead in an epoch before ``since``."""
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
            reached = await effects.reached(offset, leader_epoch, _since(end, violations))
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
    effects: LineageEffects, at: Position, leader_epoch: int, last: SeenRecord, offset: int, *, timeout_s: float = STALE_TIMEOUT_S,
    violations: Collection[enum.StrEnum] = frozenset(),
) -> int:  # fmt: skip
    """Return a leader epoch in which the log has the records before the position ``at``, and those that were read up to ``offset``.

    The records were read in ``leader_epoch`` or in later ones, or from any leaders if it is READ_ANYWHERE. ``last`` is the last of them. If
    the leader is the same, nothing was lost since. Otherwise the current leader must have the last record, because a log with this record
    has all records that were read before it. The log must also have the records before the position: it may have lost them, and have
    grown beyond the position again, before the first record was read.

    Raises Unavailable if the leader has another record, which must be read instead, and PositionLost as ``check_tail`` does. If the leader
    changes between the checks, the returned epoch is that of the earlier leader, which no longer leads.
    """
    until_s = effects.now_s() + timeout_s
    end = await effects.end()
    same: bool | None = None
    while same is None:
        if end.leader_epoch == UNKNOWN_EPOCH or (end.offset >= offset and end.leader_epoch >= leader_epoch):
            if UNKNOWN_EPOCH in (leader_epoch, end.leader_epoch) or end.leader_epoch == leader_epoch:
                return end.leader_epoch
            same = LineageViolation.RECORDS_NOT_COMPARED in violations or await effects.has(last, _since(end, violations))
        if same is None:
            end = await _ask_again(effects, offset, end, until_s)
    if not same:
        raise Unavailable(
            f"the record at offset {last.offset} of {effects.place} has changed: the new leader (leader epoch {end.leader_epoch}) lost the"
            " record that was read. The records will be read again"
        )
    if end.leader_epoch == at.leader_epoch or LineageViolation.POSITION_NOT_CHECKED in violations:
        return end.leader_epoch
    # Without an epoch, only the end of the time proves a loss: the time must not be shorter than for a start.
    left_s = timeout_s if at.leader_epoch == UNKNOWN_EPOCH else max(0.0, until_s - effects.now_s())
    return min(end.leader_epoch, await check_tail(effects, at.offset, at.leader_epoch, timeout_s=left_s, violations=violations))


def still_leads(end: LogEnd, leader_epoch: int, offset: int, *, violations: Collection[enum.StrEnum] = frozenset()) -> bool:
    """Return True if the leader of this epoch has answered, and its log reaches ``offset``: then it has lost nothing that it had.

    Of a cluster without leader epochs, nothing can be said; each answer counts.
    """
    if LineageViolation.LEADER_NOT_CONFIRMED in violations:
        return True
    return end.leader_epoch == leader_epoch and (leader_epoch == UNKNOWN_EPOCH or end.offset >= offset)


def _since(end: LogEnd, violations: Collection[enum.StrEnum]) -> int:
    """Return the leader epoch from which on an answer about the records of a log counts, as the log has reported this end."""
    return UNKNOWN_EPOCH if LineageViolation.FORMER_LEADER_ASKED in violations else end.leader_epoch


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
