"""Finds the Kafka records that diverts have written for a message, in the target topics and in the dead-letter topic."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final, NamedTuple

from bascule.core.errors import BadRecord, BasculeError
from bascule.jms.record_headers import DIVERT_HEADER, ERRORS, ID_HEADER, ORIGIN_HEADER
from bascule.jms.to_kafka import target_topic
from bascule.kafka.history import TopicHistory, known_offset
from bascule.kafka.log import header_of
from bascule.pipelines.audit import extent_of, place_of_identity
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.timeline.facts import JournaledMessage
from bascule.writer.position import Position

#: Records of one partition that a search reads: other programs may write millions of records a minute to the same topic.
PARTITION_RECORDS_MAX: Final = 1_000_000
#: Difference, in ms, between the clocks of the broker and of Kafka that a search allows for.
CLOCK_SKEW_MS: Final = 5_000
#: Records of one divert for one message that are listed: a transformation may write several.
RECORDS_LISTED_MAX: Final = 100
#: Characters of the error of a dead letter.
ERROR_LENGTH_MAX: Final = 500


class DivertState(enum.StrEnum):
    """What a divert has done with a message."""

    WRITTEN = "written"
    DEAD_LETTER = "in the dead-letter topic"
    PENDING = "not processed yet"
    EARLIER = "before the divert began"
    NOT_FOUND = "not found"
    REMOVED = "not in the settings any more"
    UNKNOWN = "unknown"


#: States that do not change any more.
FINAL_STATES: Final = frozenset(
    (DivertState.WRITTEN, DivertState.DEAD_LETTER, DivertState.EARLIER, DivertState.NOT_FOUND, DivertState.REMOVED)
)


class DivertOutcome(NamedTuple):
    """What one divert has done with the message ``identity``: one record that it has written, or why there is none."""

    identity: str
    divert: str
    state: DivertState
    topic: str = ""
    partition: int = -1
    offset: int = -1
    time_ms: int = 0
    detail: str = ""


class TargetSearch:
    """Searches the records of diverts. The range begins at the time of the message, and ends behind the divert's next message."""

    def __init__(self, pipelines: PipelinesSpec, records_max: int = PARTITION_RECORDS_MAX) -> None:
        self._pipelines = pipelines
        self._records_max = records_max
        self._positions = Positions(pipelines, "")
        self._specs = {divert.name: divert for divert in pipelines.diverts}
        self._origin = pipelines.bridge_id.encode()
        self.searched = 0  # records read

    def close(self) -> None:
        """Free the clients."""
        self._positions.close()

    def outcomes(self, message: JournaledMessage) -> list[DivertOutcome]:
        """Return what each divert that takes a message has done with it. Errors of Kafka become a part of the answer."""
        if not message.takers:
            return []
        try:
            partitions = self._positions.topics.partitions()
            there = self._pipelines.topics.positions in partitions
            stored = self._positions.stored() if there else {}
        except BasculeError as error:
            return [DivertOutcome(message.identity, name, DivertState.UNKNOWN, detail=str(error)) for name in message.takers]
        found = []
        for name in message.takers:
            try:
                found += self._of_divert(message, name, stored, partitions)
            except BasculeError as error:
                found.append(DivertOutcome(message.identity, name, DivertState.UNKNOWN, detail=str(error)))
        return found

    def _of_divert(
        self, message: JournaledMessage, name: str, stored: dict[str, Position], partitions: dict[str, int]
    ) -> list[DivertOutcome]:
        divert = self._specs.get(name)
        if divert is None:
            return [DivertOutcome(message.identity, name, DivertState.REMOVED, detail="the topic of the divert is not known")]
        begun, reached = extent_of(divert, self._positions, stored)
        if 0 <= message.offset < begun:
            return [DivertOutcome(message.identity, name, DivertState.EARLIER, detail=f"the divert began at journal offset {begun}")]
        if message.offset >= reached:
            why = f"the divert is at journal offset {reached}, the message at {message.offset}"
            return [DivertOutcome(message.identity, name, DivertState.PENDING, detail=why)]
        return self._written(message, divert, partitions)

    def _written(self, message: JournaledMessage, divert: DivertSpec, partitions: dict[str, int]) -> list[DivertOutcome]:
        dead_letters = self._pipelines.topics.dead_letters
        places = [(dead_letters, DivertState.DEAD_LETTER)]
        try:
            target = target_topic(divert.target, message.address, divert.source, self._pipelines.topics.reserved)
            places.insert(0, (target, DivertState.WRITTEN))
        except BadRecord:
            target = ""
        gaps: list[str] = []
        hidden = False
        for topic, state in places:
            found: list[DivertOutcome] = []
            for partition in range(partitions.get(topic, 0)):
                search = _PartitionSearch(self._pipelines, topic, partition, self._records_max)
                for offset, time_ms, error in search.records(message, divert, self._origin):
                    found.append(DivertOutcome(message.identity, divert.name, state, topic, partition, offset, time_ms, error))
                self.searched += search.read
                gaps += [search.gap] if search.gap else []
                hidden |= search.hidden
            if found:
                return found[:RECORDS_LISTED_MAX]
        return [self._missing(message, divert, target, gaps, hidden=hidden)]

    @staticmethod
    def _missing(message: JournaledMessage, divert: DivertSpec, target: str, gaps: list[str], *, hidden: bool) -> DivertOutcome:
        if gaps or hidden:
            why = "; ".join(gaps) or "an open transaction hides the end of the topic; repeat the search"
            return DivertOutcome(message.identity, divert.name, DivertState.UNKNOWN, target, detail=why)
        why = "deleted by the retention of the topic, or the topic was recreated"
        if divert.transformed:
            why = f"the transformation wrote no record, or wrote to another topic; or {why}"
        return DivertOutcome(message.identity, divert.name, DivertState.NOT_FOUND, target, detail=why)


class _PartitionSearch:
    """The search in one partition. ``gap`` says which part was not read. ``hidden``: an open transaction hides the end."""

    def __init__(self, pipelines: PipelinesSpec, topic: str, partition: int, records_max: int) -> None:
        self._history = TopicHistory(pipelines.kafka, topic, partition)
        self._name = f"{topic}-{partition}"
        self._records_max = records_max
        self.read = 0
        self.gap = ""
        self.hidden = False

    def records(self, message: JournaledMessage, divert: DivertSpec, origin: bytes) -> Iterator[tuple[int, int, str]]:
        """Yield offset, time in ms, and error if it is a dead letter, of each record of a message.

        A divert writes to a partition in the order of the journal, so a later message ends the search. Raises Unavailable.
        """
        times_ms = [each for each in (message.sent_ms, message.accepted_ms, message.time_ms) if each > 0]
        earliest, end = self._history.earliest(), self._history.stable()
        start = max(earliest, self._history.at_time(max(0, min(times_ms) - CLOCK_SKEW_MS)) if times_ms else earliest)
        self.hidden = end < self._history.latest()
        place, name = (message.sequence, message.index), divert.name.encode()
        for record in self._history.records(start, end, committed=True):
            if self.read >= self._records_max:
                self.gap = f"{self._name} was read from offset {start} to {known_offset(record)} only, of {end}"
                return
            self.read += 1
            if header_of(record, DIVERT_HEADER) != name or header_of(record, ORIGIN_HEADER) != origin:
                continue
            found = place_of_identity(_text(header_of(record, ID_HEADER)))
            if found == place:
                error = _text(header_of(record, f"{ERRORS}exception.message"))
                yield known_offset(record), record.timestamp()[1], error[:ERROR_LENGTH_MAX]
            elif found > place:
                self.hidden = False
                return


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
