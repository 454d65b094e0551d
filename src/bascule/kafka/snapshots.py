"""Snapshots in their compacted topic: chunks under a snapshot's id, and segments that the snapshots of one epoch share.

Old records are deleted by key. A broker uses only the segments of its own epoch, and deletes nothing of a later epoch: so a replaced broker
cannot delete records that its successor's snapshots need.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaException

from bascule.broker.remembered_ids import segment_name
from bascule.broker.snapshot import EncodedSnapshot
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.journal.records import DIGEST_SIZE
from bascule.kafka import clients
from bascule.kafka.compacted import stored_barrier
from bascule.kafka.errors import words
from bascule.kafka.log import ANSWER_TIMEOUT_S, APPEND_SETTINGS, PartitionReader, patient

log = get_log(__name__)

CHUNK_BYTES = 900_000
#: The key of the record with the id of the journal's topic, in the topic of the snapshots.
JOURNAL_KEY = b"journal"
#: Epoch and sequence of a snapshot with the number of a chunk, or an epoch with the name of a segment.
_KEY = re.compile(rb"\d+-\d+/(\d+|head)|\d+/[0-9a-f]{%d}" % (2 * DIGEST_SIZE))
#: Limit of the client's queue, in KiB: a record that waits in it for longer than ``ANSWER_TIMEOUT_S`` fails.
_CLIENT_KBYTES = 32 * 1024
#: The key of barrier records: readers, also those of earlier releases, see the deletion of a snapshot that never existed.
BARRIER_KEY = b"0-0/head"


def is_snapshot_key(key: bytes) -> bool:
    """Return whether a record with this key belongs to a snapshot. Records with other keys are those of other programs."""
    return _KEY.fullmatch(key) is not None


class SnapshotStore:
    """Reads and writes whole snapshots, as bytes. Blocking: do not use it on the event loop."""

    def __init__(self, kafka: Mapping[str, Any], topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._keys = SnapshotKeys()
        self._keys_read = False  # whether the keys that others have written were read
        self._journal_id = ""

    def read(self, *, behind_barrier: bool = False) -> dict[str, bytes]:
        """Return every complete, undamaged snapshot by its id. Raises Unavailable.

        No decision may depend on a read without a barrier, because a former leader may answer.
        """
        chunks = self._chunks(stored_barrier(self._kafka, self._topic, BARRIER_KEY) if behind_barrier else -1)
        self._note(chunks)
        return joined(chunks)

    def _note(self, keys: Iterable[bytes]) -> None:
        self._keys.add(keys)
        self._keys_read = True

    def _chunks(self, barrier: int = -1) -> dict[bytes, bytes]:
        """Return the records of all snapshots, complete or not, by key. Remember the journal's id."""
        reader = PartitionReader(self._kafka, self._topic, 0)
        chunks: dict[bytes, bytes] = {}
        try:
            reader.seek(reader.range()[0])
            for message in reader.to_end(barrier):
                key, value = bytes(message.key() or b""), message.value()
                if key != JOURNAL_KEY and not is_snapshot_key(key):
                    log.error("foreign record skipped", topic=self._topic, offset=message.offset())
                elif value is None:
                    chunks.pop(key, None)
                else:
                    chunks[key] = bytes(value)
        finally:
            reader.close()
        self._journal_id = chunks.pop(JOURNAL_KEY, b"").decode()
        return chunks

    def journal_id(self, now: str) -> str:
        """Return the id that the journal's topic had when it was first seen, or ``now``, which is then stored. Raises Unavailable."""
        if not self._journal_id:
            self._chunks(stored_barrier(self._kafka, self._topic, BARRIER_KEY))
        if not self._journal_id:
            self._send({JOURNAL_KEY: now.encode()})
            self._journal_id = now
        return self._journal_id

    def write(self, snapshot_id: str, encoded: EncodedSnapshot) -> None:
        """Store a snapshot. When this returns, Kafka has it. Raises Unavailable."""
        records = self._keys.to_write(snapshot_id, encoded)
        self._send(records)
        self._keys.written(records)

    def delete_older(self, snapshot_id: str) -> None:
        """Delete all snapshots that this one replaces, and incomplete ones. Raises Unavailable."""
        if not self._keys_read:
            self._note(self._chunks())
        older = self._keys.to_delete(snapshot_id)
        self._send(dict.fromkeys(older))
        self._keys.deleted(older)

    def _send(self, records: Mapping[bytes, bytes | None]) -> None:
        failures: list[str] = []
        # A record that is stored twice does no harm here, and an idempotent client needs half a second for its first record.
        settings = {
            **APPEND_SETTINGS, "enable.idempotence": False, "message.timeout.ms": int(ANSWER_TIMEOUT_S * 1000),
            "queue.buffering.max.kbytes": _CLIENT_KBYTES,
        }  # fmt: skip
        producer = clients.producer({**self._kafka, **settings})
        produce = patient(producer)
        try:
            for key, value in records.items():
                if failures:
                    break
                produce(self._topic, key=key, value=value, on_delivery=lambda error, _: failures.append(words(error)) if error else None)
            left = producer.flush(ANSWER_TIMEOUT_S)
        except KafkaException as error:
            raise Unavailable(f"snapshot could not be stored in topic {self._topic}: {words(error)}") from error
        if left or failures:
            raise Unavailable(
                f"snapshot could not be stored in topic {self._topic}: {failures[0] if failures else 'Kafka does not answer'}"
            )


