"""Where pipelines stand, for which the journal is kept, and why they do not read on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bascule.broker.retention import Keeper, RetentionHold
from bascule.broker.snapshot import Snapshot
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.kafka.admin import Topics
from bascule.kafka.epochs import taken_since
from bascule.kafka.history import TopicHistory, committed_note
from bascule.kafka.positions import PositionReader
from bascule.writer.position import BEGUN, COMMON, DIVERT, ENDED, POSITION_PARTITIONS, Position, lag_group, position_key

if TYPE_CHECKING:
    from bascule.server.epoch import JournalPlace

log = get_log(__name__)

UNTOLD = "an exclusive divert took messages there, and no pipelines that know it have been started since"
DISABLED = "disabled: it goes on from there when it is enabled; one that is removed needs nothing"
ALL_DISABLED = "no divert is enabled: it goes on from there when one is"


class PipelineHolds:
    """Looks for the positions of pipelines, for one epoch, and remembers where they stood. Blocking: to be used off the event loop."""

    def __init__(self, place: JournalPlace) -> None:
        self._place = place
        self._stood: dict[str, tuple[int, float]] = {}  # offset of a pipeline, and when it was first seen there
        self._taken: dict[Position | None, dict[str, int]] = {}

    def found(self, taken: Snapshot) -> list[RetentionHold]:
        """Of committed positions only: one that is not committed yet may never be."""
        holds, end = [], taken.next_offset
        for name, position in self._positions(end):
            reason = self._reason(name, position, end)
            quota_bytes = self._place.pinned_bytes_max
            hold = RetentionHold.up_to(taken, Keeper.PIPELINE, name, position.offset, reason, quota_bytes)
            if hold.released:
                log.error(
                    "pipeline lags more than journal.pinned_bytes, unread records are deleted",
                    pipeline=name, records=hold.records, bytes=hold.bytes,
                )  # fmt: skip
            holds.append(hold)
        return holds

    # -- why a pipeline stands still -----------------------------------------------------------------------------------

    def _reason(self, name: str, position: Position, end: int) -> str:
        """ "" while it reads on, or has read all."""
        before, since_s = self._stood.get(name, (-1, 0.0))
        if before != position.offset:
            since_s = time.time()
            self._stood[name] = position.offset, since_s
        if not position.topic_id:
            return UNTOLD
        if not position.owner:  # nor has one that is enabled and cannot go on from here
            said = self._said(name, position)
            return DISABLED if said in ("", ENDED) else said
        if position.offset >= end or before not in (-1, position.offset):
            return ""
        if not position.members:
            return ALL_DISABLED
        if said := self._said(name, position):
            return said
        if before < 0:
            return ""
        since = datetime.fromtimestamp(since_s, UTC).isoformat(" ", "seconds")
        return f"has not moved since {since}: its driver does not run, or does not get on; the log of the pipelines says why"

    def _said(self, name: str, position: Position) -> str:
        """What its driver said last, unless it has moved since. It decides nothing, so it may be missing."""
        place = self._place
        try:
            offset, note = committed_note(
                place.kafka, lag_group(place.topics.prefix, place.bridge, name), place.topics.journal, place.topics.partition
            )
        except Unavailable as error:
            log.warning("reason of a stopped pipeline unknown", pipeline=name, error=error)
            return ""
        return note if offset >= position.offset else ""

    # -- where pipelines stand -----------------------------------------------------------------------------------------

    def _positions(self, end: int) -> Iterator[tuple[str, Position]]:
        """Of the pipelines that read the journal, and of exclusive diverts that none stands for yet: where begins what they took."""
        place = self._place
        stored = self._stored()
        common = stored.get(position_key(COMMON, place.topics.journal, place.topics.partition))
        for key, position in sorted((self._unclaimed(common, end) | stored).items()):
            # Where a divert once began is remembered, and needs nothing of the journal.
            if key.startswith(BEGUN) or position.vacant:
                continue
            if position.topic == place.topics.journal and position.partition == place.topics.partition:
                yield key.partition("/")[0], position

    def _stored(self) -> dict[str, Position]:
        place = self._place
        if place.topics.positions not in Topics(place.kafka).partitions():
            return {}
        reader = PositionReader(place.kafka, place.topics.positions, range(POSITION_PARTITIONS))
        try:
            return reader.read_behind_barrier()  # a former leader may not know a divert that has just been registered
        finally:
            reader.close()

    def _unclaimed(self, common: Position | None, end: int) -> dict[str, Position]:
        place = self._place
        if common is not None and not common.vacant:
            return {}
        if common is not None and common.topic_id != Topics(place.kafka).ids([place.topics.journal]).get(place.topics.journal):
            common = None  # in an earlier journal of the same name
        if common not in self._taken:  # it changes with an epoch, and with the position
            history = TopicHistory(place.kafka, place.topics.journal, place.topics.partition)
            self._taken = {common: taken_since(common, history, end)}
        return {
            position_key(f"{DIVERT}{name}", place.topics.journal, place.topics.partition): Position(
                place.topics.journal, "", place.topics.partition, offset, members=(name,)
            )
            for name, offset in self._taken[common].items()
        }
