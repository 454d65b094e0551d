"""The move of old messages to the store, if they keep too much of the journal (docs/adr/0004).

The journal is trimmed up to its oldest waiting message. Messages move oldest first, so that all messages in the store are older than those
in the journal: a load takes the store first, and each queue keeps its order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import Final

from bascule.broker.engine import Engine
from bascule.broker.errors import BodyUnavailable
from bascule.broker.message import BrokerMessage
from bascule.broker.queue import BrokerQueue
from bascule.broker.snapshot import Snapshot
from bascule.broker.turns import Work
from bascule.journal.records import INDEX_BITS, Kind, Send, SendFlag, encode_record, mid_of, send_entry

#: Messages move if the journal becomes shorter by more than this many times the size in the store, since each message is written a second
#: time.
FREED_MIN: Final = 2
#: Bytes of a message in the store besides its body: the header of its record, the fields and the address of its entry, its key.
STORED_OVERHEAD_BYTES: Final = 128
#: Maximum number of messages and of bytes that one round moves, since traffic continues meanwhile.
ROUND_MESSAGES_MAX = 20_000
ROUND_BYTES_MAX = 64 << 20
#: Bytes of records that are in memory at once; one more message may be added.
BATCH_BYTES = 4 << 20
#: Messages of one piece of the search, and the steps for each of them.
PIECE_MESSAGES: Final = 100
SEARCH_STEPS: Final = 7
#: Steps for the record of one message, and bytes of its body that are copied and checksummed in one more step.
RECORD_STEPS: Final = 12
BYTES_PER_STEP: Final = 2048
#: Steps to skip a message that is in the store.
SKIP_STEPS: Final = 1
#: A mid higher than all others, and an id that no queue has.
_END: Final = 1 << 80
_NOWHERE: Final = 0


class StoreMove:
    """The move of one round of housekeeping: ``choose`` the messages, then ``encode`` and store one batch after another."""

    def __init__(self, engine: Engine, taken: Snapshot, before_sequence: int) -> None:
        """Prepare a move. ``taken`` is the snapshot of the round.

        Messages of ``before_sequence`` and later stay, since most are consumed soon.
        """
        self._engine = engine
        self._taken = taken
        self._limit = mid_of(before_sequence, 0)
        self._walk = self._waiting()
        self._chosen: deque[tuple[int, BrokerQueue]] = deque()
        self.batch: dict[int, bytes] = {}  # records by mid, ascending

    @property
    def more(self) -> bool:
        """Return True if chosen messages are left to encode."""
        return bool(self._chosen)

    def skip_stored(self) -> None:
        """Skip to the oldest message that is not in the store. Call this before ``choose``, in another thread if the store may be large."""
        for mid, places in self._walk:
            if places:
                self._walk = chain([(mid, places)], self._walk)
                return

    def choose(self) -> Work:
        """Choose the oldest messages, as many as give the greatest gain. Yields steps."""
        found: list[tuple[int, BrokerQueue]] = []
        start = size_bytes = gain = chosen = 0
        for mid, places in chain(self._walk, [(_END, [_NOWHERE])]):
            if not places:
                yield SKIP_STEPS
                continue
            end = self._offset_of(mid)
            if not found:
                start = end
            elif (gained := self._gain(start, end, size_bytes)) > gain:
                gain, chosen = gained, len(found)
            held = self._held(mid, places) if mid < self._limit and len(found) < ROUND_MESSAGES_MAX else None
            if held is None:
                break
            message, queue = held
            size_bytes += message.size_bytes + STORED_OVERHEAD_BYTES
            if found and size_bytes > ROUND_BYTES_MAX:
                break
            found.append((mid, queue))
            if not len(found) % PIECE_MESSAGES:
                yield PIECE_MESSAGES * SEARCH_STEPS
        if not chosen and self._gain(start, self._taken.next_offset, self._held_bytes()) > 0:
            chosen = len(found)  # the journal is dense at these messages and not behind them: the next rounds continue there
        self._chosen.extend(found[:chosen])

    def _waiting(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the waiting mids, ascending, each with the ids of its queues, or with none if the message is in the store."""
        taken = self._taken
        lines = (zip(mids, repeat(queue["id"])) for queue, mids in zip(taken.queues, taken.mids, strict=True) if mids)
        remaining = iter(taken.stored)
        stored = next(remaining, _END)
        for mid, places in groupby(merge(*lines), key=itemgetter(0)):
            while stored < mid:
                stored = next(remaining, _END)
            yield mid, [] if mid == stored else [queue_id for _, queue_id in places]

    def _held(self, mid: int, places: Iterable[int]) -> tuple[BrokerMessage, BrokerQueue] | None:
        """Return a message and a queue that holds it; None if no queue does, because its removal is decided and not stored yet."""
        queues = self._engine.addresses.queues
        for queue_id in places:
            queue = queues.get(queue_id)
            message = queue.held.get(mid) if queue is not None else None
            if queue is not None and message is not None:
                return message, queue
        return None

    def _offset_of(self, mid: int) -> int:
        return self._taken.next_offset if mid == _END else self._taken.offsets.offset_of(mid >> INDEX_BITS)

    def _gain(self, start: int, end: int, size_bytes: int) -> int:
        """Return the gain in bytes if the journal loses the part between two offsets and the store grows by ``size_bytes``."""
        return self._taken.offsets.sizes.between(start, end) - FREED_MIN * size_bytes

    def _held_bytes(self) -> int:
        """Return the bytes that all messages of the broker would take in the store."""
        bodies = self._engine.bodies
        return bodies.memory_bytes + bodies.stored_bytes + self._engine.memory.messages * STORED_OVERHEAD_BYTES

    def encode(self) -> Work:
        """Encode the next batch of records. Yields steps.

        The move ends at a message that is gone meanwhile, or cannot be read: no younger message may be in the store while this one is not.
        """
        self.batch, size_bytes = {}, 0
        while self._chosen and size_bytes < BATCH_BYTES:
            mid, queue = self._chosen.popleft()
            message = queue.held.get(mid)
            try:
                record = None if message is None else stored_record(self._engine, message, queue)
            except BodyUnavailable:
                record = None
            if record is None:
                self._chosen.clear()
                return
            self.batch[mid] = record
            size_bytes += len(record)
            yield RECORD_STEPS + len(record) // BYTES_PER_STEP


def stored_record(engine: Engine, message: BrokerMessage, queue: BrokerQueue) -> bytes:
    """Return the record of a message for the store, in the format of the record that brought the message. Raises BodyUnavailable."""
    flags = SendFlag.DURABLE | (SendFlag.GROUPED if message.group is not None else 0)
    send = Send(
        flags, queue.routing, message.priority, 0, message.expiry_ms, queue.first_due_ms(message), queue.address, (queue.id,), (), (), None,
        engine.bodies.read(message),
    )  # fmt: skip
    return encode_record(Kind.DATA, engine.journaling.epoch, message.mid >> INDEX_BITS, send_entry(send))
