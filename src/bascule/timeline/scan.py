"""Reads the journal, the store and the names of queues for the life of a message. Blocking: do not use it on an event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bascule.broker.snapshot import queues_of
from bascule.core.errors import BasculeError
from bascule.journal.errors import ForeignRecord, RecordError
from bascule.journal.fence import Fence
from bascule.journal.reading import Trimmed
from bascule.journal.records import Send
from bascule.kafka.history import TopicHistory, content_of
from bascule.kafka.log import PartitionReader, offset_of
from bascule.kafka.snapshots import SnapshotStore
from bascule.pipelines.divert import DivertFilter, exclusive_in_force
from bascule.pipelines.registry import journal_position
from bascule.pipelines.spec import PipelinesSpec
from bascule.timeline.facts import QueueName
from bascule.timeline.life import MessageLife
from bascule.timeline.wanted import WantedId

#: Records of the journal that one search reads: about a minute.
JOURNAL_RECORDS_MAX: Final = 10_000_000
#: Records that are taken from the client at once. The client buffers 16 MiB, and one record may be larger.
BATCH_RECORDS: Final = 1_000
#: How long one read waits for records, in seconds.
READ_S: Final = 0.5
#: A read that gets no records for this time, although there are more, has failed.
SILENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """The range and the cost of a search: journal records since a time, a number of records, and a time; None for no limit."""

    since_ms: int | None = None
    records_max: int | None = JOURNAL_RECORDS_MAX
    seconds_max: float | None = None


class _TakingDiverts:
    """The diverts of the settings that take a message, and the exclusive ones that the broker applied when it was sent."""

    def __init__(self, pipelines: PipelinesSpec, exclusive: frozenset[str]) -> None:
        self._filters = [DivertFilter(divert) for divert in pipelines.diverts]
        self._exclusive = exclusive

    def __call__(self, send: Send) -> tuple[str, ...]:
        names = [each.divert.name for each in self._filters if each.wants(send, self._exclusive, {})]
        return tuple(dict.fromkeys((*names, *send.diverts)))

    def epoch_started(self, value: bytes) -> None:
        """Note the exclusive diverts of a new epoch."""
        self._exclusive = exclusive_in_force(self._exclusive, value)


class JournalScan:
    """One pass over the journal for the messages with an id. ``gaps`` says what was not read, and why.

    ``first`` is the oldest offset of the journal, ``start`` the first offset of the pass, ``position`` the next one, ``end`` the end of the
    journal when the pass began.
    """

    def __init__(
        self, pipelines: PipelinesSpec, wanted: WantedId, limits: ScanLimits, names: Mapping[int, QueueName] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Find the range. ``names`` are the queues of a running broker; None reads them from the newest snapshot. Raises BasculeError."""
        self._pipelines = pipelines
        self._limits = limits
        self._clock = clock
        self._began_s = clock()
        self._reader: PartitionReader | None = None
        self.gaps: list[str] = []
        self.records = 0
        journal, partition = pipelines.topics.journal, pipelines.topics.partition
        history = TopicHistory(pipelines.kafka, journal, partition)
        self.first, self.end = history.earliest(), history.latest()
        self.start = self.first if limits.since_ms is None else max(self.first, history.at_time(limits.since_ms))
        self.position = self.start
        if self.first > 0:
            self.gaps.append(f"the journal before offset {self.first} is gone")
        at = journal_position(journal, "", partition, self.start, history)
        diverts = _TakingDiverts(pipelines, frozenset(at.exclusive))
        known = dict(names) if names is not None else self._names()
        self.life = MessageLife(wanted, Fence(at.epoch, at.sequence), known, diverts, diverts.epoch_started)

    def close(self) -> None:
        """Free the client."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _names(self) -> dict[int, QueueName]:
        """Return the queues in the snapshots. Without one, only queues that the scanned records create have a name."""
        names: dict[int, QueueName] = {}
        try:
            snapshots = SnapshotStore(self._pipelines.kafka, self._pipelines.topics.snapshots).read()
            for data in snapshots.values():
                names |= {queue: QueueName(name, address) for queue, name, address in queues_of(data)}
        except BasculeError as error:
            self.gaps.append(f"names of older queues are unknown: {error}")
        return names

    # -- the store ---------------------------------------------------------------------------------------------------

    def read_store(self) -> Iterator[None]:
        """Look for messages whose journal records may be gone. Yields after each batch."""
        store = self._pipelines.topics.store
        try:
            reader = PartitionReader(self._pipelines.kafka, store, 0)
        except BasculeError as error:
            self.gaps.append(f"the store could not be read: {error}")
            return
        try:
            position, end = reader.range()
            reader.seek(position)
            since_s = self._clock()
            while position < end:
                batch = reader.read(BATCH_RECORDS, READ_S)
                for record in batch:
                    position = offset_of(record) + 1
                    self._take_stored(record)
                since_s = self._clock() if batch else since_s
                if self._spent() or self._clock() - since_s > SILENCE_S or (reader.at_end and not batch):
                    break
                yield
            if position < end and not reader.at_end:
                self.gaps.append(f"the store was read up to offset {position} only, of {end}")
        except BasculeError as error:
            self.gaps.append(f"the store could not be read: {error}")
        finally:
            reader.close()

    def _take_stored(self, record: Any) -> None:
        key, value = content_of(record)
        if key is not None and key.isdigit():
            self.life.take_stored(int(key), record.timestamp()[1], value)

    # -- the journal -------------------------------------------------------------------------------------------------

    def read(self) -> Iterator[None]:
        """Read up to the end of the journal, or to a limit. Yields after each batch. Raises BasculeError."""
        since_s = self._clock()
        while self.position < self.end:
            if self._spent():
                self.gaps.append(f"the journal was read up to offset {self.position} only, of {self.end}, because of the limit")
                return
            if self._read_batch(min(BATCH_RECORDS, self.end - self.position)):
                since_s = self._clock()
            elif self._reader is not None and self._reader.at_end:
                self.position = self.end  # what was there before the end was trimmed
            elif self._clock() - since_s > SILENCE_S:
                self.gaps.append(f"the journal was read up to offset {self.position} only: Kafka does not answer")
                return
            yield

    def read_on(self) -> bool:
        """Read what was appended since, and wait for it for a moment. Return whether there was something. Raises BasculeError."""
        return self._read_batch(BATCH_RECORDS)

    def _read_batch(self, count: int) -> bool:
        reader = self._reader
        journal, partition = self._pipelines.topics.journal, self._pipelines.topics.partition
        if reader is None:
            reader = self._reader = PartitionReader(self._pipelines.kafka, journal, partition)
            reader.seek(self.position)
        try:
            records = reader.read_at_once(count, READ_S)
        except Trimmed:
            now = reader.range()[0]
            self.gaps.append(f"the journal between offsets {self.position} and {now} was trimmed during the search")
            self.position = self.first = now
            self.life.fence.sequence = -1
            reader.seek(now)
            return True
        for record in records:
            offset = offset_of(record)
            try:
                self.life.take(offset, record.timestamp()[1], content_of(record)[1])
            except ForeignRecord:
                pass
            except RecordError as error:
                raise type(error)(f"journal {journal}, offset {offset}: {error}") from error
            self.position = offset + 1
            self.records += 1
        return bool(records)

    def _spent(self) -> bool:
        limits = self._limits
        if limits.records_max is not None and self.records >= limits.records_max:
            return True
        return limits.seconds_max is not None and self._clock() - self._began_s > limits.seconds_max
