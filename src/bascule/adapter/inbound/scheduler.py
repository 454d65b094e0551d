"""Who is next: deliveries in lanes, some of them not before a time. Without IO: no Kafka, no clock, no threads."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from bascule.adapter.inbound.spec import Order
from bascule.adapter.inbound.state import Ref


class Item(Protocol):
    """What is scheduled."""

    @property
    def ref(self) -> Ref:
        """The record, and the owner's token under which it is in flight."""

    @property
    def key(self) -> bytes | None:
        """Of the record."""


ItemT = TypeVar("ItemT", bound=Item)


class Scheduler(Generic[ItemT]):
    """Of the items of a lane one at a time is at work; the others wait behind it in the order in which they came."""

    def __init__(self, order: Order) -> None:
        self._lane_of = _LANES[order]
        self._ready: deque[ItemT] = deque()
        self._later: list[tuple[float, int, ItemT]] = []
        #: Lanes with an item that is ready, delayed or at work, and what waits behind it.
        self._behind: dict[Hashable, deque[tuple[ItemT, float]]] = {}
        self._numbers = itertools.count()
        self._waiting: Counter[str] = Counter()
        self._behind_of: Counter[str] = Counter()
        self._running: dict[int, ItemT] = {}

    @property
    def waiting(self) -> int:
        """Items that nobody works on, the delayed ones included."""
        return sum(self._waiting.values())

    @property
    def delayed(self) -> int:
        """Items that have a time before which they are not due, when that was last looked at."""
        return len(self._later)

    @property
    def ready(self) -> int:
        """Items that ``take`` may give, as far as that is known since the last time."""
        return len(self._ready)

    def behind(self, token: str) -> int:
        """Items of an owner's token that wait for another one of their lane."""
        return self._behind_of[token]

    def running(self, token: str | None = None) -> list[ItemT]:
        """Items at work; those of one owner's token, if it is given."""
        return [item for item in self._running.values() if token in (None, item.ref.token)]

    def add(self, item: ItemT, due_s: float = 0.0) -> None:
        """A new one; not before ``due_s``, by the clock of ``take``."""
        self._waiting[item.ref.token] += 1
        if (lane := self._lane_of(item)) is not None:
            if (behind := self._behind.get(lane)) is not None:
                behind.append((item, due_s))
                self._behind_of[item.ref.token] += 1
                return
            self._behind[lane] = deque()
        self._offer(item, due_s)

    def take(self, now_s: float) -> ItemT | None:
        """The next item, at work from now on; None where there is none yet."""
        while self._later and self._later[0][0] <= now_s:
            self._ready.append(heapq.heappop(self._later)[2])
        if not self._ready:
            return None
        item = self._ready.popleft()
        self._waiting[item.ref.token] -= 1
        self._running[id(item)] = item
        return item

    def next_due_s(self) -> float | None:
        """When ``take`` may give something that it does not give now."""
        return self._later[0][0] if self._later else None

    def done(self, item: ItemT) -> None:
        """It is at work no more; its lane goes on."""
        del self._running[id(item)]
        self._advance(self._lane_of(item))

    def again(self, item: ItemT, due_s: float) -> None:
        """It was at work, and will be again, before all others of its lane."""
        del self._running[id(item)]
        self._waiting[item.ref.token] += 1
        self._offer(item, due_s)

    def replace(self, item: ItemT, other: ItemT) -> None:
        """``item`` is at work and is given up; ``other`` stands in its place, ready."""
        del self._running[id(item)]
        self._waiting[other.ref.token] += 1
        self._offer(other, 0.0)

    def drop(self, token: str) -> None:
        """Forgets all items of an owner's token that are not at work."""
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
