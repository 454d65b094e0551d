"""Finds the Kafka records that diverts have written for a message, in the target topics and in the dead-letter topic."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from bascule.core.errors import BadRecord, BasculeError
from bascule.jms.record_headers import DIVERT_HEADER, ERRORS, ID_HEADER, ORIGIN_HEADER
from bascule.jms.to_kafka import target_topic
from bascule.kafka.history import READ_TIMEOUT_S, TopicHistory, known_offset
from bascule.kafka.log import header_of
from bascule.pipelines.audit import extent_of, place_of_identity
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.timeline.budget import SearchBudget
from bascule.timeline.facts import JournaledMessage
from bascule.writer.position import DIVERT, MOVED, MovedMark, Position

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


#: States that do not change any more, unless an administrator moves the position of the divert.
FINAL_STATES: Final = frozenset((DivertState.WRITTEN, DivertState.DEAD_LETTER, DivertState.EARLIER, DivertState.NOT_FOUND))
#: Why the record of a message that the divert has passed may be missing.
NO_RECORD: Final = (
    "no record of the message is where the divert would have written it: the retention of the topic has deleted it, the topic was"
    " recreated, the divert wrote to another topic or did not take the message because its settings were others, or its position was moved"
)
NO_TRANSFORMED_RECORD: Final = f"the transformation wrote no record, or wrote to another topic; or {NO_RECORD}"


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

    def __init__(
        self, pipelines: PipelinesSpec, records_max: int = PARTITION_RECORDS_MAX, budget: SearchBudget | None = None, *,
        errors: bool = True,
    ) -> None:  # fmt: skip
        """``errors``: show the texts of the errors of dead letters, which may quote what is in the message."""
        self._pipelines = pipelines
        self._budget = budget or SearchBudget()
        self._errors = errors
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
        if why := self._budget.spent:
            return [DivertOutcome(message.identity, name, DivertState.UNKNOWN, detail=f"not searched: {why}") for name in message.takers]
        try:
            partitions = self._positions.topics.partitions()
            there = self._pipelines.topics.positions in partitions
            stored = self._positions.stored(self._budget.timeout_s(READ_TIMEOUT_S)) if there else {}
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
            # The diverts that remain write a dead letter for a message that a removed exclusive divert has taken, if it had not written it.
            why = "the topic of the divert is not known"
            found, _ = self._found(message, name, [(self._pipelines.topics.dead_letters, DivertState.DEAD_LETTER)], partitions)
            return found or [DivertOutcome(message.identity, name, DivertState.REMOVED, detail=why)]
        begun, reached = extent_of(divert, self._positions, stored)
        mark = MovedMark.of(stored.get(f"{MOVED}{DIVERT}{name}"))
        moved = mark.moved > 0 or mark.number > 1  # it may have begun again before its first offset; a refused request hides an earlier one
        if 0 <= message.offset < begun and not moved:
            return [DivertOutcome(message.identity, name, DivertState.EARLIER, detail=f"the divert began at journal offset {begun}")]
        if message.offset >= reached:
            why = f"the divert is at journal offset {reached}, the message at {message.offset}" if reached else "the divert has not begun"
            return [DivertOutcome(message.identity, name, DivertState.PENDING, detail=why)]
        return self._written(message, divert, partitions)

    def _written(self, message: JournaledMessage, divert: DivertSpec, partitions: dict[str, int]) -> list[DivertOutcome]:
        places = [(self._pipelines.topics.dead_letters, DivertState.DEAD_LETTER)]
        try:
            target = target_topic(divert.target, message.address, divert.source, self._pipelines.topics.reserved)
            places.insert(0, (target, DivertState.WRITTEN))
        except BadRecord:
            target = ""
        found, gaps = self._found(message, divert.name, places, partitions)
        if found:
            return found
        if message.offset < 0:
            gaps.append("the store does not say where in the journal the message is, so the divert may have begun later or not reached it")
        state, why = DivertState.NOT_FOUND, NO_TRANSFORMED_RECORD if divert.transformed else NO_RECORD
        if gaps:
            state, why = DivertState.UNKNOWN, "; ".join(gaps)
        return [DivertOutcome(message.identity, divert.name, state, target, detail=why)]

    def _found(
        self, message: JournaledMessage, name: str, places: Sequence[tuple[str, DivertState]], partitions: Mapping[str, int]
    ) -> tuple[list[DivertOutcome], list[str]]:
        """Return the records of a message in the first of the topics that has some, and what was not read."""
        gaps: list[str] = []
        for topic, state in places:
            found: list[DivertOutcome] = []
            if topic not in partitions:
                gaps.append(f"topic {topic!r} does not exist, or may not be read")
            for partition in range(partitions.get(topic, 0)):
                if why := self._budget.spent:
                    gaps.append(f"topic {topic!r} was not read from partition {partition} on: {why}")
                    break
                search = _PartitionSearch(self._pipelines, topic, partition, self._records_max, self._budget)
                for offset, time_ms, error in search.records(message, name, self._origin, errors=self._errors):
                    found.append(DivertOutcome(message.identity, name, state, topic, partition, offset, time_ms, error))
                    if len(found) >= RECORDS_LISTED_MAX:
                        more = f"the first {RECORDS_LISTED_MAX} records; the search ended with this one"
                        return [*found[:-1], found[-1]._replace(detail=more)], gaps
                self.searched += search.read
                gaps += [search.gap] if search.gap else []
            if found:
                return found, gaps
        return [], gaps


class _PartitionSearch:
    """The search in one partition. ``gap`` says which part was not read."""

    def __init__(self, pipelines: PipelinesSpec, topic: str, partition: int, records_max: int, budget: SearchBudget) -> None:
        self._history = TopicHistory(pipelines.kafka, topic, partition, budget.timeout_s(READ_TIMEOUT_S))
        self._name = f"{topic}-{partition}"
        self._records_max = records_max
        self._budget = budget
        self.read = 0
        self.gap = ""

    def records(self, message: JournaledMessage, divert: str, origin: bytes, *, errors: bool) -> Iterator[tuple[int, int, str]]:
        """Yield offset, time in ms, and error if it is a dead letter, of each record of a message.

        A divert writes to a partition in the order of the journal, so a later message ends the search. Raises Unavailable.
        """
        earliest, end = self._history.earliest(), self._history.stable()
        start = earliest
        if times_ms := _times_ms(message):
            start = max(earliest, self._history.at_time(max(0, min(times_ms) - CLOCK_SKEW_MS)))
        hidden = end < self._history.latest()
        place, name = (message.sequence, message.index), divert.encode()
        for record in self._history.records(start, end, committed=True):
            why = self._budget.spent or (f"the limit is {self._records_max} records" if self.read >= self._records_max else "")
            if why:
                self.gap = f"{self._name} was read from offset {start} to {known_offset(record)} only, of {end}: {why}"
                return
            self.read += 1
            self._budget.take(len(record.value() or b""))
            if header_of(record, DIVERT_HEADER) != name or header_of(record, ORIGIN_HEADER) != origin:
                continue
            identity = _text(header_of(record, ID_HEADER))
            found = place_of_identity(identity)
            if identity == message.identity or (message.epoch < 0 and found == place):
                kind = "exception.message" if errors else "exception.class.name"
                yield known_offset(record), record.timestamp()[1], _text(header_of(record, f"{ERRORS}{kind}"))[:ERROR_LENGTH_MAX]
            elif found > place:
                return
        if hidden:
            self.gap = f"an open transaction hides the end of {self._name}; repeat the search"


def _times_ms(message: JournaledMessage) -> list[int]:
    """Return the times that the record of a message may have; none if they are not known, as those of a message in the store."""
    known = (message.sent_ms, message.accepted_ms, message.time_ms if message.offset >= 0 else 0)
    return [each for each in known if each > 0] if message.offset >= 0 or message.sent_ms > 0 else []


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
