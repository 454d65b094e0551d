"""The messages of a snapshot whose bodies a load still has to find in the store and the journal."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple


class WantedRest(NamedTuple):
    """The messages of one queue that are not found yet: ``mids`` from ``place`` on, the first of which is ``mid``."""

    mid: int
    queue_id: int
    place: int
    mids: Sequence[int]


class WantedMessages:
    """Mids by queue. The load meets the messages of the journal in the order of their mids, so one place in each queue is enough.

    A dict of a million mids would take 70 MB more than the packed numbers of the snapshot.
    """

    def __init__(self, stored: Sequence[int] = ()) -> None:
        """Begin without wanted messages. ``stored`` has the mids of messages in the store, ascending."""
        self.stored: dict[int, tuple[int, ...]] = {}  # ids of the queues of messages in the store, by mid
        self.missing: list[int] = []  # mids that the load has passed without finding them
        self._rests: list[WantedRest] = []  # a heap
        self._in_store = frozenset(stored)
        self._last_stored = stored[-1] if stored else -1

    def add(self, queue_id: int, mids: Sequence[int]) -> None:
        """Note that a queue holds the messages with these mids, which are ascending."""
        if mids and mids[0] <= self._last_stored:
            behind = bisect_right(mids, self._last_stored)
            _add(self.stored, [mid for mid in mids[:behind] if mid in self._in_store], queue_id)
            others = [mid for mid in mids[:behind] if mid not in self._in_store]
            mids = [*others, *mids[behind:]] if others else mids[behind:]
        if mids:
            heappush(self._rests, WantedRest(mids[0], queue_id, 0, mids))

    def take(self, first: int, end: int) -> dict[int, tuple[int, ...]]:
        """Return the wanted mids from ``first`` to before ``end`` with the ids of their queues. Lower mids are missing."""
        found: dict[int, tuple[int, ...]] = {}
        rests = self._rests
        while rests and rests[0].mid < end:
            _, queue_id, place, mids = rests[0]
            start, behind = bisect_left(mids, first, place), bisect_left(mids, end, place)
            self.missing.extend(mids[place:start])
            _add(found, mids[start:behind], queue_id)
            if behind < len(mids):
                heapreplace(rests, WantedRest(mids[behind], queue_id, behind, mids))
            else:
                heappop(rests)
        return found

    def left(self) -> list[int]:
        """Return the mids of all messages that were not found, ascending."""
        found = set(self.missing)
        for rest in self._rests:
            found.update(rest.mids[rest.place :])
        return sorted(found)


def _add(found: dict[int, tuple[int, ...]], mids: Sequence[int], queue_id: int) -> None:
    only = (queue_id,)
    if not found:
        found.update(dict.fromkeys(mids, only))
        return
    for mid in mids:
        others = found.get(mid)
        found[mid] = only if others is None else (*others, queue_id)
