"""The pins of pipelines: performs the effects of :mod:`bascule.writer.pipeline_holds`, blocking."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bascule.broker.retention import RetentionHold
from bascule.broker.snapshot import Snapshot
from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory, committed_note
from bascule.kafka.positions import PositionReader
from bascule.writer.epochs import taken_since
from bascule.writer.pipeline_holds import PipelineHoldsProtocol, lowest
from bascule.writer.position import POSITION_PARTITIONS, Position, lag_group

if TYPE_CHECKING:
    from bascule.server.epoch import JournalPlace

log = get_log(__name__)


class PipelineHolds:
    """The search for the pins of pipelines in one epoch, off the event loop."""

    def __init__(self, place: JournalPlace, held_for_diverts: Callable[[], Mapping[str, tuple[str, int]]] = dict) -> None:
        """``held_for_diverts`` returns what ``DivertCoverage.held`` has."""
        self._place = place
        self._protocol = PipelineHoldsProtocol(
            self, place.topics.journal, place.topics.partition, place.pinned_bytes_max, defined=held_for_diverts
        )

    def found(self, taken: Snapshot) -> list[RetentionHold]:
        """Return the pins of pipelines before a snapshot. Raises Unavailable."""
        return run_blocking(self._protocol.found(taken))

    # -- effects: see bascule.writer.pipeline_holds.PipelineHoldsEffects ---------------------------------------------------

    def wall_s(self) -> float:
        """Return the time of this machine's clock."""
        return time.time()

    def note_released(self, hold: RetentionHold) -> None:
        """Log that a pin was released."""
        log.error(
            "pipeline lags more than journal.pinned_bytes, unread records are deleted",
            pipeline=hold.name, records=hold.records, bytes=hold.bytes,
        )  # fmt: skip

    async def stored(self) -> Mapping[str, Position]:
        """Return the stored positions, read behind barrier records: a former leader may not know a new divert. Raises Unavailable."""
        place = self._place
        if place.topics.positions not in Topics(place.kafka).partitions():
            return {}
        reader = PositionReader(place.kafka, place.topics.positions, range(POSITION_PARTITIONS))
        try:
            return lowest(reader.read_behind_barrier(), reader.read_behind_barrier())
        finally:
            reader.close()

    async def journal_id(self) -> str | None:
        """Return the id of the journal's topic. Raises Unavailable."""
        journal = self._place.topics.journal
        return Topics(self._place.kafka).ids([journal]).get(journal)

    async def taken_since(self, common: Position | None, end: int) -> Mapping[str, int]:
        """Return the offsets from which exclusive diverts may have taken messages, by divert. Raises Unavailable."""
        place = self._place
        return taken_since(common, TopicHistory(place.kafka, place.topics.journal, place.topics.partition), end)

    async def said(self, name: str) -> tuple[int, str]:
        """Return the offset and the reason that a pipeline has published; (-1, "") if Kafka does not answer."""
        place = self._place
        group = lag_group(place.topics.prefix, place.bridge, name)
        try:
            return committed_note(place.kafka, group, place.topics.journal, place.topics.partition)
        except Unavailable as error:
            log.warning("could not read why a pipeline stopped", pipeline=name, error=error)
            return -1, ""
