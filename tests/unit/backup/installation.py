"""Backup and restore of an installation in a Kafka in memory, and a small installation that no broker has to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bascule.backup.copies import Manifest
from bascule.backup.place import new_backup
from bascule.backup.restoring import Restore, RestoreResult
from bascule.backup.taking import Backup
from bascule.core.topics import DECISIONS, JournalTopics
from bascule.journal.records import Kind, Op, encode_record, ingress_entry, json_entry
from bascule.kafka import own_topics
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.server.broker_process import PREFIX

TOPICS = JournalTopics(PREFIX)
BRIDGE = "bascule"
#: The topic of the audit, which a small installation has, and which `bascule backup --topic` copies.
AUDIT = "audit"


def back_up(directory: Path, progress: Callable[[str, int], None] = lambda *_: None, *others: str) -> Manifest:
    with new_backup(directory):
        manifest = Backup(SETTINGS, TOPICS, BRIDGE, directory, others=others, progress=progress).take()
        manifest.store(directory)
    return manifest


def restored(directory: Path, **options: bool) -> RestoreResult:
    return Restore(SETTINGS, TOPICS, BRIDGE, directory).run(**options)


def small_installation(kafka: KafkaInMemory) -> None:
    """Create a journal, of which the broker has taken one of two messages of an ingress, with decisions and an audit."""
    for name, topic in {TOPICS.journal: own_topics.JOURNAL, TOPICS.ingress: own_topics.INGRESS, DECISIONS: own_topics.DECISIONS}.items():
        kafka.create(name, topic.partitions or 1, **topic.settings)
    kafka.create(AUDIT, retention_ms="1000")
    start = encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {"exclusive": []}))
    kafka.put(TOPICS.journal, start, b"E")
    kafka.put(TOPICS.journal, encode_record(Kind.STATE, 0, 1, ingress_entry(0, 1)), b"S")
    kafka.put(TOPICS.ingress, b"taken")
    kafka.put(TOPICS.ingress, b"waits")
    kafka.put(DECISIONS, b"commit", b"xid")
    kafka.put(AUDIT, b"line")
