"""Collects the state of a snapshot in many turns, as it is at one confirmed sequence.

A walk copies the mids of the messages that each queue holds, in ascending order. Later records have higher mids, so the walk only has to go
on at the end of each queue. A queue tells its copy which of the messages that are copied already it loses meanwhile. The last piece is done
in one turn, between two records: it copies the few messages that are left, and with them the copies have the state at the confirmed
sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Set
from dataclasses import dataclass
from itertools import chain
from typing import Final

from bascule.broker.ascending import has
from bascule.broker.duplicates import DuplicateWindow, RememberedIds
from bascule.broker.engine import Engine
from bascule.broker.errors import BrokerFault
from bascule.broker.held import HeldCopy
from bascule.broker.queue import BrokerQueue
from bascule.broker.snapshot import Snapshot
from bascule.broker.turns import Work
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import INDEX_MAX, mid_of

#: Steps to look at a queue, or at a duplicate window.
LOOK_STEPS: Final = 5
#: Queues or windows of one piece.
PIECE_LOOKS: Final = 100
#: Steps to copy messages of a queue that lie together, and messages that one more step copies.
COPY_STEPS: Final = 8
MESSAGES_PER_STEP: Final = 4
#: The walk is over when it copies in no more steps than this what has come since: so long takes the last piece, in one turn.
LAST_STEPS: Final = 3_000
#: The walk is over after so many rounds, too. The second one finds only what came during the first one, and so on.
ROUNDS_MAX: Final = 5


class CollectedQueue:
    """The part of one queue."""

    __slots__ = ("copy", "described", "leaving", "reserved_mid", "unconfirmed", "unused_since_ms")

    def __init__(self, queue: BrokerQueue) -> None:
        self.described = queue.describe()
        self.copy = queue.held.copy = HeldCopy()
        self.reserved_mid, self.unused_since_ms = -1, 0
        self.leaving: list[int] = []  # mids of messages that are acknowledged and still held: see LeavingMessages
        self.unconfirmed: list[int] = []  # mids of messages whose acknowledgements are behind the sequence of the snapshot

    def take(self, queue: BrokerQueue, limit: int) -> Work:
        """Copy the messages up to a mid that are not copied yet."""
        copy = self.copy
        while copy.passed_mid < limit and copy.passed_mid < queue.held.newest:
            messages = queue.held.after(copy.passed_mid)
            while messages and messages[-1].mid > limit:
                messages.pop()
            if not messages:
                copy.passed_mid = limit
                return
            copy.passed_mid = messages[-1].mid
            copy.mids += [message.mid for message in messages]
            if queue.counts:
                for message in messages:
                    # Not a 0: only this broker knows that a reserved message has not been delivered yet.
                    if count := queue.counts.get(message.position):
                        copy.counts[message.mid] = count
            yield COPY_STEPS + len(messages) // MESSAGES_PER_STEP

    def finish(self, queue: BrokerQueue) -> None:
        """Copy all that is left. Raises BrokerFault if the copy lacks a message: a broker that starts from it would lose the message."""
        held, copy = queue.held, self.copy
        for _ in self.take(queue, held.newest):
            pass
        copied, there = len(copy.mids) - len(copy.removed), len(held)
        if copied != there:
            raise BrokerFault(f"a snapshot would contain {copied} messages of queue {queue.name!r}, which holds {there}")
        self.reserved_mid, self.unused_since_ms = queue.reserved_mid, queue.unused_since_ms

    def state(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the mids of the messages, ascending, and their delivery counts."""
        mids, removed = self.copy.mids, {*self.copy.removed, *self.leaving}
        if removed:
            mids = [mid for mid in mids if mid not in removed]
        counts = sorted((mid, count) for mid, count in self.copy.counts.items() if count and has(mids, mid))
        if self.unconfirmed:
            first = bisect_left(mids, min(self.unconfirmed))
            mids[first:] = sorted(chain(mids[first:], self.unconfirmed))
        return mids, counts