class SnapshotKeys:
    """The keys that one broker knows in the topic of snapshots. Decides which records a new snapshot needs, and which can be deleted.

    An owner of keys is a snapshot, or the epoch whose snapshots share segments.
    """

    def __init__(self) -> None:
        self._by_owner: dict[str, set[bytes]] = {}
        self._stored: set[bytes] = set()  # segments that this broker has written and not deleted
        self._needed: set[bytes] = set()  # segments of the newest snapshot

    def add(self, keys: Iterable[bytes]) -> None:
        """Note keys that are in the topic."""
        for key in keys:
            self._by_owner.setdefault(_owner(key), set()).add(key)

    def to_write(self, snapshot_id: str, encoded: EncodedSnapshot, chunk_bytes: int = CHUNK_BYTES) -> dict[bytes, bytes]:
        """Return the records of a new snapshot, without segments that are stored.

        The head comes last: without it the snapshot does not count.
        """
        epoch = snapshot_id.partition("-")[0]
        segments = {_segment_key(epoch, segment.name): segment.packed for segment in encoded.segments}
        self._needed = set(segments)
        new = {key: packed for key, packed in segments.items() if key not in self._stored}
        records = {**new, **parted(snapshot_id, encoded, chunk_bytes)}
        self.add(records)
        return records

    def written(self, records: Iterable[bytes]) -> None:
        """Note that the records are stored."""
        self._stored.update(self._needed.intersection(records))

    def to_delete(self, snapshot_id: str) -> list[bytes]:
        """Return the keys that nobody needs once the newest snapshot counts. Those of a later epoch are kept."""
        older = [key for owner, keys in self._by_owner.items() if _age(owner) < _age(snapshot_id) for key in keys]
        unused = self._by_owner.get(snapshot_id.partition("-")[0], set()) - self._needed
        self._stored -= unused
        return [*older, *unused]

    def deleted(self, keys: Iterable[bytes]) -> None:
        """Note that the deletions are stored."""
        for key in keys:
            owner = _owner(key)
            self._by_owner[owner].discard(key)
            if not self._by_owner[owner]:
                del self._by_owner[owner]


def _owner(key: bytes) -> str:
    return key.decode().rpartition("/")[0]


def _segment_key(epoch: str, name: bytes) -> bytes:
    return f"{epoch}/{name.hex()}".encode()


def _age(owner: str) -> tuple[int, float]:
    """Return epoch and sequence: a broker whose epoch is over deletes nothing of its successor's. Segments last as long as their epoch."""
    epoch, _, sequence = owner.partition("-")
    return int(epoch), int(sequence) if sequence else math.inf


def parted(snapshot_id: str, encoded: EncodedSnapshot, chunk_bytes: int = CHUNK_BYTES) -> dict[bytes, bytes]:
    """Return a snapshot as records, by key: the names of its segments and its own bytes in chunks, and last the head."""
    data = b"".join([*(segment.name for segment in encoded.segments), encoded.own])
    pieces = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    records = {f"{snapshot_id}/{number}".encode(): piece for number, piece in enumerate(pieces)}
    head = {"chunks": len(pieces), "crc": zlib.crc32(data), "segments": len(encoded.segments)}
    records[f"{snapshot_id}/head".encode()] = json.dumps(head).encode()
    return records


def joined(records: Mapping[bytes, bytes]) -> dict[str, bytes]:
    """Return every complete, undamaged snapshot by its id."""
    found: dict[str, bytes] = {}
    for key, value in records.items():
        snapshot_id, _, name = key.decode().rpartition("/")
        if name != "head":
            continue
        head = json.loads(value)
        pieces = [records.get(f"{snapshot_id}/{number}".encode()) for number in range(head["chunks"])]
        data = b"".join(piece for piece in pieces if piece is not None)
        if None in pieces or zlib.crc32(data) != head["crc"]:
            continue
        names_end = head.get("segments", 0) * DIGEST_SIZE
        names = [data[start : start + DIGEST_SIZE] for start in range(0, names_end, DIGEST_SIZE)]
        epoch = snapshot_id.partition("-")[0]
        segments = [records.get(_segment_key(epoch, name)) for name in names]
        if all(packed is not None and segment_name(packed) == name for name, packed in zip(names, segments, strict=True)):
            found[snapshot_id] = b"".join([data[names_end:], *(packed for packed in segments if packed is not None)])
    return found
