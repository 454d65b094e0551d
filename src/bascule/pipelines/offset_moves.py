"""Positions that an administrator moves: one transaction moves them and stores the id of the request (docs/adr/0024-offsets.md).

The request names the offsets that the administrator saw. A request whose positions have moved since is refused, and so is one whose records
are gone. The stored id makes sure that a request is handled once, whichever driver is killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from bascule.core.errors import BasculeError, Scope
from bascule.core.log import get_log
from bascule.journal.errors import DamagedRecord, NewerRecord
from bascule.kafka.history import TopicHistory
from bascule.kafka.lineage import Lineages
from bascule.pipelines.positions import Positions
from bascule.pipelines.registry import journal_position
from bascule.writer.control import OffsetMove, OffsetsWish
from bascule.writer.position import DIVERT, MOVED, UNKNOWN_EPOCH, Position, PositionLost, moved_mark, position_key

log = get_log(__name__)


class OffsetsRefused(BasculeError):
    """Raised when positions cannot move as an administrator has confirmed. Nothing was changed."""

    retriable = False
    scope = Scope.OPERATION


class OffsetMoves:
    """Moves the positions of the held pipelines of one driver."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        #: The last refusal of each pipeline: the request, and the reason.
        self._refusals: dict[str, tuple[str, str]] = {}

    def handled(self) -> dict[str, str]:
        """Return the id of the last request that a driver has handled, by pipeline. Raises Unavailable."""
        stored = self._positions.stored(decides=True)
        return {key.removeprefix(MOVED): at.owner for key, at in stored.items() if key.startswith(MOVED)}

    def refusal(self, pipeline: str, request: str) -> str:
        """Return why this driver has refused a request; "" if it has not."""
        refused, reason = self._refusals.get(pipeline, ("", ""))
        return reason if refused == request else ""

    def carry_out(self, pipeline: str, wish: OffsetsWish) -> None:
        """Move the positions of a pipeline that has no task, or refuse.

        Raises PositionTaken, and errors after which the call must be repeated.
        """
        keys = {move: self._key_of(pipeline, move) for move in wish.moves}
        change = partial(self._after, pipeline, wish, keys)
        if pipeline.startswith(DIVERT):
            self._positions.rewrite(self._positions.common_key, self._positions.key_of(pipeline), (), change)
        else:
            self._positions.rewrite(pipeline, pipeline, list(keys.values()), change)

    def _key_of(self, pipeline: str, move: OffsetMove) -> str:
        return position_key(pipeline, move.topic, move.partition)

    def _after(
        self, pipeline: str, wish: OffsetsWish, keys: Mapping[OffsetMove, str], found: Mapping[str, Position | None]
    ) -> Mapping[str, Position | None] | None:
        """Return the positions after a request with its mark, only the mark if the request is refused, or None if it was handled before."""
        mark = f"{MOVED}{pipeline}"
        last = self._positions.current(mark)
        if last is not None and last.owner == wish.id:
            return None
        try:
            moved = self._moved(pipeline, {key: (move, found.get(key)) for move, key in keys.items()})
        except (OffsetsRefused, PositionLost, DamagedRecord, NewerRecord) as error:
            self._refusals[pipeline] = wish.id, str(error)
            log.warning("offsets not changed", pipeline=pipeline, request=wish.id, reason=str(error))
            return {**found, mark: moved_mark(wish.id, 0)}
        log.info("offsets change", pipeline=pipeline, request=wish.id, who=wish.by, partitions=len(moved))
        return {**found, **moved, mark: moved_mark(wish.id, len(moved))}

    def _moved(self, pipeline: str, moves: Mapping[str, tuple[OffsetMove, Position | None]]) -> dict[str, Position]:
        kafka = self._positions.pipelines.kafka
        ids = self._positions.topics.ids({move.topic for move, _ in moves.values()})
        lineages = Lineages(kafka)
        after = {}
        for key, (move, at) in moves.items():
            place = f"{move.topic}-{move.partition}"
            if at is None or at.vacant:
                raise OffsetsRefused(f"{pipeline} has no position in {place}")
            if at.offset != move.offset:
                raise OffsetsRefused(f"the position in {place} is at offset {at.offset}, no longer at {move.offset}")
            if ids.get(move.topic) != move.topic_id:
                raise OffsetsRefused(f"topic {move.topic!r} was deleted or recreated")
            history = TopicHistory(kafka, move.topic, move.partition)
            if (first := history.earliest()) > move.to:
                raise OffsetsRefused(f"the records of {place} from offset {move.to} are deleted: the first one is at offset {first}")
            moved = _in_journal(at, move, history) if pipeline.startswith(DIVERT) else _in_source(at, move)
            leader_epoch = lineages.of(move.topic, move.partition).check_tail(moved)
            after[key] = replace(moved, leader_epoch=leader_epoch)
        return after


def _in_source(at: Position, move: OffsetMove) -> Position:
    return replace(at, topic_id=move.topic_id, offset=move.to, leader_epoch=UNKNOWN_EPOCH)


def _in_journal(at: Position, move: OffsetMove, history: TopicHistory) -> Position:
    """Return the position of a divert at another offset, with the fence there."""
    there = journal_position(move.topic, move.topic_id, move.partition, move.to, history)
    # If the start record of the epoch was deleted, its exclusive diverts are known from a position in the same epoch only.
    exclusive = at.exclusive if (at.topic_id, at.epoch) == (there.topic_id, there.epoch) else there.exclusive
    return replace(there, exclusive=exclusive, members=at.members, owner=at.owner)
