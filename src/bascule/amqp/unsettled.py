"""Unsettled deliveries, found by ranges of ids. The cost depends on the number of matches, not on the width of the range."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from bascule.amqp.events import Delivery

if TYPE_CHECKING:
    from bascule.amqp.link import SenderLink

UINT_MAX: Final = 0xFFFFFFFF
#: Rebuild the id list when it has more settled ids than unsettled ones plus this number.
SETTLED_LISTED_MAX: Final = 1024
#: Deliveries of ended links that a session remembers, the newest.
LOST_MAX: Final = 1000

T = TypeVar("T")


class Unsettled(Generic[T]):
    """Values by delivery id. ``by_id`` may be read, and ids may be removed from it; ``add`` adds values.

    The sorted list ``ids`` has all ids of ``by_id`` and perhaps some that were removed. While it is not longer than SETTLED_LISTED_MAX, a
    caller may append a higher id itself: the path of each message.
    """

    __slots__ = ("by_id", "ids")

    def __init__(self) -> None:
        self.by_id: dict[int, T] = {}
        self.ids: list[int] = []  # sorted

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[T]:
        return iter(self.by_id.values())

    def add(self, delivery_id: int, value: T) -> None:
        """Add a delivery; ids usually increase."""
        by_id, ids = self.by_id, self.ids
        by_id[delivery_id] = value
        if not ids or delivery_id > ids[-1]:
            ids.append(delivery_id)
        else:
            place = bisect_left(ids, delivery_id)
            if ids[place] != delivery_id:
                ids.insert(place, delivery_id)
        if len(ids) > 2 * len(by_id) + SETTLED_LISTED_MAX:
            self.ids = sorted(by_id)

    def pop(self, delivery_id: int) -> T | None:
        """Remove and return a delivery."""
        return self.by_id.pop(delivery_id, None)

    def pop_range(self, first: int, last: int, most: int = UINT_MAX) -> list[tuple[int, T]]:
        """Remove at most ``most`` deliveries from ``first`` to ``last``, in this order. Ids wrap around after the highest."""
        if first == last:
            value = self.by_id.pop(first, None)
            return [] if value is None else [(first, value)]
        if first < last:
            return self._pop_between(first, last, most)
        found = self._pop_between(first, UINT_MAX, most)
        return found + self._pop_between(0, last, most - len(found))

    def _pop_between(self, low: int, high: int, most: int) -> list[tuple[int, T]]:
        by_id, ids = self.by_id, self.ids
        start, end = bisect_left(ids, low), bisect_right(ids, high)
        found: list[tuple[int, T]] = []
        place = start
        while place < end and len(found) < most:
            delivery_id = ids[place]
            place += 1
            if delivery_id in by_id:
                found.append((delivery_id, by_id.pop(delivery_id)))
        del ids[start:place]  # once: each deletion moves all later ids, and a hundred thousand ids may be removed from by_id already
        return found

    def clear(self) -> None:
        """Remove all deliveries."""
        self.by_id = {}
        self.ids = []


class SentDeliveries:
    """Sent deliveries that the peer has not settled. Those with an outcome, which is final, are kept apart."""

    __slots__ = ("_decided", "_lost", "_undecided")

    def __init__(self) -> None:
        self._lost: list[int] = []
        self._undecided: Unsettled[Delivery] = Unsettled()
        self._decided: Unsettled[Delivery] = Unsettled()

    def __len__(self) -> int:
        return len(self._undecided.by_id) + len(self._decided.by_id)

    def by_id(self) -> dict[int, Delivery]:
        """Return all deliveries by id."""
        return self._undecided.by_id | self._decided.by_id

    def add(self, delivery: Delivery) -> int:
        """Add a sent delivery. Return the number of deliveries that are not settled."""
        link, delivery_id, _ = delivery
        undecided = self._undecided
        ids = undecided.ids
        if ids and ids[-1] < delivery_id and len(ids) <= SETTLED_LISTED_MAX:
            ids.append(delivery_id)
            undecided.by_id[delivery_id] = delivery
        else:
            undecided.add(delivery_id, delivery)
        link.held.add(delivery_id)
        return len(undecided.by_id) + len(self._decided.by_id)

    def pop(self, delivery_id: int) -> Delivery | None:
        """Remove a delivery that this end settles."""
        delivery = self._decided.pop(delivery_id) or self._undecided.pop(delivery_id)
        if delivery is not None:
            delivery.link.held.discard(delivery_id)
        return delivery

    def settle(self, first: int, last: int, most: int = UINT_MAX) -> list[Delivery]:
        """Settle a range for the peer; return at most ``most`` deliveries. If it returns ``most``, more may be left."""
        if first == last and first in self._undecided.by_id:  # most clients settle each message
            delivery = self._undecided.by_id.pop(first)
            delivery.link.held.discard(first)
            return [delivery]
        found = self._undecided.pop_range(first, last, most)
        if self._decided.by_id and len(found) < most:
            found += self._decided.pop_range(first, last, most - len(found))
        deliveries = []
        for delivery_id, delivery in found:
            delivery.link.held.discard(delivery_id)
            deliveries.append(delivery)
        return deliveries

    def decide(self, first: int, last: int, most: int = UINT_MAX) -> list[Delivery]:
        """Return at most ``most`` deliveries of a range that had no outcome, and mark them. See ``settle`` for ``most``."""
        found = self._undecided.pop_range(first, last, most)
        for delivery_id, delivery in found:
            self._decided.add(delivery_id, delivery)
        return [delivery for _, delivery in found]

    def lost(self, first: int, last: int) -> bool:
        """Return True if a range includes a delivery that had no outcome when its link ended: an outcome for it came too late."""
        return any((delivery_id - first) & UINT_MAX <= (last - first) & UINT_MAX for delivery_id in self._lost)

    def _lose(self, delivery_ids: Iterable[int]) -> None:
        self._lost = [*self._lost, *delivery_ids][-LOST_MAX:]

    def pop_link(self, link: SenderLink) -> list[Delivery]:
        """Remove and return the deliveries of a link that has ended."""
        if len(link.held) == len(self):  # the session has no other link with deliveries
            link.held = set()
            self._lose(self._undecided.by_id)
            return self.clear()
        held, link.held = sorted(link.held), set()
        undecided, decided = self._undecided.by_id, self._decided.by_id
        self._lose(list(islice(filter(undecided.__contains__, reversed(held)), LOST_MAX))[::-1])
        popped = [undecided.pop(delivery_id, None) or decided.pop(delivery_id, None) for delivery_id in held]
        return [delivery for delivery in popped if delivery is not None]

    def clear(self) -> list[Delivery]:
        """Remove and return all deliveries after the end of all links."""
        deliveries = [*self._undecided, *self._decided]
        self._undecided.clear()
        self._decided.clear()
        return deliveries
