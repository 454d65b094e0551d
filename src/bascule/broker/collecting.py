"""Collect the state for a snapshot in many turns, as of one confirmed sequence.

A walk copies the mids of the messages that each queue holds, in ascending order. Later records have higher mids, so the walk only has to
continue at the end of each queue. Each queue tells its copy which copied messages leave it meanwhile, and that it has changed after its
copy was complete. The last piece runs in one turn, between two records: it completes the copies of the few queues that have changed. The
copies then contain the state as of the confirmed sequence.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile
from typing import Final

from bascule.broker.ascending import has
from bascule.broker.duplicates import DuplicateWindow
from bascule.broker.engine import Engine
from bascule.broker.errors import BrokerFault
from bascule.broker.held import HeldCopy
from bascule.broker.queue import BrokerQueue
from bascule.broker.remembered_ids import RememberedIds
from bascule.broker.snapshot import PACKED_NUMBERS, Snapshot
from bascule.broker.turns import Work
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import INDEX_MAX, mid_of

#: Steps to look at a queue, or at a duplicate window.
LOOK_STEPS = 5
#: Queues or windows of one piece.
PIECE_LOOKS = 100
#: Steps to copy one run of messages of a queue, the number of mids that one more step copies, and the number of messages whose counts one
#: more step looks up. Packed mids are copied at once unless messages have left between them.
COPY_STEPS = 8
MIDS_PER_STEP: Final = 16
MESSAGES_PER_STEP: Final = 4
#: The walk ends after a round that copied the new messages in at most this many steps. The last piece, which is one turn, takes about as
#: long.
LAST_STEPS = 3_000
#: The walk completes copies until at most this many queues have changed since, because the last piece looks at each of them.
LAST_QUEUES: Final = 1_000
#: The same for the duplicate windows that have changed. One of them has up to 24 KiB to copy.
LAST_WINDOWS: Final = 200
WINDOW_BYTES_PER_STEP: Final = 1_024
#: The walk also ends after this many rounds. Each round after the first copies only the messages that arrived during the round before.
ROUNDS_MAX: Final = 5


class CollectedQueue:
    """The collected part of one queue."""

    __slots__ = ("copy", "described", "leaving", "reserved_mid", "unconfirmed", "unused_since_ms")

    def __init__(self, queue: BrokerQueue, on_change: Callable[[], object]) -> None:
        self.described = queue.describe()
        self.copy = queue.held.copy = HeldCopy(on_change)
        self.reserved_mid, self.unused_since_ms = -1, 0
        self.leaving: list[int] = []  # mids of messages that are acknowledged and may still be held: see LeavingMessages
        self.unconfirmed: list[int] = []  # mids of messages whose acknowledgements are behind the sequence of the snapshot

    def take(self, queue: BrokerQueue, limit: int) -> Work:
        """Copy the messages that are not copied yet, up to the mid ``limit``."""
        copy = self.copy
        while copy.passed_mid < limit and copy.passed_mid < queue.held.newest:
            before_mid, mids = copy.passed_mid, queue.held.mids_between(copy.passed_mid, limit)
            if not mids:
                copy.passed_mid = limit
                return
            copy.passed_mid = mids[-1]
            copy.mids += mids
            steps = COPY_STEPS + len(mids) // MIDS_PER_STEP
            if queue.counts:
                steps += self._copy_counts(queue, before_mid) // MESSAGES_PER_STEP
            yield steps

    def _copy_counts(self, queue: BrokerQueue, before_mid: int) -> int:
        """Copy the counts of the messages behind ``before_mid`` whose mids are copied. Return the number of messages."""
        copy, messages = self.copy, queue.held.after(before_mid)
        for message in messages:
            if message.mid > copy.passed_mid:
                break
            # A count of 0 is left out: only this broker knows that a reserved message has not been delivered yet.
            if count := queue.counts.get(message.position):
                copy.counts[message.mid] = count
        return len(messages)

    def finish(self, queue: BrokerQueue) -> None:
        """Copy all remaining messages.

        Raises BrokerFault if the copy lacks a message, since a broker that loads the snapshot would lose the message.
        """
        held, copy = queue.held, self.copy
        for _ in self.take(queue, held.newest):
            pass
        copied, there = len(copy.mids) - len(copy.removed), len(held)
        if copied != there:
            raise BrokerFault(f"a snapshot would contain {copied} messages of queue {queue.name!r}, which holds {there}")
        self.reserved_mid, self.unused_since_ms = queue.reserved_mid, queue.unused_since_ms

    def state(self) -> tuple[array[int], list[tuple[int, int]]]:
        """Return the mids of the messages, ascending, and the delivery counts by mid."""
        mids, removed = self.copy.mids, {*self.copy.removed, *self.leaving}
        if removed:
            kept = array("Q")
            for start in range(0, len(mids), PACKED_NUMBERS):  # in parts: one call would keep the interpreter lock for all
                kept.extend([mid for mid in mids[start : start + PACKED_NUMBERS] if mid not in removed])
            mids = kept
        counts = sorted((mid, count) for mid, count in self.copy.counts.items() if count and has(mids, mid))
        if self.unconfirmed:
            first = bisect_left(mids, min(self.unconfirmed))
            mids[first:] = array("Q", sorted(chain(mids[first:], self.unconfirmed)))
        return mids, counts


@dataclass(slots=True)
class CollectedState:
    """The state as of one sequence. ``snapshot`` makes a snapshot from it and may be called in another thread."""

    base: Snapshot
    queues: list[CollectedQueue]
    windows: dict[str, RememberedIds]
    unsettled: list[str]  # addresses of windows that may have ids of ``unconfirmed``
    unconfirmed: Set[bytes]  # ids of sends behind the sequence
    branches: Callable[[], bytes]

    def snapshot(self) -> Snapshot:
        """Return the snapshot. May be called only once."""
        base = self.base
        for queue in self.queues:
            mids, counts = queue.state()
            base.queues.append({**queue.described, "reserved": queue.reserved_mid, "unused_since_ms": queue.unused_since_ms})
            base.mids.append(mids)
            base.counts.append(counts)
        base.windows = self.windows
        for address in self.unsettled:
            base.windows[address] = base.windows[address].without(self.unconfirmed)
        base.branches = self.branches()
        return base


class Collector:
    """Collector of the state of one engine. Call ``walk`` in turns, then ``finish`` between two records; call ``stop`` to abandon it.

    Only one collector of an engine may work at a time.
    """

    def __init__(self, engine: Engine, offsets: OffsetMap) -> None:
        self._engine = engine
        self._offsets = offsets
        self._queues: dict[BrokerQueue, CollectedQueue] = {}  # in the order of their ids
        self._changed: dict[BrokerQueue, None] = {}  # queues whose copies are not complete
        self._first_new_id = -1  # id of the first queue that the walk has not seen
        self._windows: dict[DuplicateWindow, tuple[int, RememberedIds]] = {}  # with the number of ids that had been added
        self.stopped = False

    def walk(self) -> Work:
        """Copy nearly all of the state. Yields the steps of each piece."""
        for steps in chain(self._walk_queues(), self._walk_windows(ROUNDS_MAX), self._complete_both()):
            yield steps
            if self.stopped:
                return

    def _walk_queues(self) -> Work:
        engine = self._engine
        for number in range(ROUNDS_MAX):
            copied = 0
            self._first_new_id = engine.next_queue_id
            for looked, queue in enumerate(list(engine.addresses.queues.values())):
                if not looked % PIECE_LOOKS:
                    yield PIECE_LOOKS * LOOK_STEPS
                if queue.durable:
                    for steps in self._collected(queue).take(queue, self._limit):
                        copied += steps
                        yield steps
            if number and copied <= LAST_STEPS:
                return

    @property
    def _limit(self) -> int:
        """Return the highest mid that may be copied.

        Part of the next record may not be carried out yet: a message with a lower mid than the newest one may still be put in.
        """
        return mid_of(self._engine.journaling.confirmed_sequence, INDEX_MAX)

    def _complete_queues(self) -> Work:
        """Complete the copy of each queue, again if the queue has changed meanwhile, until few queues are left for the last piece."""
        for _ in range(ROUNDS_MAX):
            for looked, queue in enumerate(list(self._changed)):
                if not looked % PIECE_LOOKS:
                    yield PIECE_LOOKS * LOOK_STEPS
                if queue.deleted or queue.held.newest <= self._limit:
                    self._complete(queue)
            if len(self._changed) <= LAST_QUEUES:
                return

    def _complete(self, queue: BrokerQueue) -> None:
        if not queue.deleted:
            self._queues[queue].finish(queue)
        self._changed.pop(queue, None)

    def _complete_both(self) -> Work:
        """Complete the copies of windows and queues in turns: while one kind is completed, entries of the other kind change."""
        for _ in range(ROUNDS_MAX):
            yield from self._walk_windows(1)
            yield from self._complete_queues()
            if self._changed_windows() <= LAST_WINDOWS:
                return

    def _changed_windows(self) -> int:
        known = self._windows
        return sum([window not in known or known[window][0] != window.added for window in self._engine.windows.by_address.values()])

    def _walk_windows(self, rounds: int) -> Work:
        """Copy the windows, again if they have changed meanwhile, until few are left for the last piece or the rounds are over."""
        for _ in range(rounds):
            copied = steps = 0
            for window in list(self._engine.windows.by_address.values()):
                if steps >= PIECE_LOOKS * LOOK_STEPS:
                    yield steps
                    steps = 0
                known = self._windows.get(window)
                if known is None or known[0] != window.added:
                    copied += 1
                    steps += LOOK_STEPS + len(self._remembered(window).last) // WINDOW_BYTES_PER_STEP
                steps += 1
            yield steps
            if copied <= LAST_WINDOWS:
                return

    def _collected(self, queue: BrokerQueue) -> CollectedQueue:
        collected = self._queues.get(queue)
        if collected is None:
            collected = self._queues[queue] = CollectedQueue(queue, partial(self._changed.setdefault, queue))
            self._changed[queue] = None
        return collected

    def _collect_new(self) -> None:
        """Begin the copies of the queues that were created since the walk looked for queues. Newer queues have higher ids."""
        queues = self._engine.addresses.queues.values()
        for queue in [*takewhile(lambda each: each.id >= self._first_new_id, reversed(queues))][::-1]:
            if queue.durable:
                self._collected(queue)

    def _remembered(self, window: DuplicateWindow) -> RememberedIds:
        """Return a copy of the ids of a window. The window may have forgotten expired ids since the copy was made."""
        added, remembered = self._windows.get(window, (-1, None))
        if remembered is None or added != window.added:
            remembered = window.remembered()
            self._windows[window] = window.added, remembered
        return remembered

    def finish(self) -> CollectedState:
        """Copy the rest, in one turn between two records (see ``Journaling.between_records``).

        Raises BrokerFault if a copy lacks a message.
        """
        try:
            return self._finish()
        finally:
            self.stop()

    def _finish(self) -> CollectedState:
        engine, journaling = self._engine, self._engine.journaling
        sequence = journaling.confirmed_sequence
        self._collect_new()
        for queue in list(self._changed):
            self._complete(queue)
        queues = {queue: collected for queue, collected in self._queues.items() if queue.confirmed and not queue.deleted}
        for queue, mids in engine.deliveries.leaving.mids():
            if queue in queues:
                queues[queue].leaving += mids
        for queue, mids in journaling.unconfirmed_acks():
            if queue in queues:
                queues[queue].unconfirmed += mids
        windows, unsettled = {}, []
        for address, window in engine.windows.by_address.items():
            if window.digests:
                windows[address] = self._remembered(window)
                if window.sequence > sequence:
                    unsettled.append(address)
        next_offset = self._offsets.offset_of(sequence) + 1 if sequence else 0
        base = Snapshot(
            journaling.epoch, sequence, next_offset, engine.next_queue_id, self._offsets.copy(), [],
            dict(engine.confirmed_ingress), ingress_topic_id=engine.ingress_topic_id, plain_until_ms=engine.windows.plain_until_ms,
        )  # fmt: skip
        return CollectedState(
            base,
            list(queues.values()),
            windows,
            unsettled,
            set(journaling.unconfirmed_digests()),
            engine.branches.entries(engine.clock()),
        )

    def stop(self) -> None:
        """End the walk, if it is still running, and detach the copies from the queues."""
        self.stopped = True
        for queue, collected in self._queues.items():
            if queue.held.copy is collected.copy:
                queue.held.copy = None
