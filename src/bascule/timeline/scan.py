"""Reads the journal, the store and the names of queues for the life of a message. Blocking: do not use it on an event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from bascule.broker.snapshot import queues_of
from bascule.core.errors import BasculeError
from bascule.journal.errors import ForeignRecord, RecordError
from bascule.journal.fence import Fence
from bascule.journal.reading import Trimmed
from bascule.journal.records import Send
from bascule.kafka.history import READ_TIMEOUT_S, TopicHistory, content_of
from bascule.kafka.log import PartitionReader, offset_of
from bascule.kafka.snapshots import SnapshotStore
from bascule.pipelines.divert import DivertFilter, exclusive_in_force
from bascule.pipelines.registry import journal_position
from bascule.pipelines.spec import PipelinesSpec
from bascule.timeline.budget import SearchBudget
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
_SILENT: Final = "Kafka returns no more records"


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """The range of a search in the journal: records since a time, and a number of records; None for no limit."""

    since_ms: int | None = None
    records_max: int | None = JOURNAL_RECORDS_MAX


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

    def restart(self, exclusive: frozenset[str]) -> None:
        """Note the exclusive diverts that are in force where the reader continues."""
        self._exclusive = exclusive


class JournalScan:
    """One pass over the journal for the messages with an id. ``gaps`` says what was not read, and why.

    ``first`` is the oldest offset of the journal, ``start`` the first offset of the pass, ``position`` the next one, ``end`` the end of the
    journal when the pass began. ``complete``: all records from ``start`` up to that end were read.
    """

    def __init__(
        self, pipelines: PipelinesSpec, wanted: WantedId, limits: ScanLimits, names: Mapping[int, QueueName] | None = None,
        budget: SearchBudget | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Find the range. ``names`` are the queues of a running broker; None reads them from the newest snapshot. Raises BasculeError."""
        self._pipelines = pipelines
        self._limits = limits
        self._clock = clock
        self._budget = budget or SearchBudget()
        self._reader: PartitionReader | None = None
        self.gaps: list[str] = []
        self.cut = ""  # why the pass ended before the end of the journal
        self.records = 0
        journal, partition = pipelines.topics.journal, pipelines.topics.partition
        history = TopicHistory(pipelines.kafka, journal, partition, self._budget.timeout_s(READ_TIMEOUT_S))
        self.first, self.end = history.earliest(), history.latest()
        self.start = self.first if limits.since_ms is None else max(self.first, history.at_time(limits.since_ms))
        self.position = self.start
        if self.first > 0:
            self.gaps.append(f"the journal before offset {self.first} is gone")
        at = journal_position(journal, "", partition, self.start, history)
        self._diverts = _TakingDiverts(pipelines, frozenset(at.exclusive))
        known = dict(names) if names is not None else self._names()
        self.life = MessageLife(
            wanted, Fence(at.epoch, at.sequence), known, self._diverts, self._diverts.epoch_started, from_start=self.start == 0
        )

    @property
    def complete(self) -> bool:
        """Return whether the records up to the end were read."""
        return self.position >= self.end

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
                batch = reader.read(self._budget.room(BATCH_RECORDS), READ_S)
                for record in batch:
                    position = offset_of(record) + 1
                    self._take_stored(record)
                since_s = self._clock() if batch else since_s
                if reader.end_seen >= end:
                    position = end
                if self._budget.spent or self._clock() - since_s > SILENCE_S:
                    break
                yield
            if position < end:
                self.gaps.append(f"the store was read up to offset {position} only, of {end}: {self._budget.spent or _SILENT}")
        except BasculeError as error:
            self.gaps.append(f"the store could not be read: {error}")
        finally:
            reader.close()
            if self.start > self.first:
                self.life.lose_track()  # the records before ``start`` may have removed what is in the store

    def _take_stored(self, record: Any) -> None:
        key, value = content_of(record)
        self._budget.take(len(value or b""))
        if key is not None and key.isdigit():
            with suppress(ForeignRecord):
                self.life.take_stored(int(key), record.timestamp()[1], value)

    # -- the journal -------------------------------------------------------------------------------------------------

    def read(self) -> Iterator[None]:
        """Read up to the end of the journal, or to a limit. Yields after each batch. Raises BasculeError."""
        since_s = self._clock()
        while self.position < self.end:
            if why := self._spent():
                self.cut = f"the journal was read up to offset {self.position} only, of {self.end}, because of the limit: {why}"
                return
            if self._read_batch(self._budget.room(min(BATCH_RECORDS, self.end - self.position))):
                since_s = self._clock()
            elif self._reader is not None and self._reader.end_seen >= self.end:
                self.position = self.end  # the last offsets have no records, as those of an aborted transaction
            elif self._clock() - since_s > SILENCE_S:
                self.cut = f"the journal was read up to offset {self.position} only, of {self.end}: {_SILENT}"
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
            self._skip_to(reader.range()[0])
            reader.seek(self.position)
            return True
        for record in records:
            offset = offset_of(record)
            value = content_of(record)[1]
            self._budget.take(len(value or b""))
            try:
                self.life.take(offset, record.timestamp()[1], value)
            except ForeignRecord:
                pass
            except RecordError as error:
                raise type(error)(f"journal {journal}, offset {offset}: {error}") from error
            self.position = offset + 1
            self.records += 1
        return bool(records)

    def _skip_to(self, offset: int) -> None:
        """Continue at an offset. The records before it were trimmed, and may have had the start of an epoch or the end of a message."""
        self.gaps.append(f"the journal between offsets {self.position} and {offset} was trimmed during the search")
        journal, partition = self._pipelines.topics.journal, self._pipelines.topics.partition
        history = TopicHistory(self._pipelines.kafka, journal, partition, self._budget.timeout_s(READ_TIMEOUT_S))
        at = journal_position(journal, "", partition, offset, history)
        self.position = self.first = offset
        self.life.fence = Fence(at.epoch, at.sequence)
        self._diverts.restart(frozenset(at.exclusive))
        self.life.lose_track()

    def _spent(self) -> str:
        """Return why the pass over the journal must end; "" if it may go on."""
        limit = self._limits.records_max
        return f"{limit} journal records" if limit is not None and self.records >= limit else self._budget.spent
