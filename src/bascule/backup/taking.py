"""Take a backup: copy the topics of an installation as of one offset of the journal.

The order keeps the promises, while the broker may continue to work:

1. The topics that only the pipelines and transaction managers write are copied first: positions, ``bascule.ingress``, control, dead
   letters, decisions. At the end, the backup checks that they have not changed.
2. Snapshots and store are copied until no snapshot was written meanwhile: they contain a complete snapshot with its messages.
3. The journal is copied last, up to the end that it has then. So everything that was copied before refers to offsets below that end.

The result is the state at the end of the journal: positions, ``bascule.ingress`` and decisions were the same then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bascule import __version__
from bascule.backup.copies import (
    FILES,
    CopiedRecord,
    JournalCut,
    Manifest,
    PartitionCopy,
    RecordFileWriter,
    TopicCopy,
    TopicKind,
    file_digest,
    record_file,
)
from bascule.backup.journal_scan import BackupScan
from bascule.broker.snapshot import Snapshot, decode
from bascule.core import topics as names
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.log import get_log
from bascule.core.topics import JournalTopics
from bascule.kafka import restore_mark
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory, content_of, known_offset, readable_headers
from bascule.kafka.snapshots import BARRIER_KEY as SNAPSHOT_BARRIER
from bascule.kafka.snapshots import is_snapshot_key, joined
from bascule.writer.position import Position
from bascule.writer.reading import BARRIER_KEY

_log = get_log(__name__)

#: How often snapshots and store are copied again because a snapshot was written meanwhile, or the journal was trimmed.
ATTEMPTS_MAX: Final = 10
#: Kafka ends a transaction that was left open after ``transaction.timeout.ms``, 30 s except for a second attempt.
TRANSACTION_TIMEOUT_S: Final = 90.0
_POLL_S: Final = 0.2
#: Keys of records that readers write to find the end of a topic. They change nothing.
_BARRIERS: Final = frozenset({BARRIER_KEY, SNAPSHOT_BARRIER})
#: ``progress`` receives the topic, and the number of its records that were copied.
Progress = Callable[[str, int], None]
#: A function that receives each record of a topic before it is written.
_Take = Callable[[str, CopiedRecord], None]


class Backup:
    """Copies the topics of one journal into a directory."""

    def __init__(
        self, kafka: Mapping[str, Any], topics: JournalTopics, bridge: str, directory: Path,
        *, others: Sequence[str] = (), progress: Progress = lambda *_: None,
    ) -> None:  # fmt: skip
        """``others`` are further topics to copy, which nobody may write meanwhile."""
        self._kafka = kafka
        self._topics = topics
        self._bridge = bridge
        self._directory = directory
        self._others = tuple(others)
        self._progress = progress
        self._admin = Topics(kafka)
        self._there: dict[str, int] = {}
        self._table_of_snapshots: dict[bytes, bytes] = {}
        self._positions: dict[bytes, Position] = {}

    def take(self) -> Manifest:
        """Copy all topics, and return the manifest, which is not stored yet.

        Raises InvalidInput without a journal or after an interrupted restore, Unavailable if a topic changed that must not change
        meanwhile, OSError.
        """
        topics = self._topics
        self._there = self._admin.partitions()
        if topics.journal not in self._there:
            raise InvalidInput(f"there is no topic {topics.journal!r} (journal.prefix); there is nothing to back up")
        if topics.ingress in self._there and restore_mark.is_marked(self._admin.config(topics.ingress)):
            raise InvalidInput(f"topic {topics.ingress!r} belongs to a restore that was interrupted; repeat `bascule restore`")
        if known := topics.own.intersection(self._others):
            raise InvalidInput(f"topic {min(known)!r} belongs to the journal; leave it out of the further topics")
        if missing := [name for name in self._others if name not in self._there]:
            raise InvalidInput(f"there is no topic {missing[0]!r}")
        copied = sorted({topics.journal, topics.snapshots, topics.store, *self._still()}.intersection(self._there))
        ids = self._admin.ids(copied)
        still = {name: self._copy(name, self._note_position) for name in self._still()}
        moving, snapshot, journal, scan = self._moving()
        parts = {**still, **moving, topics.journal: (journal,)}
        cut = self._cut(scan, snapshot, journal, parts.get(topics.ingress, ()))
        self._check_positions(journal, ids[topics.journal])
        self._check_unchanged(still, ids)
        copies = tuple(TopicCopy(name, self._kind(name), ids[name], self._admin.overrides(name), parts[name]) for name in parts)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        files = {path.name: file_digest(path) for path in sorted((self._directory / FILES).glob("*"))}
        return Manifest(__version__, created, topics.prefix, self._bridge, topics.partition, cut, copies, files)

    def _still(self) -> list[str]:
        """Return the topics that must not change during the backup."""
        topics = self._topics
        wanted = [topics.positions, topics.control, topics.ingress, topics.dead_letters, *sorted(names.SHARED), *self._others]
        return [name for name in dict.fromkeys(wanted) if name in self._there]

    def _kind(self, name: str) -> TopicKind:
        topics = self._topics
        kinds = {
            topics.journal: TopicKind.JOURNAL, topics.ingress: TopicKind.INGRESS, topics.snapshots: TopicKind.SNAPSHOTS,
            topics.positions: TopicKind.POSITIONS, f"{names.XA_PREFIX}.side": TopicKind.SIDE,
        }  # fmt: skip
        return kinds.get(name, TopicKind.PLAIN)

    def _copy(self, name: str, take: _Take) -> tuple[PartitionCopy, ...]:
        """Copy the committed records of a topic."""
        return tuple(self._copy_partition(name, partition, take) for partition in range(self._there[name]))

    def _copy_partition(self, name: str, partition: int, take: _Take) -> PartitionCopy:
        history = TopicHistory(self._kafka, name, partition)
        attempts_left = ATTEMPTS_MAX
        while True:
            attempts_left -= 1
            first, end = history.earliest(), _ended(history, name)
            try:
                return self._written(name, partition, first, end, history.records(first, end, committed=True), take)
            except Unavailable:
                # Records are deleted meanwhile: by age, or by the broker if it has journaled more of ``bascule.ingress``.
                if not attempts_left or history.earliest() <= first:
                    raise

    def _written(self, name: str, partition: int, first: int, end: int, records: Iterable[Any], take: _Take) -> PartitionCopy:
        with RecordFileWriter(self._directory, record_file(name, partition)) as file:
            for message in records:
                record = _copied(message)
                take(name, record)
                file.write(record)
                self._progress(name, file.records)
            return file.copied(partition, first, end)

    def _moving(self) -> tuple[dict[str, tuple[PartitionCopy, ...]], Snapshot | None, PartitionCopy, BackupScan]:
        """Copy snapshots and store, and then the journal. Return the newest snapshot, too. Raises Unavailable."""
        attempts_left = ATTEMPTS_MAX
        while True:
            attempts_left -= 1
            copied, snapshot, first = self._snapshots_and_store()
            try:
                return copied, snapshot, *self._journal(first)
            except Unavailable:
                # A snapshot of the meantime may have let the broker trim what was not read yet. Its copy then covers the rest.
                if not attempts_left or TopicHistory(self._kafka, self._topics.journal, self._topics.partition).earliest() <= first:
                    raise

    def _snapshots_and_store(self) -> tuple[dict[str, tuple[PartitionCopy, ...]], Snapshot | None, int]:
        """Copy both. Return the newest snapshot, and the first offset of the journal, which the snapshot covers. Raises Unavailable."""
        topics = self._topics
        history = TopicHistory(self._kafka, topics.journal, topics.partition)
        for _ in range(ATTEMPTS_MAX):
            self._table_of_snapshots = {}
            found = {name: self._copy(name, self._note_chunk) for name in (topics.snapshots, topics.store) if name in self._there}
            snapshot, first = self._newest_snapshot(), history.earliest()
            needed = 0 if snapshot is None else snapshot.first_offset()
            ends = {name: TopicHistory(self._kafka, name, 0).latest() for name in found if name == topics.snapshots}
            if first <= needed and all(end == found[name][0].end for name, end in ends.items()):
                return found, snapshot, first
        raise Unavailable(f"a snapshot was written during each of {ATTEMPTS_MAX} attempts to copy snapshots and store; repeat the backup")

    def _note_chunk(self, name: str, record: CopiedRecord) -> None:
        key = record.key or b""
        if name != self._topics.snapshots or not is_snapshot_key(key):
            return
        if record.value is None:
            self._table_of_snapshots.pop(key, None)
        else:
            self._table_of_snapshots[key] = record.value

    def _newest_snapshot(self) -> Snapshot | None:
        found = [decode(data) for data in joined(self._table_of_snapshots).values()]
        self._table_of_snapshots = {}
        return max(found, key=lambda each: (each.epoch, each.sequence), default=None)

    def _journal(self, first: int) -> tuple[PartitionCopy, BackupScan]:
        name, partition = self._topics.journal, self._topics.partition
        history = TopicHistory(self._kafka, name, partition)
        end, scan = history.latest(), BackupScan(first, partition)

        def take(_: str, record: CopiedRecord) -> None:
            scan.take(record.offset, record.value)

        return self._written(name, partition, first, end, history.records(first, end), take), scan

    def _cut(self, scan: BackupScan, snapshot: Snapshot | None, journal: PartitionCopy, ingress: Sequence[PartitionCopy]) -> JournalCut:
        topic_id, offset = scan.ingress(snapshot)
        cut = JournalCut(journal.end, *scan.fence(snapshot), topic_id, offset)
        copied = next((part for part in ingress if part.partition == self._topics.partition), None)
        if topic_id and copied is not None and self._admin.id(self._topics.ingress) != topic_id:
            raise Unavailable(f"topic {self._topics.ingress!r} was recreated; run `bascule ingress reset`, and then back up")
        if (topic_id or offset) and copied is not None and not copied.first <= offset <= copied.end:
            raise Unavailable(
                f"the broker reads {self._topics.ingress!r} from offset {offset}, and the copy has offsets {copied.first} to {copied.end}."
                " The topic has changed during the backup; stop or pause the pipelines, and repeat the backup"
            )
        if snapshot is not None and snapshot.next_offset > journal.end:
            raise Unavailable(
                f"the journal ends at offset {journal.end}, before snapshot {snapshot.id}: a Kafka node is cut off from the cluster, or the"
                " journal has lost its end. Repeat the backup"
            )
        return cut

    def _check_positions(self, journal: PartitionCopy, topic_id: str) -> None:
        """Check that the journal has everything from each position in it. Raises Unavailable."""
        for key, position in self._positions.items():
            if position.topic_id == topic_id and position.offset > journal.end:
                raise Unavailable(
                    f"position {key!r} is at offset {position.offset}, and the journal ends at {journal.end}: a Kafka node is cut off from"
                    " the cluster. Repeat the backup"
                )

    def _note_position(self, name: str, record: CopiedRecord) -> None:
        if name == self._topics.positions and record.key is not None:
            if record.value is None:
                self._positions.pop(record.key, None)
            else:
                self._positions[record.key] = Position.decode(record.value)

    def _check_unchanged(self, still: Mapping[str, Sequence[PartitionCopy]], ids: Mapping[str, str]) -> None:
        if self._admin.ids(ids) != ids:
            raise Unavailable("a topic was deleted or recreated during the backup; repeat it")
        if added := sorted(set(self._still_now()) - still.keys()):
            raise Unavailable(f"topic {added[0]!r} was created during the backup; repeat it")
        for name, parts in still.items():
            for part in parts:
                history = TopicHistory(self._kafka, name, part.partition)
                # Only a barrier record is a tombstone under one of these keys.
                for message in history.records(part.end, history.latest()):
                    if message.value() is not None or message.key() not in _BARRIERS:
                        raise Unavailable(
                            f"topic {name!r} has changed during the backup: somebody wrote offset {message.offset()} of partition"
                            f" {part.partition}. Stop or pause the pipelines, stop programs with transactions, and repeat the backup"
                        )

    def _still_now(self) -> list[str]:
        self._there = self._admin.partitions()
        return self._still()


def _copied(message: Any) -> CopiedRecord:
    key, value = content_of(message)
    headers, offset = readable_headers(message), known_offset(message)
    if headers is None:  # Bascule writes no such record
        _log.warning(
            "record copied without headers", topic=message.topic(), partition=message.partition(), offset=offset,
            reason="the name of a header is not UTF-8",
        )  # fmt: skip
    return CopiedRecord(offset, message.timestamp()[1], key, value, tuple(headers or ()))


def _ended(history: TopicHistory, name: str) -> int:
    """Return the end of a partition without open transactions. Raises Unavailable."""
    deadline_s = time.monotonic() + TRANSACTION_TIMEOUT_S
    while True:
        end = history.latest()
        if history.stable() >= end:
            return end
        if time.monotonic() > deadline_s:
            raise Unavailable(f"topic {name!r} has an open transaction; stop or pause the pipelines, and repeat the backup")
        time.sleep(_POLL_S)
