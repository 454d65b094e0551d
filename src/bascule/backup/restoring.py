"""Restore a backup into a Kafka without the topics of the installation.

The journal and the side topic of transactions get the same offsets as before, because snapshots, positions and branches refer to them:
empty records take the place of the deleted part, and are deleted. All other topics get new offsets. Positions and snapshots get the id of
the new journal. A last record of the journal says that ``bascule.ingress`` has a new id, and begins with the first message that is not
journaled.

A restore is complete or has no effect. Until its last step, the new topics have a mark (``bascule.kafka.restore_mark``) with which nothing
of Bascule starts. A restore that finds the mark deletes the topics of an interrupted restore, and begins again.

Once all records are written, ``bascule.ingress`` gets a mark with the digest of the backup. Then the marks of all other topics are removed,
and that of ``bascule.ingress`` last. If this is interrupted, a repeated restore removes the rest: it can no longer delete topics without a
mark, because another program may use them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bascule.backup.copies import CopiedRecord, InvalidBackup, Manifest, PartitionCopy, TopicCopy, TopicKind, check_files, records_of
from bascule.backup.place import restored_backup
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import JournalTopics
from bascule.journal.errors import ForeignRecord
from bascule.journal.records import KEY_OF_KIND, Kind, Op, decode_header, encode_record, json_entry
from bascule.kafka import own_topics, restore_mark
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import trim
from bascule.kafka.history import TopicHistory
from bascule.kafka.replication import CLUSTER_DEFAULT
from bascule.kafka.rewriting import OrderedAppends, fill
from bascule.kafka.snapshots import JOURNAL_KEY
from bascule.writer.position import INGRESS, UNKNOWN_EPOCH, Position
from bascule.writer.redrive import POSITION_KEY

#: Settings that belong to a cluster, and not to the topic, and settings of Kafka 3 that Kafka 4 refuses.
_NOT_RESTORED: Final = frozenset(
    {
        "min.insync.replicas", "leader.replication.throttled.replicas", "follower.replication.throttled.replicas",
        "remote.storage.enable", "remote.log.copy.disable", "remote.log.delete.on.disable",
        "message.format.version", "message.timestamp.difference.max.ms",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The end of a restore. ``recreated`` has topics of ingresses that are missing or have another id than at the time of the backup."""

    manifest: Manifest
    records: int
    recreated: tuple[str, ...]


