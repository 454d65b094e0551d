"""Reads a journal independently, for the checker of histories: which messages were sent, and where they were acknowledged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from bascule.core.destination import Routing
from bascule.journal.errors import ForeignRecord
from bascule.journal.records import Kind, Op, SendFlag, decode_ack, decode_count, decode_header, decode_json, decode_send, entries, mid_of
from tests.support.history import Audit
from tests.support.operations import Place


class JournalAudit:
    """An independent reader of a journal's records, in order from the first one on. ``id_of`` returns the id in a message's body.

    Records that do not belong to the newest epoch begun before them are ignored, and so are repeated sequences.
    """

    def __init__(self, id_of: Callable[[bytes], str]) -> None:
        self._id_of = id_of
        self._sent: dict[str, set[str]] = defaultdict(set)
        self._taken: dict[Place, set[str]] = defaultdict(set)
        self._places: dict[int, Place] = {}  # by queue id
        self._ids: dict[int, str] = {}  # by mid
        #: Failed deliveries as they were journaled, by queue id and mid: (epoch, count).
        self.counts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._epoch = self._sequence = -1

    def take(self, offset: int, value: bytes) -> None:
        """Apply the next record. Raises DamagedRecord."""
        try:
            header = decode_header(value)
        except ForeignRecord:
            return
        if header.kind is Kind.EPOCH:
            self._epoch = offset
            return
        if header.epoch != self._epoch or header.sequence <= self._sequence:
            return
        self._sequence = header.sequence
        index = 0
        for op, start, end in entries(value):
            if op == Op.SEND:
                self._send(value, start, end, mid_of(header.sequence, index))
                index += 1
            elif op == Op.ACK:
                queue, mids = decode_ack(value, start, end)
                self._taken[self._places.get(queue, Place(f"queue {queue}"))] |= {self._ids[mid] for mid in mids if mid in self._ids}
            elif op == Op.COUNT:
                queue, counts = decode_count(value, start, end)
                for mid, count in counts:
                    self.counts[queue, mid].append((header.epoch, count))
            elif op == Op.QUEUE_CREATED:
                said = decode_json(value, start, end)
                multicast = said["routing"] == Routing.MULTICAST
                address = said["address"]
                self._places[said["id"]] = Place(f"topic:{address}", said["name"]) if multicast else Place(address)

    def _send(self, value: bytes, start: int, end: int, mid: int) -> None:
        send = decode_send(value, start, end)
        id = self._ids[mid] = self._id_of(send.body)
        if not send.flags & SendFlag.PIPELINES_ONLY:
            self._sent[f"topic:{send.address}" if send.routing == Routing.MULTICAST else send.address].add(id)

    def result(self) -> Audit:
        """Return the result so far."""
        return Audit(self._sent, self._taken)
