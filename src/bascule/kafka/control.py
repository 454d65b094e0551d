"""The topics by which administrators control pipelines: wishes in ``PREFIX.control``, reports in ``PREFIX.pipelines``. Blocking."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, Final, NamedTuple, TypeVar

from bascule.broker.coverage import CoverageMark
from bascule.broker.divert_access import DivertAccess
from bascule.core.errors import BasculeError
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.core.topics import JournalTopics
from bascule.kafka.admin import Topics
from bascule.kafka.appender import await_stored
from bascule.kafka.compacted import Stored, TableReader
from bascule.kafka.shared import SharedClients
from bascule.kafka.slot import Slot
from bascule.kafka.transactional import end_open_transactions
from bascule.writer.control import (
    ACCESS_KEY,
    COVERED_KEY,
    DEFINITION_KEY,
    DELETED_KEY,
    DRIVER_KEY,
    OFFSETS_KEY,
    RESTART_KEY,
    WANTED_KEY,
    DriverReport,
    OffsetsWish,
    PipelineDefinition,
    PipelineDeletion,
    PipelineReport,
    RestartWish,
    UnreadableControl,
    Wish,
    Wishes,
    decoded,
    encoded,
)
from bascule.writer.control_table import ControlRecord, covered_pipeline, named_pipeline, version_of, wishes_of
from bascule.writer.position import DEFINED, DIVERT, POSITION_PARTITIONS, Position, position_partition
from bascule.writer.redrive import JOB_KEY, RedriveJob

log = get_log(__name__)

C = TypeVar("C", PipelineDefinition, PipelineDeletion, CoverageMark, DivertAccess, PipelineReport, DriverReport)

#: How long a deletion waits for Kafka to answer which records there are, in seconds.
FORGET_TIMEOUT_S: Final = 10.0
#: Records of deletions that are kept of pipelines without report and positions. Each look at the topic decodes all of them. The older ones
#: are deleted when there are more than twice as many, so that few deletions have to read the positions.
DELETIONS_MAX: Final = 100
_KEYS: Final[Mapping[type, str]] = {Wish: WANTED_KEY, RestartWish: RESTART_KEY, OffsetsWish: OFFSETS_KEY}


class _OtherVersion(Exception):
    """Raised when a definition was stored or deleted after the read on which another one depends."""


class Reports(NamedTuple):
    """The reports of the driver that ran last: its own, None if none ever ran, and those of its pipelines by name."""

    driver: DriverReport | None
    pipelines: Mapping[str, PipelineReport]


class DivertRecords(NamedTuple):
    """What brokers need to know about diverts, by name: definitions made at run time, None for one that cannot be read, what brokers say
    about them, and the decisions about diverts with a user. ``deleted`` are those that an administrator has deleted at some time.
    """

    definitions: Mapping[str, PipelineDefinition | None]
    covered: Mapping[str, list[CoverageMark]]
    access: Mapping[str, DivertAccess]
    deleted: frozenset[str]


class ControlTopics:
    """Reads and writes both topics. Thread-safe. Clients are made at the first use."""

    def __init__(self, kafka: Mapping[str, Any], topics: JournalTopics) -> None:
        self._kafka = kafka
        self._topics = topics
        self._readers: dict[str, TableReader] = {}
        self._shared = SharedClients(kafka)
        self._lock = threading.Lock()
        #: Places of records that cannot be read, which are logged once.
        self._unreadable: set[str] = set()

    def wishes(self, timeout_s: float, *, decides: bool = False) -> Wishes:
        """Return all wishes. ``decides``: a former leader must not answer. Raises Unavailable."""
        topic = self._topics.control
        table = self._table(topic, timeout_s, decides=decides)
        return wishes_of(
            {key: ControlRecord(stored.value, stored.offset, stored.place(topic, key.encode())) for key, stored in table.items()},
            self._skipped,
            self._job_skipped,
        )

    def controlled_diverts(self, timeout_s: float, *, decides: bool = False) -> DivertRecords:
        """Return what the topic has about diverts. ``decides``: a former leader must not answer. Raises Unavailable."""
        topic, prefix = self._topics.control, f"{DEFINITION_KEY}{DIVERT}"
        definitions: dict[str, PipelineDefinition | None] = {}
        covered: dict[str, list[CoverageMark]] = {}
        access: dict[str, DivertAccess] = {}
        deleted: set[str] = set()
        for name, stored in self._table(topic, timeout_s, decides=decides).items():
            place = stored.place(topic, name.encode())
            if name.startswith(prefix):
                if (pipeline := named_pipeline(name, DEFINITION_KEY, place, self._skipped)) is not None:
                    definitions[pipeline.removeprefix(DIVERT)] = self._readable(PipelineDefinition, stored.value, place)
            elif name.startswith(f"{DELETED_KEY}{DIVERT}"):
                if self._readable(PipelineDeletion, stored.value, place) is not None:
                    deleted.add(name.removeprefix(f"{DELETED_KEY}{DIVERT}"))
            elif name.startswith(COVERED_KEY) and (found := self._readable(CoverageMark, stored.value, place)) is not None:
                covered.setdefault(covered_pipeline(name).removeprefix(DIVERT), []).append(found)
            elif name.startswith(f"{ACCESS_KEY}{DIVERT}"):
                # A decision that cannot be read is made again: no divert has a user without a name.
                said = self._readable(DivertAccess, stored.value, place) or DivertAccess("", "")
                access[name.removeprefix(f"{ACCESS_KEY}{DIVERT}")] = said
        return DivertRecords(definitions, covered, access, frozenset(deleted))

    def _readable(self, kind: type[C], value: bytes, place: str) -> C | None:
        """Return a record; None if it cannot be read, which is logged once."""
        try:
            return decoded(kind, value, place)
        except UnreadableControl as error:
            self._skipped(place, str(error))
            return None

    def _skipped(self, place: str, reason: str) -> None:
        """Log once that a record has no effect."""
        if place not in self._unreadable:
            self._unreadable.add(place)
            log.error("pipeline control record skipped", error=reason)

    def _job_skipped(self, place: str, reason: str) -> None:
        """Log once that a redrive job has no effect."""
        if place not in self._unreadable:
            self._unreadable.add(place)
            log.error("redrive job skipped", error=reason)

    def say_covered(self, divert: str, epoch: int, covered: CoverageMark) -> None:
        """Store what an epoch says about a divert, and return when Kafka has stored it. Raises Unavailable."""
        self._store(f"{COVERED_KEY}{DIVERT}{divert}/{epoch}", encoded(covered))

    def say_access(self, divert: str, said: DivertAccess | None) -> None:
        """Store a decision about a divert with a user, or delete it, and return when Kafka has stored it. Raises Unavailable."""
        self._store(f"{ACCESS_KEY}{DIVERT}{divert}", None if said is None else encoded(said))

    def reports(self, timeout_s: float) -> Reports:
        """Return the newest reports without those that cannot be read, which the driver replaces within a minute. Raises Unavailable."""
        topic = self._topics.reports
        table = self._table(topic, timeout_s)
        own = table.pop(DRIVER_KEY, None)
        driver = None if own is None else self._readable(DriverReport, own.value, own.place(topic, DRIVER_KEY.encode()))
        found = {name: self._readable(PipelineReport, stored.value, stored.place(topic, name.encode())) for name, stored in table.items()}
        return Reports(driver, {name: report for name, report in found.items() if report is not None})

    def reported(self, timeout_s: float) -> set[str]:
        """Return the names of the pipelines that have a report, also one that cannot be read. Raises Unavailable."""
        return self._table(self._topics.reports, timeout_s).keys() - {DRIVER_KEY}

    def begun(self, pipeline: str, timeout_s: float) -> str:
        """Return the id of the definition to which stored positions of a pipeline belong, "" if there are none. Raises Unavailable."""
        mark = f"{DEFINED}{pipeline}"
        stored = self._positions([position_partition(mark)], timeout_s).get(mark.encode())
        return "" if stored is None else Position.decode(stored.value).owner

    def _positions(self, partitions: Sequence[int], timeout_s: float) -> Mapping[bytes, Stored]:
        """Return the records of partitions of the positions, none if the topic does not exist. Raises Unavailable."""
        topic = self._topics.positions
        if topic not in Topics(self._kafka).partitions():
            return {}
        with closing(TableReader(self._kafka, topic, partitions, shared=self._shared)) as reader:
            return reader.read_behind_barrier(timeout_s)

    def want(self, pipeline: str, wish: Wish | RestartWish | OffsetsWish) -> None:
        """Store a wish, and return when Kafka has stored it. Raises Unavailable."""
        self._store(f"{_KEYS[type(wish)]}{pipeline}", encoded(wish))

    def define(self, pipeline: str, definition: PipelineDefinition, *, version: int | None = None) -> bool:
        """Store a definition, and return when Kafka has stored it. A new pipeline has no wishes of an earlier one.

        Returns False, and stores nothing, if ``Wishes.version`` is not ``version`` any more. Raises Unavailable.
        """
        key, new = f"{DEFINITION_KEY}{pipeline}", definition.revision == 1
        value = encoded(definition)

        def records(table: Mapping[str, Stored]) -> dict[str, bytes | None]:
            found: dict[str, bytes | None] = dict.fromkeys(_wishes_about(pipeline)) if new else {}
            if new:  # without the tombstone of the deletion, a later loss of the definition would look like a deletion
                found |= dict.fromkeys([f"{DELETED_KEY}{pipeline}", *self._covered(table, pipeline, but=definition.id)])
            return {**found, key: value}

        return self._change(records, version, lambda table: key in table and table[key].value == value)

    def undefine(self, pipeline: str, deletion: PipelineDeletion, *, version: int | None = None) -> bool:
        """Delete a definition and the wishes about its pipeline. Returns False as ``define`` does. Raises Unavailable.

        The record of the deletion stays: the driver deletes no positions of a pipeline whose definition is only missing.
        """
        key, mark = f"{DEFINITION_KEY}{pipeline}", f"{DELETED_KEY}{pipeline}"
        value = encoded(deletion)

        def records(table: Mapping[str, Stored]) -> dict[str, bytes | None]:
            return {mark: value, **dict.fromkeys([key, *_wishes_about(pipeline), *self._covered(table, pipeline)])}

        if not self._change(records, version, lambda table: key not in table and mark in table and table[mark].value == value):
            return False
        try:
            self._forget_deletions()
        except BasculeError as error:  # the pipeline is deleted, and the next deletion tries again
            log.warning("could not forget old deletions of pipelines", error=str(error))
        return True

    def _change(
        self, records: Callable[[Mapping[str, Stored]], Mapping[str, bytes | None]], version: int | None,
        done: Callable[[Mapping[str, Stored]], bool],
    ) -> bool:  # fmt: skip
        """Write the records for the current table, all or none: no other change of a definition comes between the read and the write.

        Returns False, and writes nothing, if the table has not the version.

        ``done`` returns whether an earlier try, whose outcome was in doubt, has written them.
        """
        topic, tries = self._topics.control, itertools.count()

        def make(found: Mapping[bytes, Stored]) -> list[Outgoing]:
            table = {key.decode(errors="replace"): stored for key, stored in found.items()}
            if next(tries) and done(table):
                return []
            if version not in (None, version_of({key: stored.offset for key, stored in table.items()})):
                raise _OtherVersion
            return [_record(topic, key, value) for key, value in records(table).items()]

        with closing(Slot(self._kafka, topic, topic, 0, ahead=False)) as slot:
            try:
                slot.transact(make)
            except _OtherVersion:
                return False
        return True

    def _forget_deletions(self) -> None:
        """Delete the oldest records of deletions, and keep those of pipelines with a report or positions, and DELETIONS_MAX others.

        Without its record, a deletion that no driver has followed yet would look like a lost definition, which keeps the positions. A
        missing report alone does not prove that a driver has: a driver that starts deletes the reports of the earlier one.
        """
        records = self._table(self._topics.control, FORGET_TIMEOUT_S)
        found = {name: stored.offset for name, stored in records.items() if name.startswith(DELETED_KEY)}
        if len(found) <= 2 * DELETIONS_MAX:
            return
        keys = [key.decode(errors="replace") for key in self._positions(range(POSITION_PARTITIONS), FORGET_TIMEOUT_S)]
        kept = {key.removeprefix(DEFINED) for key in keys if key.startswith(DEFINED)} | self.reported(FORGET_TIMEOUT_S)
        handled = sorted((name for name in found if name.removeprefix(DELETED_KEY) not in kept), key=found.__getitem__)
        for future in [
            self._shared.appender.append(_record(self._topics.control, name, None)) for name in handled[: len(handled) - DELETIONS_MAX]
        ]:
            await_stored(future)

    def _covered(self, table: Mapping[str, Stored], pipeline: str, *, but: str = "") -> list[str]:
        """Return the keys of what brokers say about a divert, except about the definition with the id ``but``."""
        if not pipeline.startswith(DIVERT):
            return []
        topic, found = self._topics.control, []
        for name, stored in table.items():
            if name.startswith(COVERED_KEY) and covered_pipeline(name) == pipeline:
                mark = self._readable(CoverageMark, stored.value, stored.place(topic, name.encode()))
                if mark is None or mark.id != but:
                    found.append(name)
        return found

    def _store(self, key: str, value: bytes | None) -> None:
        await_stored(self._shared.appender.append(_record(self._topics.control, key, value)))

    def ask(self, job: RedriveJob) -> None:
        """Store a job for dead letters, and return when Kafka has stored it. Raises Unavailable."""
        self._store(f"{JOB_KEY}{job.id}", job.encode())

    def forget(self, jobs: Iterable[str]) -> None:
        """Delete jobs that are finished. Raises Unavailable."""
        for future in [self._shared.appender.append(_record(self._topics.control, f"{JOB_KEY}{job}", None)) for job in jobs]:
            await_stored(future)

    def report(self, reports: Mapping[str, PipelineReport | DriverReport | None]) -> list[Future[int]]:
        """Write reports by key; None deletes. Returns the futures of ``Appender.append``."""
        values = {key: None if report is None else encoded(report) for key, report in reports.items()}
        return [self._shared.appender.append(_record(self._topics.reports, key, value)) for key, value in values.items()]

    def close(self) -> None:
        """Free the clients."""
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()
        self._shared.close()

    def _end_open_change(self, _table: Mapping[bytes, Stored]) -> None:
        """End the transaction of a broker that was killed while it changed a definition. A broker that is only slow tries again."""
        end_open_transactions(self._kafka, [self._topics.control])

    def _table(self, topic: str, timeout_s: float, *, decides: bool = False) -> dict[str, Stored]:
        with self._lock:
            if topic not in self._readers:
                self._readers[topic] = TableReader(self._kafka, topic, [0], shared=self._shared)
            reader = self._readers[topic]
        try:
            held_up = self._end_open_change if topic == self._topics.control else None
            found = reader.read_behind_barrier(timeout_s, held_up) if decides else reader.read(timeout_s, held_up)
            if not decides and reader.retreated and topic == self._topics.reports:
                # No barrier tells whether the topic was recreated, because a broker may only read the reports. The result may be old, and a
                # report may be missing. A decision that depends on a missing report also reads the positions.
                reader.forget()
                found = reader.read(timeout_s)
            elif not decides and reader.retreated:  # raises an error if the topic was recreated: what was read is gone
                found = reader.read_behind_barrier(timeout_s)
            reader.rest()
        except BaseException:
            with self._lock:
                if self._readers.get(topic) is reader:
                    del self._readers[topic]
            reader.close()
            raise
        return {key.decode(errors="replace"): stored for key, stored in found.items()}


def _wishes_about(pipeline: str) -> list[str]:
    """Return the keys of the wishes about a pipeline."""
    return [f"{kind}{pipeline}" for kind in _KEYS.values()]


def _record(topic: str, key: str, value: bytes | None) -> Outgoing:
    return Outgoing(topic, key.encode(), value, partition=0)