class Restore:
    """Restores one backup."""

    def __init__(
        self, kafka: Mapping[str, Any], topics: JournalTopics, bridge: str, directory: Path,
        *, replication_factor: int = CLUSTER_DEFAULT, min_insync_replicas: int | None = None,
        progress: Callable[[str, int], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._kafka = kafka
        self._topics = topics
        self._bridge = bridge
        self._directory = directory
        self._replication_factor = replication_factor
        self._settings = {} if min_insync_replicas is None else {"min.insync.replicas": str(min_insync_replicas)}
        self._progress = progress
        self._admin = Topics(kafka)
        self._ids: dict[str, str] = {}
        #: Whether Kafka has a part of the restore: topics with the mark.
        self.begun = False

    def run(self, *, adopt_sources: bool = False) -> RestoreResult:
        """Check the backup, and restore it. ``adopt_sources`` continues ingresses in topics that were recreated with the same records.

        Raises InvalidBackup, InvalidInput if the topics exist, Unavailable, Denied.
        """
        manifest = self._checked()
        with restored_backup(self._directory):
            recreated = self._recreated(manifest)
            adopted = self._admin.ids(recreated) if adopt_sources else {}
            written = restore_mark.written(hashlib.sha256(f"{manifest.digest()} {adopt_sources}".encode()).hexdigest())
            if not self._is_written(manifest, written):
                self._clear(manifest)
                self.begun = True
                self._create(manifest)
                self._write(manifest, adopted)
                self._admin.set(self._topics.ingress, {restore_mark.SETTING: written})
            self.begun = True
            self._complete(manifest)
        records = sum(part.records for copy in manifest.topics for part in copy.parts)
        return RestoreResult(manifest, records, tuple(name for name in recreated if name not in adopted))

    def _checked(self) -> Manifest:
        """Return the manifest of a backup that is not damaged and that this version of Bascule can read."""
        manifest = Manifest.load(self._directory)
        if (manifest.prefix, manifest.bridge, manifest.partition) != (self._topics.prefix, self._bridge, self._topics.partition):
            raise InvalidInput(
                f"the backup has journal.prefix = {manifest.prefix!r} and bridge.id = {manifest.bridge!r}, and the configuration has"
                f" {self._topics.prefix!r} and {self._bridge!r}; use the configuration of the backup"
            )
        journal = manifest.copy_of(self._topics.journal)
        if journal is None:
            raise InvalidBackup(f"{self._directory} has no copy of {self._topics.journal!r}")
        check_files(self._directory, manifest, self._progress)
        for part in journal.parts:
            for count, record in enumerate(records_of(self._directory, part), 1):
                with suppress(ForeignRecord):
                    decode_header(record.value)
                self._progress(f"reading {journal.name}", count)
        return manifest

    def _is_written(self, manifest: Manifest, mark: str) -> bool:
        """Return whether an earlier restore of the backup, with the same options, was interrupted after all records were written."""
        ingress = self._topics.ingress
        wanted = {ingress, *(copy.name for copy in manifest.topics)}
        return wanted <= self._admin.partitions().keys() and self._admin.config(ingress).get(restore_mark.SETTING) == mark

    def _write(self, manifest: Manifest, adopted: Mapping[str, str]) -> None:
        """Write all records."""
        appends = OrderedAppends(self._kafka)
        appends.introduce(self._topics.journal)
        for copy in manifest.topics:
            for part in copy.parts:
                self._restore(appends, manifest, copy, part, adopted)
        self._announce_ingress(appends, manifest)

    def _clear(self, manifest: Manifest) -> None:
        """Delete the topics of an interrupted restore. Raises InvalidInput if other topics exist."""
        ingress, own = self._topics.ingress, self._topics.own | {self._topics.dead_letters}
        names = {copy.name for copy in manifest.topics} | own
        found = sorted(names & self._admin.partitions().keys(), key=lambda name: (name == ingress, name))
        interrupted = ingress in found and self._is_marked(ingress)
        if kept := [name for name in found if not (interrupted and (name in own or self._is_marked(name)))]:
            where = "has been interrupted here, and has not created" if interrupted else "needs a Kafka without"
            raise InvalidInput(
                f"Kafka has {', '.join(kept)}. A restore {where} these topics, and deletes none of them. Use another Kafka, or delete these"
                " topics, and with them their messages, and repeat the restore"
            )
        self._admin.delete(found)

    def _is_marked(self, name: str) -> bool:
        return restore_mark.is_marked(self._admin.config(name))

    def _create(self, manifest: Manifest) -> None:
        """Create the topics, first the one that stops broker and pipelines."""
        ingress = manifest.copy_of(self._topics.ingress)
        settings = ingress.settings if ingress is not None else dict(own_topics.INGRESS.settings)
        self._create_one(self._topics.ingress, len(ingress.parts) if ingress is not None else 1, settings)
        for copy in manifest.topics:
            if copy.kind is not TopicKind.INGRESS:
                self._create_one(copy.name, len(copy.parts), copy.settings)
        wanted = {self._topics.ingress, *(copy.name for copy in manifest.topics)}
        self._admin.await_visible(wanted)
        self._ids = self._admin.ids(wanted)

    def _create_one(self, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        kept = {key: value for key, value in settings.items() if key not in _NOT_RESTORED}
        if not self._admin.create(
            name,
            partitions,
            {**kept, **self._settings, restore_mark.SETTING: restore_mark.WRITING},
            replication_factor=self._replication_factor,
        ):
            raise Unavailable(f"topic {name!r} was created by another program during the restore. Stop it, and repeat the restore")

    def _recreated(self, manifest: Manifest) -> list[str]:
        """Return the topics of ingresses that are missing, or have another id than at the time of the backup."""
        copy = manifest.copy_of(self._topics.positions)
        seen: dict[str, str] = {}
        for part in copy.parts if copy is not None else ():
            for record in records_of(self._directory, part):
                if record.value is not None and _is_of_source(record, position := Position.decode(record.value)):
                    seen[position.topic] = position.topic_id
        ids = self._admin.ids(seen)
        return sorted(name for name, topic_id in seen.items() if ids.get(name) != topic_id)

    def _restore(
        self, appends: OrderedAppends, manifest: Manifest, copy: TopicCopy, part: PartitionCopy, adopted: Mapping[str, str]
    ) -> None:
        name, keeps = copy.name, copy.kind in (TopicKind.JOURNAL, TopicKind.SIDE)
        next_offset = time_ms = 0
        for count, record in enumerate(self._changed(manifest, copy, part, adopted), 1):
            time_ms = max(0, record.timestamp_ms)
            if keeps and record.offset > next_offset:
                self._fill(appends, name, part.partition, record.offset - next_offset, time_ms)
                next_offset = record.offset
            appends.append(_outgoing(name, part.partition, record))
            next_offset += 1
            self._progress(name, count)
        if keeps and part.end > next_offset:
            self._fill(appends, name, part.partition, part.end - next_offset, time_ms)
            next_offset = part.end
        appends.flush(name)
        if keeps and part.first:
            trim(self._kafka, name, {part.partition: part.first})
        self._check_extent(name, part.partition, part.first if keeps else 0, next_offset)

    def _check_extent(self, name: str, partition: int, first: int, end: int) -> None:
        history = TopicHistory(self._kafka, name, partition)
        found = history.earliest(), history.latest()
        if found[1] != end or (found[0] != first and first):
            raise Unavailable(
                f"partition {partition} of topic {name!r} has offsets {found[0]} to {found[1]}, and not {first} to {end}: another program"
                " has written to the topic, or Kafka did not delete records. Repeat the restore"
            )

    def _changed(self, manifest: Manifest, copy: TopicCopy, part: PartitionCopy, adopted: Mapping[str, str]) -> Iterator[CopiedRecord]:
        """Yield the records of a partition as the new topics need them."""
        records = records_of(self._directory, part)
        if copy.kind is TopicKind.INGRESS:
            first = manifest.cut.ingress_offset if part.partition == self._topics.partition else 0
            return (record for record in records if record.offset >= first)
        if copy.kind is TopicKind.POSITIONS:
            return self._positions(records, manifest, adopted)
        if copy.kind is TopicKind.SNAPSHOTS:
            return self._snapshots(records)
        return records

    def _snapshots(self, records: Iterable[CopiedRecord]) -> Iterator[CopiedRecord]:
        for record in records:
            known = record.key == JOURNAL_KEY and record.value is not None
            yield replace(record, value=self._ids[self._topics.journal].encode()) if known else record

    def _positions(self, records: Iterable[CopiedRecord], manifest: Manifest, adopted: Mapping[str, str]) -> Iterator[CopiedRecord]:
        """Yield positions with the ids of the new topics. Leader epochs begin again in a new topic."""
        journal = manifest.copy_of(self._topics.journal)
        for record in records:
            position = None if record.value is None else Position.decode(record.value)
            topic_id = None
            if position is not None and record.key == POSITION_KEY.encode():
                # Its marks belong to the dead letters before: in the new topic, all of them wait.
                yield replace(record, value=replace(position, topic="", topic_id="").encode())
                continue
            if position is not None and journal is not None and (position.topic, position.topic_id) == (journal.name, journal.topic_id):
                topic_id = self._ids[journal.name]
            elif position is not None and _is_of_source(record, position):
                topic_id = adopted.get(position.topic)
            if position is not None and topic_id is not None:
                yield replace(record, value=replace(position, topic_id=topic_id, leader_epoch=UNKNOWN_EPOCH).encode())
            else:
                yield record

    def _fill(self, appends: OrderedAppends, name: str, partition: int, count: int, time_ms: int) -> None:
        """Append empty records, which take the offsets of records that no longer exist. Raises Unavailable."""
        appends.flush(name)
        told = f"{name}, offsets of deleted records"
        fill(self._kafka, name, partition, count, lambda done: self._progress(told, done), timestamp_ms=time_ms)

    def _announce_ingress(self, appends: OrderedAppends, manifest: Manifest) -> None:
        """Append to the journal that the broker reads the new topic from its start."""
        cut, topics = manifest.cut, self._topics
        if not cut.ingress_topic_id and not cut.ingress_offset:
            return
        content = {"id": self._ids[topics.ingress], "positions": [(topics.partition, 0)]}
        value = encode_record(Kind.STATE, cut.epoch, cut.sequence + 1, json_entry(Op.INGRESS_TOPIC, content))
        now_ms = time.time_ns() // 1_000_000
        appends.append(Outgoing(topics.journal, KEY_OF_KIND[Kind.STATE], value, [], topics.partition, now_ms))
        appends.flush(topics.journal)
        self._check_extent(topics.journal, topics.partition, 0, cut.offset + 1)

    def _complete(self, manifest: Manifest) -> None:
        """Let broker and pipelines start."""
        ingress = self._topics.ingress
        copies = {copy.name: copy.settings for copy in manifest.topics}
        for name in sorted({*copies, ingress}, key=lambda name: (name == ingress, name)):
            settings = copies.get(name, own_topics.INGRESS.settings)
            self._admin.set(name, {restore_mark.SETTING: settings.get(restore_mark.SETTING)})


def _outgoing(name: str, partition: int, record: CopiedRecord) -> Outgoing:
    return Outgoing(name, record.key, record.value, list(record.headers), partition, record.timestamp_ms)


def _is_of_source(record: CopiedRecord, position: Position) -> bool:
    """Return whether a position is that of an ingress in a topic. Other keys have positions in the journal, and marks with any text."""
    return (record.key or b"").startswith(INGRESS.encode()) and position.topic != ""