@dataclass(slots=True)
class CollectedState:
    """The state at one sequence. ``snapshot`` makes a snapshot of it, and may be called in another thread."""

    base: Snapshot
    queues: list[CollectedQueue]
    windows: dict[str, RememberedIds]
    unsettled: list[str]  # addresses of windows that may have ids of ``unconfirmed``
    unconfirmed: Set[bytes]  # ids of sends behind the sequence
    branches: Callable[[], bytes]

    def snapshot(self) -> Snapshot:
        """Return the snapshot. Call it once."""
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
    """Collects the state of one engine: ``walk`` in turns, then ``finish`` between two records. ``stop`` when it is not wanted any more.

    No two collectors of an engine work at the same time.
    """

    def __init__(self, engine: Engine, offsets: OffsetMap) -> None:
        self._engine = engine
        self._offsets = offsets
        self._queues: dict[BrokerQueue, CollectedQueue] = {}
        self._windows: dict[DuplicateWindow, tuple[int, RememberedIds]] = {}  # with the number of ids that had been added
        self.stopped = False

    def walk(self) -> Work:
        """Copy nearly all of the state."""
        for steps in chain(self._walk_queues(), self._walk_windows()):
            yield steps
            if self.stopped:
                return

    def _walk_queues(self) -> Work:
        engine = self._engine
        for number in range(ROUNDS_MAX):
            copied = 0
            for looked, queue in enumerate(list(engine.addresses.queues.values())):
                if not looked % PIECE_LOOKS:
                    yield PIECE_LOOKS * LOOK_STEPS
                if not queue.durable:
                    continue
                # Of a record that is half carried out, a message may still come with a lower mid than one that is here.
                limit = mid_of(engine.journaling.confirmed_sequence, INDEX_MAX)
                for steps in self._collected(queue).take(queue, limit):
                    copied += steps
                    yield steps
            if number and copied <= LAST_STEPS:
                return

    def _walk_windows(self) -> Work:
        for looked, window in enumerate(list(self._engine.windows.by_address.values())):
            if not looked % PIECE_LOOKS:
                yield PIECE_LOOKS * LOOK_STEPS
            self._remembered(window)

    def _collected(self, queue: BrokerQueue) -> CollectedQueue:
        collected = self._queues.get(queue)
        if collected is None:
            collected = self._queues[queue] = CollectedQueue(queue)
        return collected

    def _remembered(self, window: DuplicateWindow) -> RememberedIds:
        """The ids of a window. It may have forgotten some of them since, whose time is over."""
        added, remembered = self._windows.get(window, (-1, None))
        if remembered is None or added != window.added:
            remembered = window.remembered()
            self._windows[window] = window.added, remembered
        return remembered

    def finish(self) -> CollectedState:
        """Copy what is left, in one turn and between two records: see ``Journaling.between_records``. Raises BrokerFault."""
        try:
            return self._finish()
        finally:
            self.stop()

    def _finish(self) -> CollectedState:
        engine, journaling = self._engine, self._engine.journaling
        sequence = journaling.confirmed_sequence
        queues: dict[BrokerQueue, CollectedQueue] = {}
        for queue in engine.addresses.queues.values():
            if queue.durable and queue.confirmed:
                queues[queue] = collected = self._collected(queue)
                collected.finish(queue)
        for queue, mid in engine.deliveries.leaving.mids():
            if queue in queues:
                queues[queue].leaving.append(mid)
        for queue, mids in journaling.unconfirmed_acks():
            if queue in queues:
                queues[queue].unconfirmed += mids
        windows = {address: window for address, window in engine.windows.by_address.items() if window.digests}
        next_offset = self._offsets.offset_of(sequence) + 1 if sequence else 0
        base = Snapshot(
            journaling.epoch, sequence, next_offset, engine.next_queue_id, self._offsets.copy(), [],
            dict(engine.confirmed_ingress), ingress_topic_id=engine.ingress_topic_id,
        )  # fmt: skip
        return CollectedState(
            base,
            list(queues.values()),
            {address: self._remembered(window) for address, window in windows.items()},
            [address for address, window in windows.items() if window.sequence > sequence],
            set(journaling.unconfirmed_digests()),
            engine.branches.entries(engine.clock()),
        )

    def stop(self) -> None:
        """End the walk, if it goes on. Queues tell nothing more."""
        self.stopped = True
        for queue, collected in self._queues.items():
            if queue.held.copy is collected.copy:
                queue.held.copy = None
