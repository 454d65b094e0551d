"""Reservations: a queue states in the journal which messages it may deliver, before it delivers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bascule.broker.queue import RESERVE_SEQUENCES, BrokerQueue
from bascule.journal.records import INDEX_MAX, mid_of, reserve_entry

if TYPE_CHECKING:
    from bascule.broker.journaling import Journaling


class Reservations:
    """The reservations of all queues. A queue is put into ``dirty`` when its reservation is stored, because it can deliver then."""

    def __init__(self, journaling: Journaling, dirty: dict[BrokerQueue, None]) -> None:
        self._journaling = journaling
        self._dirty = dirty

    def reserve(self, queue: BrokerQueue, mid: int) -> None:
        """Reserve the messages of a queue up to ``mid``."""
        self._journaling.add(reserve_entry(queue.id, mid))
        queue.reserving_mid = mid
        self._journaling.then(self._reserved, queue, mid)

    def _reserved(self, queue: BrokerQueue, mid: int) -> None:
        queue.reserved(mid)
        self._dirty[queue] = None

    def reserve_ahead(self, queue: BrokerQueue) -> None:
        """Reserve messages that an empty queue does not have yet, unless enough are reserved."""
        sequence = self._journaling.sequence
        if 0 <= queue.reserving_mid < mid_of(sequence + RESERVE_SEQUENCES // 2, 0):
            self.reserve(queue, mid_of(sequence + RESERVE_SEQUENCES, INDEX_MAX))

    def end(self, queue: BrokerQueue) -> None:
        """End the reservation of a queue without consumers: messages that arrive from here on cannot have been delivered."""
        handed_out = mid_of(self._journaling.sequence, INDEX_MAX)
        if queue.reserving_mid > handed_out:
            self.reserve(queue, handed_out)
