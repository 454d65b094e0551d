"""What a move of positions would skip or repeat, for an administrator to confirm. Reads Kafka, and changes nothing. Blocking."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, Final

from bascule.core.topics import JournalTopics
from bascule.kafka.admin import Topics
from bascule.kafka.bounds import Bounds, Place, bounds_of, offsets_at
from bascule.kafka.history import TopicHistory, content_of, known_offset
from bascule.kafka.planned_moves import CountedMessages, NoOffsets, OffsetPlan, OffsetTarget, PipelineOffsets, PlannedMove
from bascule.kafka.positions import PositionReader
from bascule.pipelines.divert import JournalReader
from bascule.pipelines.registry import journal_position
from bascule.pipelines.spec import DivertSpec
from bascule.writer.control import OffsetMove
from bascule.writer.position import COMMON, DIVERT, GROUP, MOVED, POSITION_PARTITIONS, MovedMark, Position, position_key

#: How long a request waits for Kafka to answer a read, in seconds.
READ_TIMEOUT_S: Final = 10.0
#: Journal records in which the messages of a divert are counted, and the time for this in seconds: the broker serves clients meanwhile.
COUNTED_RECORDS_MAX: Final = 20_000
COUNT_S: Final = 5.0
#: Positions that one request may move: a request is one record of Kafka.
MOVES_MAX: Final = 4_000


class OffsetPlans:
    """Makes plans for the pipelines of one journal."""

    def __init__(self, kafka: Mapping[str, Any], topics: JournalTopics) -> None:
        self._kafka = kafka
        self._topics = topics

    def offsets(self, pipeline: str) -> PipelineOffsets:
        """Return the positions of a pipeline. Raises Unavailable, PositionLost."""
        topic = self._topics.positions
        if topic not in Topics(self._kafka).partitions():
            return PipelineOffsets((), {})
        reader = PositionReader(self._kafka, topic, range(POSITION_PARTITIONS))
        try:
            stored = reader.read(READ_TIMEOUT_S)
        finally:
            reader.close()
        positions = self._positions_of(pipeline, stored)
        bounds = bounds_of(self._kafka, {(at.topic, at.partition) for at in positions}, READ_TIMEOUT_S)
        return PipelineOffsets(positions, bounds, MovedMark.of(stored.get(f"{MOVED}{pipeline}")))

    def plan(
        self, pipeline: str, target: OffsetTarget, definition: Mapping[str, Any], topic: str | None = None, partition: int | None = None
    ) -> OffsetPlan:
        """Return what a move to ``target`` means, for the positions that move.

        ``topic`` and ``partition`` restrict it. ``definition`` are the settings of the pipeline as its driver reports them. A target beyond
        the records that exist becomes the first or the last offset. Raises NoOffsets, Unavailable.
        """
        known = self.offsets(pipeline)
        chosen = [at for at in known.positions if topic in (None, at.topic) and partition in (None, at.partition)]
        if not chosen:
            raise NoOffsets(f"{pipeline} has no position" + ("" if topic is None else f" in topic {topic!r:.60} as given"))
        if len(chosen) > MOVES_MAX:
            raise NoOffsets(f"{pipeline} has {len(chosen)} positions; one request moves at most {MOVES_MAX}. Move one topic at a time")
        ids = Topics(self._kafka).ids({at.topic for at in chosen})
        times = self._at_time(target, chosen)
        plan = []
        for at in chosen:
            place = at.topic, at.partition
            if (bounds := known.bounds.get(place)) is None or at.topic not in ids:
                raise NoOffsets(
                    f"Kafka reports no offsets of {at.topic}-{at.partition}: the topic was deleted, or the broker may not see it"
                )
            if target.at == "shift" and at.topic_id != ids[at.topic]:
                raise NoOffsets(f"topic {at.topic!r} was recreated, so its old offsets say nothing: move to an offset or a time instead")
            to = min(max(_wanted(target, at, bounds, times.get(place)), bounds.first), bounds.end)
            if to != at.offset or at.topic_id != ids[at.topic]:
                move = OffsetMove(at.topic, ids[at.topic], at.partition, at.offset, to)
                plan.append(self._planned(pipeline, move, bounds, definition, recreated=at.topic_id != ids[at.topic]))
        return OffsetPlan(tuple(plan), known.mark.number)

    def _at_time(self, target: OffsetTarget, chosen: Collection[Position]) -> dict[Place, int | None]:
        if target.at != "time":
            return {}
        return offsets_at(self._kafka, {(at.topic, at.partition) for at in chosen}, target.value, READ_TIMEOUT_S)

    def _positions_of(self, pipeline: str, stored: Mapping[str, Position]) -> tuple[Position, ...]:
        if not pipeline.startswith(DIVERT):
            sources = (at for key, at in stored.items() if key.startswith(f"{pipeline}/") and not at.vacant)
            return tuple(sorted(sources, key=lambda at: (at.topic, at.partition)))
        journal = self._topics.journal, self._topics.partition
        own = stored.get(position_key(pipeline, *journal))
        name = pipeline.removeprefix(DIVERT)
        shared = (at for key, at in stored.items() if key.startswith((f"{COMMON}/", GROUP)) and name in at.members)
        found = own or next(shared, None)
        return () if found is None else (found,)

    def _planned(self, pipeline: str, move: OffsetMove, bounds: Bounds, definition: Mapping[str, Any], *, recreated: bool) -> PlannedMove:
        """Count what a move skips or repeats. Offsets in an earlier topic of the name say nothing about this one."""
        begin = bounds.first if recreated else min(max(move.offset, bounds.first), bounds.end)
        skipped, repeated = max(0, move.to - begin), max(0, begin - move.to)
        if not pipeline.startswith(DIVERT):
            return PlannedMove(move, bounds, skipped, repeated)
        divert = DivertSpec(
            pipeline.removeprefix(DIVERT), str(definition.get("from", "")), selector=str(definition.get("selector", "")),
            from_kafka=bool(definition.get("from_kafka")),
        )  # fmt: skip
        counted = self._counted(divert, move, min(begin, move.to), max(begin, move.to))
        if not definition:  # nobody knows what the divert selects
            counted = counted._replace(complete=False)
        return PlannedMove(move, bounds, skipped, repeated, counted)

    def _counted(self, divert: DivertSpec, move: OffsetMove, start: int, end: int) -> CountedMessages:
        """Count the messages of a divert in a range of the journal, as long as this takes little."""
        history = TopicHistory(self._kafka, move.topic, move.partition, READ_TIMEOUT_S)
        reader = JournalReader(journal_position(move.topic, move.topic_id, move.partition, start, history), [divert])
        messages = taken = 0
        until_s = time.monotonic() + COUNT_S
        for number, record in enumerate(history.records(start, end)):
            if number == COUNTED_RECORDS_MAX or time.monotonic() > until_s:
                return CountedMessages(messages, taken, complete=False)
            found = reader.take(known_offset(record), *content_of(record))
            messages += len(found)
            taken += sum(divert.name in each.send.diverts for each in found)
        return CountedMessages(messages, taken, complete=True)


def _wanted(target: OffsetTarget, at: Position, bounds: Bounds, at_time: int | None) -> int:
    match target.at:
        case "earliest":
            return bounds.first
        case "latest":
            return bounds.end
        case "offset":
            return target.value
        case "time":
            return bounds.end if at_time is None else at_time
        case _:
            return at.offset + target.value
