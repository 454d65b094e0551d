"""The dead letters of the pipelines in Kafka, and which of them are done (``bascule.writer.redrive``). Blocking."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import OffsetSpec

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import KafkaRecord, Outgoing
from bascule.core.topics import JournalTopics
from bascule.kafka.admin import Topics
from bascule.kafka.appender import Appender, await_stored
from bascule.kafka.compacted import TableReader
from bascule.kafka.consumer import read_again, received_of
from bascule.kafka.history import PartitionOffsets, TopicHistory
from bascule.kafka.positions import PositionReader
from bascule.writer.dead_letters import LetterFilter, PipelineDeadLetter, Place, dead_letter_of
from bascule.writer.position import Position, position_partition
from bascule.writer.reading import READ_TIMEOUT_S
from bascule.writer.redrive import (
    MARK_KEY,
    POSITION_KEY,
    REPORT_KEY,
    DoneLetters,
    MarksLost,
    RedriveReport,
    decoded_mark,
    mark_place,
)


class RedriveTable(NamedTuple):
    """What ``PREFIX.redrive`` says: the dead letters that are done, by the id of their topic, and the reports by job."""

    done: Mapping[str, DoneLetters]
    reports: Mapping[str, RedriveReport]

    def of(self, topic_id: str) -> DoneLetters:
        """Return the dead letters of a topic that are done."""
        return self.done.get(topic_id) or DoneLetters()


class LetterTopic(NamedTuple):
    """The dead-letter topic as it is now: its id, and the first offset and the end of each partition for readers of committed records."""

    topic_id: str
    firsts: Mapping[int, int]
    ends: Mapping[int, int]


class RedriveTopics:
    """Reads the dead letters and the marks of one journal. Not thread-safe. Clients are made at the first use."""

    def __init__(self, kafka: Mapping[str, Any], topics: JournalTopics) -> None:
        self._kafka = kafka
        self._topics = topics
        self._reader: TableReader | None = None

    @cached_property
    def _admin(self) -> Topics:
        return Topics(self._kafka)

    def table(self, timeout_s: float = READ_TIMEOUT_S, *, decides: bool = False) -> RedriveTable:
        """Return all marks and reports. ``decides``: a former leader must not answer. Raises Unavailable, UnreadableRedrive."""
        topic = self._topics.redrive
        reader, self._reader = self._reader or TableReader(self._kafka, topic, [0]), None
        try:
            found = reader.read_behind_barrier(timeout_s) if decides else reader.read(timeout_s)
            reader.rest()
        except BaseException:
            reader.close()
            raise
        self._reader = reader
        done: dict[str, DoneLetters] = {}
        reports: dict[str, RedriveReport] = {}
        for key, stored in found.items():
            name, place = key.decode(errors="replace"), stored.place(topic, key)
            if name.startswith(MARK_KEY):
                topic_id, partition = mark_place(name)
                done.setdefault(topic_id, DoneLetters()).add(partition, decoded_mark(stored.value, place))
            elif name.startswith(REPORT_KEY):
                reports[name.removeprefix(REPORT_KEY)] = RedriveReport.decode(stored.value, place)
        return RedriveTable(done, reports)

    def marks_topic_id(self) -> str:
        """Return the id of the topic of the marks; "" if it does not exist. Raises Unavailable."""
        return self._admin.ids([self._topics.redrive]).get(self._topics.redrive, "")

    def check_marks(self, timeout_s: float = READ_TIMEOUT_S) -> None:
        """Check that the topic of the marks is the one of the last redrive, as some node knows them. Raises MarksLost, Unavailable."""
        if not self._admin.ids([self._topics.positions]):
            return  # no driver has run yet
        partition = position_partition(POSITION_KEY)
        with closing(PositionReader(self._kafka, self._topics.positions, [partition])) as reader:
            self.check_marks_of(reader.read(timeout_s).get(POSITION_KEY), self.marks_topic_id())

    def check_marks_of(self, position: Position | None, topic_id: str) -> None:
        """Check that a position of redrives belongs to the topic of the marks with this id. Raises MarksLost."""
        # The position of an earlier version has no id.
        if position is not None and position.topic_id not in ("", topic_id):
            raise MarksLost(self._topics.redrive)

    def letter_topic_id(self) -> str | None:
        """Return the id of the dead-letter topic; None if it does not exist. Raises Unavailable."""
        return self._admin.ids([self._topics.dead_letters]).get(self._topics.dead_letters)

    def letter_topic(self, timeout_s: float = READ_TIMEOUT_S) -> LetterTopic | None:
        """Return the dead-letter topic; None if it does not exist. Raises Unavailable."""
        topic = self._topics.dead_letters
        topic_id = self.letter_topic_id()
        if topic_id is None:
            return None
        count = self._admin.partitions().get(topic, 0)
        if not count:  # just deleted or created, or a node does not know its leaders yet
            raise Unavailable(f"Kafka does not list the partitions of {topic!r}")
        offsets = PartitionOffsets(self._kafka, [TopicPartition(topic, each) for each in range(count)])
        firsts = offsets.ask(OffsetSpec.earliest(), timeout_s)
        return LetterTopic(topic_id, firsts, offsets.ask(OffsetSpec.latest(), timeout_s, IsolationLevel.READ_COMMITTED))

    def letters(
        self, bounds: Mapping[int, tuple[int, int]], done: DoneLetters, chosen: LetterFilter, bridge: str,
        enough: Callable[[Place, int], bool] = lambda *_: False,
    ) -> Iterator[PipelineDeadLetter]:  # fmt: skip
        """Yield the dead letters of a bridge that are not done and that ``chosen`` means.

        ``bounds`` are the first offset and the end of each partition to read. ``enough`` is asked after each record, with the size of its
        value in bytes and the place behind it, whether reading ends there. Raises Unavailable.
        """
        for partition, (first, end) in sorted(bounds.items()):
            history = TopicHistory(self._kafka, self._topics.dead_letters, partition)
            start, stop, wanted = _narrowed(first, end, partition, chosen)
            for record in map(received_of, history.records(start, stop, committed=True)):
                skipped = (wanted is not None and record.offset not in wanted) or done.has((partition, record.offset))
                letter = None if skipped else dead_letter_of(record)
                if letter is not None and letter.bridge == bridge and chosen.matches(letter, record.headers):
                    yield letter
                if enough((partition, record.offset + 1), len(record.value or b"")):
                    return

    def record(self, topic: LetterTopic, partition: int, offset: int) -> KafkaRecord | None:
        """Return a record of the dead-letter topic; None if there is none at this offset. Raises Unavailable."""
        if not topic.firsts.get(partition, 0) <= offset < topic.ends.get(partition, 0):
            return None
        return read_again(self._kafka, self._topics.dead_letters, partition, [offset]).get(offset)

    def clean(self, jobs: Collection[str], before_ms: int) -> None:
        """Delete marks of dead letters that Kafka has deleted, and reports from before a time of jobs that are forgotten.

        Marks of other topics of the name stay: nothing says that this node knows the newest one. Raises Unavailable.
        """
        topic = self.letter_topic()
        reader = self._reader
        if topic is None or reader is None:
            return
        name, gone = self._topics.redrive, []
        for key, stored in reader.known().items():
            text, place = key.decode(errors="replace"), stored.place(name, key)
            if text.startswith(MARK_KEY):
                topic_id, partition = mark_place(text)
                last = max(last for _, last in decoded_mark(stored.value, place))
                old = topic_id == topic.topic_id and last < topic.firsts.get(partition, 0)
            else:
                unknown = text.startswith(REPORT_KEY) and text.removeprefix(REPORT_KEY) not in jobs
                old = unknown and RedriveReport.decode(stored.value, place).at_ms < before_ms
            if old:
                gone.append(key)
        if gone:
            with closing(Appender(self._kafka)) as appender:
                for future in [appender.append(Outgoing(name, key, None, partition=0)) for key in gone]:
                    await_stored(future)

    def close(self) -> None:
        """Free the clients."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _narrowed(first: int, end: int, partition: int, chosen: LetterFilter) -> tuple[int, int, Collection[int] | None]:
    """Return the range to read, and the offsets in it that single places name; None if all are meant."""
    if chosen.places is None:
        return first, end, None
    wanted = frozenset(offset for number, offset in chosen.places if number == partition and first <= offset < end)
    return (min(wanted), max(wanted) + 1, wanted) if wanted else (end, end, wanted)
