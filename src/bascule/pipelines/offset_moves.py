"""Positions that an administrator moves: one transaction moves them and stores the id of the request (docs/adr/0024-offsets.md).

The request names the offsets that the administrator saw. A request whose positions have moved since is refused, and so is one whose records
are gone. The stored id makes sure that a request is handled once, whichever driver is killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.core.log import get_log
from bascule.journal.errors import DamagedRecord, NewerRecord
from bascule.kafka.bounds import bounds_of
from bascule.kafka.history import READ_TIMEOUT_S, TopicHistory
from bascule.kafka.lineage import Lineages
from bascule.pipelines.positions import Positions
from bascule.pipelines.registry import journal_position
from bascule.writer.control import OffsetMove, OffsetsWish
from bascule.writer.position import DIVERT, MOVED, NEVER_MOVED, UNKNOWN_EPOCH, MovedMark, Position, PositionLost, position_key

log = get_log(__name__)

#: Maximum characters of a stored reason.
REASON_MAX: Final = 1_000


class OffsetsRefused(BasculeError):
    """Raised when positions cannot move as an administrator has confirmed. Nothing was changed."""

    retriable = False
    scope = Scope.OPERATION


class OffsetMoves:
    """Moves the positions of the held pipelines of one driver."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        #: The last request of each pipeline that was handled, as it is stored.
        self._handled: dict[str, MovedMark] = {}

    def handled(self) -> dict[str, str]:
        """Return the id of the last request that a driver has handled, by pipeline. Raises Unavailable."""
        stored = self._positions.stored(decides=True)
        self._handled = {key.removeprefix(MOVED): MovedMark.of(at) for key, at in stored.items() if key.startswith(MOVED)}
        return {pipeline: mark.request for pipeline, mark in self._handled.items()}

    def refusal(self, pipeline: str, request: str) -> str:
        """Return why a driver has refused a request; "" if it has not."""
        mark = self._handled.get(pipeline, NEVER_MOVED)
        return mark.reason if mark.request == request else ""

    def carry_out(self, pipeline: str, wish: OffsetsWish) -> None:
        """Move the positions of a pipeline that has no task, or refuse.

        Raises PositionTaken, and errors after which the call must be repeated.
        """
        keys = {move: self._key_of(pipeline, move) for move in wish.moves}
        marks: list[MovedMark] = []
        change = partial(self._after, pipeline, wish, keys, marks)
        if pipeline.startswith(DIVERT):
            key = self._positions.key_of(pipeline)
            self._positions.rewrite(self._positions.leader_of(key), key, (), change)
        else:
            self._positions.rewrite(pipeline, pipeline, list(keys.values()), change)
        # Nothing is said before the transaction is committed.
        (mark,) = marks
        self._handled[pipeline] = mark
        if mark.moved:
            log.info("offsets changed", pipeline=pipeline, request=wish.id, who=wish.by, partitions=mark.moved)
        else:
            log.warning("offsets not changed", pipeline=pipeline, request=wish.id, reason=mark.reason)

    def _key_of(self, pipeline: str, move: OffsetMove) -> str:
        return position_key(pipeline, move.topic, move.partition)

    def _after(
        self, pipeline: str, wish: OffsetsWish, keys: Mapping[OffsetMove, str], marks: list[MovedMark], found: Mapping[str, Position | None]
    ) -> Mapping[str, Position | None] | None:
        """Return the positions after a request with its mark, only the mark if the request is refused, or None if it was handled before.

        Appends the mark to ``marks``.
        """
        key = f"{MOVED}{pipeline}"
        last = MovedMark.of(self._positions.current(key))
        if last.request == wish.id:
            marks.append(last)
            return None
        try:
            if wish.after is not None and wish.after != last.number:
                raise OffsetsRefused("another request to move positions was handled after this plan was made. Ask for a plan again")
            moved = self._moved(pipeline, {key: (move, found.get(key)) for move, key in keys.items()})
            mark = MovedMark(wish.id, len(moved), last.number + 1)
        except (OffsetsRefused, PositionLost, DamagedRecord, NewerRecord) as error:
            moved, mark = {}, MovedMark(wish.id, 0, last.number + 1, str(error)[:REASON_MAX])
        marks.append(mark)
        return {**found, **moved, key: mark.position()}

    def _moved(self, pipeline: str, moves: Mapping[str, tuple[OffsetMove, Position | None]]) -> dict[str, Position]:
        kafka = self._positions.pipelines.kafka
        ids = self._positions.topics.ids({move.topic for move, _ in moves.values()})
        for move, at in moves.values():
            place = f"{move.topic}-{move.partition}"
            if at is None or at.vacant:
                raise OffsetsRefused(f"{pipeline} has no position in {place}")
            if at.offset != move.offset:
                raise OffsetsRefused(f"the position in {place} is at offset {at.offset}, no longer at {move.offset}")
            if ids.get(move.topic) != move.topic_id:
                raise OffsetsRefused(f"topic {move.topic!r} was deleted or recreated")
        admin = self._positions.shared.offsets
        bounds = bounds_of(kafka, {(move.topic, move.partition) for move, _ in moves.values()}, READ_TIMEOUT_S, admin)
        lineages = Lineages(kafka, admin)
        after = {}
        for key, (move, at) in moves.items():
            place = f"{move.topic}-{move.partition}"
            found = bounds.get((move.topic, move.partition))
            if found is None or at is None:
                raise Unavailable(f"Kafka reports no offsets of {place}")
            if found.first > move.to:
                raise OffsetsRefused(f"the records of {place} from offset {move.to} are deleted: the first one is at offset {found.first}")
            moved = replace(at, topic_id=move.topic_id, offset=move.to, leader_epoch=UNKNOWN_EPOCH)
            leader_epoch = lineages.of(move.topic, move.partition).check_tail(moved)
            if pipeline.startswith(DIVERT):  # only now: nobody could read the journal up to an offset behind its end
                moved = _in_journal(at, move, TopicHistory(kafka, move.topic, move.partition, admin=admin))
            after[key] = replace(moved, leader_epoch=leader_epoch)
        return after


def _in_journal(at: Position, move: OffsetMove, history: TopicHistory) -> Position:
    """Return the position of a divert at another offset, with the fence there."""
    there = journal_position(move.topic, move.topic_id, move.partition, move.to, history)
    # If the start record of the epoch was deleted, its exclusive diverts are known from a position in the same epoch only.
    exclusive = at.exclusive if (at.topic_id, at.epoch) == (there.topic_id, there.epoch) else there.exclusive
    return replace(there, exclusive=exclusive, members=at.members, owner=at.owner, carried=at.carried)
