"""Snapshots in their compacted topic: chunks under a snapshot's id; old ones are deleted by key."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaException, Producer

from bascule.core.errors import Unavailable
from bascule.kafka.log import ANSWER_TIMEOUT_S, APPEND_SETTINGS, PartitionReader

CHUNK_BYTES = 900_000
#: Beside the snapshots: the id of the journal's topic.
JOURNAL_KEY = b"journal"


class SnapshotStore:
    """Reads and writes whole snapshots, as bytes. Blocking: to be used off the event loop."""

    def __init__(self, kafka: Mapping[str, Any], topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._chunks: dict[str, int] = {}  # of each snapshot read or written
        self._journal_id = ""

    def read(self) -> dict[str, bytes]:
        """Every complete, undamaged snapshot by its id. Raises Unavailable."""
        reader = PartitionReader(self._kafka, self._topic, 0)
        chunks: dict[bytes, bytes] = {}
        try:
            low, high = reader.range()
            reader.seek(low)
            while low < high and not reader.at_end:
                for message in reader.read(100):
                    key, value = message.key(), message.value()
                    if key is not None and value is not None:
                        chunks[bytes(key)] = bytes(value)
                    elif key is not None:
                        chunks.pop(bytes(key), None)
        finally:
            reader.close()
        self._journal_id = chunks.pop(JOURNAL_KEY, b"").decode()
        found = _joined(chunks)
        self._chunks = {snapshot_id: -(-len(data) // CHUNK_BYTES) for snapshot_id, data in found.items()}
        return found

    def journal_id(self, now: str) -> str:
        """The id that the journal's topic had when it was first seen, as ``read`` found it; else ``now``, kept. Raises Unavailable."""
        if not self._journal_id:
            self._send({JOURNAL_KEY.decode(): now.encode()})
            self._journal_id = now
        return self._journal_id

    def write(self, snapshot_id: str, data: bytes) -> None:
        """Store a snapshot; when this returns, Kafka has it. Raises Unavailable."""
        pieces = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        head = json.dumps({"chunks": len(pieces), "crc": zlib.crc32(data)}).encode()
        self._chunks[snapshot_id] = len(pieces)
        self._send({f"{snapshot_id}/head": head, **{f"{snapshot_id}/{number}": piece for number, piece in enumerate(pieces)}})

    def delete(self, snapshot_id: str) -> None:
        """Forget a snapshot that a newer one replaces. Raises Unavailable."""
        self._send({f"{snapshot_id}/{name}": None for name in ("head", *range(self._chunks.pop(snapshot_id, 0)))})

    def _send(self, records: Mapping[str, bytes | None]) -> None:
        failures: list[str] = []
        producer = Producer({**self._kafka, **APPEND_SETTINGS, "message.timeout.ms": int(ANSWER_TIMEOUT_S * 1000)})
        try:
            for key, value in records.items():
                producer.produce(
                    self._topic, key=key.encode(), value=value, on_delivery=lambda error, _: failures.append(str(error)) if error else None
                )
            left = producer.flush(ANSWER_TIMEOUT_S)
        except (BufferError, KafkaException) as error:
            raise Unavailable(f"snapshot not stored: {error}") from error
        if left or failures:
            raise Unavailable(f"snapshot not stored: {failures or 'no answer'}")


def _joined(chunks: dict[bytes, bytes]) -> dict[str, bytes]:
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
