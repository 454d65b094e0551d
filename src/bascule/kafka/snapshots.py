"""Snapshots in their compacted topic: chunks under a snapshot's id; old ones are deleted by key."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaException

from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.kafka import clients
from bascule.kafka.compacted import stored_barrier
from bascule.kafka.log import ANSWER_TIMEOUT_S, APPEND_SETTINGS, PartitionReader

log = get_log(__name__)

CHUNK_BYTES = 900_000
#: Beside the snapshots: the id of the journal's topic.
JOURNAL_KEY = b"journal"
#: Epoch and sequence of a snapshot, and which chunk of it.
_CHUNK_KEY = re.compile(rb"\d+-\d+/(\d+|head)")
#: Of barrier records: readers, also those of earlier releases, find the deletion of a snapshot that never was.
BARRIER_KEY = b"0-0/head"


class SnapshotStore:
    """Reads and writes whole snapshots, as bytes. Blocking: to be used off the event loop."""

    def __init__(self, kafka: Mapping[str, Any], topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._keys: dict[str, list[bytes]] | None = None  # of each snapshot, whole or not; None before the first read
        self._journal_id = ""

    def read(self, *, behind_barrier: bool = False) -> dict[str, bytes]:
        """Every complete, undamaged snapshot by its id. Raises Unavailable.

        No decision may rest on a read without a barrier, for a former leader may answer.
        """
        chunks = self._chunks(stored_barrier(self._kafka, self._topic, BARRIER_KEY) if behind_barrier else -1)
        self._keys = by_snapshot(chunks)
        return joined(chunks)

    def _chunks(self, barrier: int = -1) -> dict[bytes, bytes]:
        """The records of all snapshots, whole or not, by key; and the journal's id, which is kept."""
        reader = PartitionReader(self._kafka, self._topic, 0)
        chunks: dict[bytes, bytes] = {}
        try:
            reader.seek(reader.range()[0])
            for message in reader.to_end(barrier):
                key, value = bytes(message.key() or b""), message.value()
                if key != JOURNAL_KEY and not _CHUNK_KEY.fullmatch(key):
                    log.error("foreign record passed over", topic=self._topic, offset=message.offset())
                elif value is None:
                    chunks.pop(key, None)
                else:
                    chunks[key] = bytes(value)
        finally:
            reader.close()
        self._journal_id = chunks.pop(JOURNAL_KEY, b"").decode()
        return chunks

    def journal_id(self, now: str) -> str:
        """The id that the journal's topic had when it was first seen, as ``read`` found it; else ``now``, kept. Raises Unavailable."""
        if not self._journal_id:
            self._chunks(stored_barrier(self._kafka, self._topic, BARRIER_KEY))
        if not self._journal_id:
            self._send({JOURNAL_KEY: now.encode()})
            self._journal_id = now
        return self._journal_id

    def write(self, snapshot_id: str, data: bytes) -> None:
        """Store a snapshot; when this returns, Kafka has it. Raises Unavailable."""
        records = parted(snapshot_id, data)
        if self._keys is not None:
            self._keys[snapshot_id] = list(records)
        self._send(records)

    def delete_older(self, snapshot_id: str) -> None:
        """Forget all that this one replaces, whoever wrote them, and what somebody left half-written. Raises Unavailable."""
        keys = self._keys
        if keys is None:
            keys = self._keys = by_snapshot(self._chunks())
        older = older_than(snapshot_id, keys)
        self._send({key: None for each in older for key in keys[each]})
        for each in older:
            del keys[each]

    def _send(self, records: Mapping[bytes, bytes | None]) -> None:
        failures: list[str] = []
        # A record stored twice harms nothing here, and an idempotent client takes half a second for its first: a hand-over waits for it.
        settings = {**APPEND_SETTINGS, "enable.idempotence": False, "message.timeout.ms": int(ANSWER_TIMEOUT_S * 1000)}
        producer = clients.producer({**self._kafka, **settings})
        try:
            for key, value in records.items():
                producer.produce(
                    self._topic, key=key, value=value, on_delivery=lambda error, _: failures.append(str(error)) if error else None
                )
            left = producer.flush(ANSWER_TIMEOUT_S)
        except (BufferError, KafkaException) as error:
            raise Unavailable(f"snapshot not stored: {error}") from error
        if left or failures:
            raise Unavailable(f"snapshot not stored: {failures or 'no answer'}")


def parted(snapshot_id: str, data: bytes, chunk_bytes: int = CHUNK_BYTES) -> dict[bytes, bytes]:
    """A snapshot as records, by key. The head comes last."""
    pieces = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    records = {f"{snapshot_id}/{number}".encode(): piece for number, piece in enumerate(pieces)}
    records[f"{snapshot_id}/head".encode()] = json.dumps({"chunks": len(pieces), "crc": zlib.crc32(data)}).encode()
    return records


def by_snapshot(keys: Iterable[bytes]) -> dict[str, list[bytes]]:
    """The keys of records, by the id of the snapshot that they belong to."""
    found: dict[str, list[bytes]] = {}
    for key in keys:
        found.setdefault(key.decode().rpartition("/")[0], []).append(key)
    return found


def older_than(snapshot_id: str, ids: Iterable[str]) -> list[str]:
    """By epoch and sequence: a broker whose epoch is over deletes nothing of its successor's."""
    return [each for each in ids if _age(each) < _age(snapshot_id)]


def _age(snapshot_id: str) -> list[int]:
    return [int(number) for number in snapshot_id.split("-")]


def joined(chunks: Mapping[bytes, bytes]) -> dict[str, bytes]:
    """Every complete, undamaged snapshot by its id."""
    found: dict[str, bytes] = {}
    for key, value in chunks.items():
        snapshot_id, _, name = key.decode().rpartition("/")
        if name != "head":
            continue
        head = json.loads(value)
        pieces = [chunks.get(f"{snapshot_id}/{number}".encode()) for number in range(head["chunks"])]
        data = b"".join(piece for piece in pieces if piece is not None)
        if None not in pieces and zlib.crc32(data) == head["crc"]:
            found[snapshot_id] = data
    return found
