"""The part of the journal that pipelines still need, without IO: the position of each pipeline, and the reason why it does not move."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, Protocol

from bascule.broker.retention import Keeper, RetentionHold
from bascule.broker.snapshot import Snapshot
from bascule.writer.position import BEGUN, COMMON, DEFINED, DIVERT, ENDED, Position, position_key

UNTOLD: Final = "an exclusive divert has taken messages, and the pipelines have not been started with this divert since"
TO_BEGIN: Final = "the divert was defined at run time, and the pipelines have not begun it yet"
DISABLED: Final = "the divert is disabled; once enabled, it continues from this offset. To release the journal, remove the divert"
ALL_DISABLED: Final = "no divert is enabled; once one is enabled, it continues from this offset"


class PipelineHoldViolation(enum.StrEnum):
    """Rules about the needs of pipelines that a test may break."""

    UNREGISTERED_NEED_NOTHING = "the journal is trimmed although an exclusive divert, not yet known to the pipelines, took messages"


class PipelineHoldsEffects(Protocol):
    """The operations that the protocol needs. Coroutines may raise Unavailable."""

    def wall_s(self) -> float:
        """Return the time of the wall clock in seconds."""
        ...

    def note_released(self, hold: RetentionHold) -> None:
        """Report that a pipeline lags more than the quota of its owner, so that records that it has not read are deleted."""
        ...

    async def stored(self) -> Mapping[str, Position]:
        """Return all committed positions by key, or nothing before the first position. A former leader must not answer.

        The positions of several partitions are those that ``lowest`` returns.
        """
        ...

    async def journal_id(self) -> str | None:
        """Return the current topic id of the journal."""
        ...

    async def taken_since(self, common: Position | None, end: int) -> Mapping[str, int]:
        """Return, by exclusive divert, the first offset after the common position and before ``end`` at which it may have messages."""
        ...

    async def said(self, name: str) -> tuple[int, str]:
        """Return the offset and the note that the driver of a pipeline published last. They are for information only and may be missing."""
        ...


def lowest(earlier: Mapping[str, Position], later: Mapping[str, Position]) -> dict[str, Position]:
    """Return the positions of two reads, the second begun after the first was complete: of each pipeline the one with the lower offset.

    Partitions are not read at the same moment. A single read may miss a divert that leaves its group meanwhile: it may see the time before
    in the partition of the divert, and the time after in that of the group. One of two reads sees the divert, or the group as it was.
    """
    return {**later, **{key: at for key, at in earlier.items() if key not in later or at.offset <= later[key].offset}}


class PipelineHoldsProtocol:
    """Finds the positions of pipelines, for one epoch, and remembers where they were."""

    def __init__(
        self, effects: PipelineHoldsEffects, topic: str, partition: int, quota_bytes: int = 0,
        *, defined: Callable[[], Mapping[str, tuple[str, int]]] = dict, violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:  # fmt: skip
        """``topic`` is the journal. ``quota_bytes`` is how much of it a pipeline may keep; 0 means as much as the pipeline needs.

        ``defined`` returns the diverts that are defined at run time, with the ids of their definitions and the offsets from which the
        journal has their messages.
        """
        self._defined = defined
        self._effects = effects
        self._topic, self._partition = topic, partition
        self._quota_bytes = quota_bytes
        self._violations = violations
        self._stood: dict[str, tuple[int, float]] = {}  # offset of a pipeline, and when it was first seen there
        self._taken: tuple[Position | None, Mapping[str, int]] | None = None

    async def found(self, taken: Snapshot) -> list[RetentionHold]:
        """Return the holds of pipelines on the journal before a snapshot. Raises Unavailable."""
        end = taken.next_offset
        defined = self._defined()  # before the positions: a driver may begin one meanwhile
        stored = await self._effects.stored()
        positions = self._in_journal(await self._unregistered(stored, end) | dict(stored))
        needs = [(name, at.offset, await self._reason(name, at, end)) for name, at in positions]
        holds = []
        for name, offset, reason in [*needs, *self._not_begun(defined, stored)]:
            hold = RetentionHold.up_to(taken, Keeper.PIPELINE, name, offset, reason, self._quota_bytes)
            if hold.released:
                self._effects.note_released(hold)
            holds.append(hold)
        return holds

    # -- positions of pipelines ----------------------------------------------------------------------------------------

    def _in_journal(self, positions: Mapping[str, Position]) -> Iterator[tuple[str, Position]]:
        for key, position in sorted(positions.items()):
            # The position where a divert once began does not hold the journal.
            if key.startswith(BEGUN) or position.vacant:
                continue
            if position.topic == self._topic and position.partition == self._partition:
                yield key.partition("/")[0], position

    def _not_begun(self, defined: Mapping[str, tuple[str, int]], stored: Mapping[str, Position]) -> Iterator[tuple[str, int, str]]:
        """Yield name, offset and reason of diverts that are defined at run time and that no driver has begun.

        An earlier divert of the name may have a position, too.
        """
        for name, (definition, offset) in sorted(defined.items()):
            begun = stored.get(f"{DEFINED}{DIVERT}{name}")
            if begun is None or begun.owner != definition:
                yield f"{DIVERT}{name}", offset, TO_BEGIN

    async def _unregistered(self, stored: Mapping[str, Position], end: int) -> dict[str, Position]:
        """Return where the messages begin that exclusive diverts took and no stored position covers, as positions by key."""
        if PipelineHoldViolation.UNREGISTERED_NEED_NOTHING in self._violations:
            return {}
        common = stored.get(position_key(COMMON, self._topic, self._partition))
        if common is not None and not common.vacant:
            return {}
        if common is not None and common.topic_id != await self._effects.journal_id():
            common = None  # in an earlier journal of the same name
        if self._taken is None or self._taken[0] != common:  # the result changes with an epoch and with the position
            self._taken = common, await self._effects.taken_since(common, end)
        covered = {name for _, position in self._in_journal(stored) for name in position.members}
        return {
            position_key(f"{DIVERT}{name}", self._topic, self._partition): Position(
                self._topic, "", self._partition, offset, members=(name,)
            )
            for name, offset in self._taken[1].items()
            if name not in covered
        }

    # -- why a pipeline does not move ----------------------------------------------------------------------------------

    async def _reason(self, name: str, position: Position, end: int) -> str:
        """Return why a pipeline does not read on, or "" if it does or has read everything."""
        before, since_s = self._stood.get(name, (-1, 0.0))
        if before != position.offset:
            since_s = self._effects.wall_s()
            self._stood[name] = position.offset, since_s
        if not position.topic_id:
            return UNTOLD
        if not position.owner:  # also the case for an enabled pipeline that cannot continue from here
            said = await self._said(name, position)
            return DISABLED if said in ("", ENDED) else said
        if position.offset >= end or before not in (-1, position.offset):
            return ""
        if not position.members:
            return ALL_DISABLED
        if said := await self._said(name, position):
            return said
        if before < 0:
            return ""
        since = datetime.fromtimestamp(since_s, UTC).isoformat(" ", "seconds")
        return f"has not moved since {since}: the pipelines are not running, or are blocked; see the log of the pipelines"

    async def _said(self, name: str, position: Position) -> str:
        """Return the last note of the pipeline's driver, or "" if the pipeline has moved since."""
        offset, note = await self._effects.said(name)
        return note if offset >= position.offset else ""
