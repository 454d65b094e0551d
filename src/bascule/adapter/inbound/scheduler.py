"""Decides which delivery is next: deliveries in lanes, some of them not before a time. Without IO: no Kafka, no clock, no threads."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from bascule.adapter.inbound.spec import Order
from bascule.adapter.inbound.state import Ref


class Item(Protocol):
    """An item to schedule."""

    @property
    def ref(self) -> Ref:
        """Return the record, and the owner's token under which it is in flight."""

    @property
    def key(self) -> bytes | None:
        """Return the key of the record."""


ItemT = TypeVar("ItemT", bound=Item)


class Scheduler(Generic[ItemT]):
    """Schedules items in lanes: one item of each lane is in progress at a time, and the others wait behind it in their order of arrival."""

    def __init__(self, order: Order) -> None:
        self._lane_of = _LANES[order]
        self._ready: deque[ItemT] = deque()
        self._later: list[tuple[float, int, ItemT]] = []
        #: Lanes with an item that is ready, delayed or in progress, and the items that wait behind it.
        self._behind: dict[Hashable, deque[tuple[ItemT, float]]] = {}
        self._numbers = itertools.count()
        self._waiting: Counter[str] = Counter()
        self._behind_of: Counter[str] = Counter()
        self._running: dict[int, ItemT] = {}

    @property
    def waiting(self) -> int:
        """Return the number of items that are not in progress, including delayed ones."""
        return sum(self._waiting.values())

    @property
    def delayed(self) -> int:
        """Return the number of items that were not due at the last look."""
        return len(self._later)

    @property
    def ready(self) -> int:
        """Return the number of items that ``take`` may return, as of the last look."""
        return len(self._ready)

    def behind(self, token: str) -> int:
        """Return the number of items of an owner's token that wait for another item of their lane."""
        return self._behind_of[token]

    def running(self, token: str | None = None) -> list[ItemT]:
        """Return the items in progress, of one owner's token if it is given."""
        return [item for item in self._running.values() if token in (None, item.ref.token)]

    def add(self, item: ItemT, due_s: float = 0.0) -> None:
        """Add an item that is not due before ``due_s``, by the clock of ``take``."""
        self._waiting[item.ref.token] += 1
        if (lane := self._lane_of(item)) is not None:
            if (behind := self._behind.get(lane)) is not None:
                behind.append((item, due_s))
                self._behind_of[item.ref.token] += 1
                return
            self._behind[lane] = deque()
        self._offer(item, due_s)

    def take(self, now_s: float) -> ItemT | None:
        """Return the next item, which is then in progress, or None if there is none yet."""
        while self._later and self._later[0][0] <= now_s:
            self._ready.append(heapq.heappop(self._later)[2])
        if not self._ready:
            return None
        item = self._ready.popleft()
        self._waiting[item.ref.token] -= 1
        self._running[id(item)] = item
        return item

    def next_due_s(self) -> float | None:
        """Return the time when ``take`` may return an item that it does not return now, or None."""
        return self._later[0][0] if self._later else None

    def done(self, item: ItemT) -> None:
        """End the work on an item. Its lane continues."""
        del self._running[id(item)]
        self._advance(self._lane_of(item))

    def again(self, item: ItemT, due_s: float) -> None:
        """Schedule an item in progress again, before all others of its lane."""
        del self._running[id(item)]
        self._waiting[item.ref.token] += 1
        self._offer(item, due_s)

    def replace(self, item: ItemT, other: ItemT) -> None:
        """Replace ``item``, which is in progress and is given up, by ``other``, which is ready."""
        del self._running[id(item)]
        self._waiting[other.ref.token] += 1
        self._offer(other, 0.0)

    def drop(self, token: str) -> None:
        """Forget all items of an owner's token that are not in progress."""
        heads = [item for item in itertools.chain(self._ready, (each[2] for each in self._later)) if item.ref.token == token]
        self._ready = deque(item for item in self._ready if item.ref.token != token)
        self._later = [each for each in self._later if each[2].ref.token != token]
        heapq.heapify(self._later)
        for lane, behind in self._behind.items():
            self._behind[lane] = deque(each for each in behind if each[0].ref.token != token)
        for item in heads:
            self._advance(self._lane_of(item))
        del self._waiting[token], self._behind_of[token]

    def _offer(self, item: ItemT, due_s: float) -> None:
        if due_s > 0:
            heapq.heappush(self._later, (due_s, next(self._numbers), item))
        else:
            self._ready.append(item)

    def _advance(self, lane: Hashable | None) -> None:
        if lane is None:
            return
        if behind := self._behind[lane]:
            item, due_s = behind.popleft()
            self._behind_of[item.ref.token] -= 1
            self._offer(item, due_s)
        else:
            del self._behind[lane]


def _key_lane(item: Item) -> Hashable | None:
    return None if item.key is None else (item.ref.place.topic, item.key)


_LANES: dict[Order, Callable[[Item], Hashable | None]] = {
    Order.NONE: lambda _: None,
    Order.KEY: _key_lane,
    Order.PARTITION: lambda item: item.ref.place,
}
