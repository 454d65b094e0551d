"""What a backup learns from the records of the journal while it copies them. There is no Kafka client here."""

from __future__ import annotations

from bascule.broker.snapshot import Snapshot
from bascule.journal.errors import ForeignRecord
from bascule.journal.fence import STRAY_RECORDS_MAX, Fence, JoiningFence
from bascule.journal.records import Kind, Op, decode_header, decode_ingress, decode_json, entries


class BackupScan:
    """Follows the fence, and the next offset of ``bascule.ingress`` that the broker has journaled."""

    def __init__(self, first: int, partition: int) -> None:
        """``first`` is the first offset of the journal. ``partition`` is that of the ingress topic."""
        self._partition = partition
        self._fence = JoiningFence(strays_end=first + STRAY_RECORDS_MAX) if first else Fence()
        self._ingress_topic_id: str | None = None
        self._ingress: int | None = None

    def take(self, offset: int, value: bytes | None) -> None:
        """Take the next record. Raises DamagedRecord, NewerRecord."""
        try:
            header = decode_header(value)
        except ForeignRecord:
            return
        if not self._fence.admits(offset, header) or header.kind is Kind.EPOCH:
            return
        for op, start, end in entries(value or b""):
            if op == Op.INGRESS:
                partition, next_offset = decode_ingress(value or b"", start)
                if partition == self._partition:
                    self._ingress = next_offset
            elif op == Op.INGRESS_TOPIC:
                content = decode_json(value or b"", start, end)
                self._ingress_topic_id = str(content["id"])
                self._ingress = dict(content["positions"]).get(self._partition, 0)

    def fence(self, snapshot: Snapshot | None) -> tuple[int, int]:
        """Return epoch and sequence at the end. ``snapshot`` is the newest: it answers for a journal without messages."""
        if snapshot is None:
            return self._fence.epoch, self._fence.sequence
        return max(self._fence.epoch, snapshot.epoch), max(self._fence.sequence, snapshot.sequence)

    def ingress(self, snapshot: Snapshot | None) -> tuple[str, int]:
        """Return the id of the ingress topic, "" if the broker has seen none, and the next offset to journal."""
        known = snapshot.ingress if snapshot is not None else {}
        topic_id = snapshot.ingress_topic_id if snapshot is not None else ""
        return (
            topic_id if self._ingress_topic_id is None else self._ingress_topic_id,
            known.get(self._partition, 0) if self._ingress is None else self._ingress,
        )
