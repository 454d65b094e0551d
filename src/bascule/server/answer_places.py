"""Places for answers that are made while a peer reads them: slow readers do not keep the places from the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from bascule.core.errors import Unavailable

#: A reader that needs more time than this, in seconds, can lose its place to another reader with fewer places.
SLOW_AFTER_S: Final = 3.0


class AnswerPlace:
    """A place of one answer. ``reader`` is who reads it: the name of a user, or the address of a peer without a login."""

    __slots__ = ("_places", "_reading", "began_s", "reader", "taken")

    def __init__(self, places: AnswerPlaces, reader: str) -> None:
        self._places = places
        self._reading: asyncio.Timeout | None = None
        self.reader = reader
        #: When the peer began to read, on the clock of the loop; None before, while the broker makes the answer.
        self.began_s: float | None = None
        #: Whether another reader gets the place.
        self.taken = False

    @asynccontextmanager
    async def reading(self, timeout_s: float) -> AsyncIterator[None]:
        """Send the answer in this context, and give the place back. Raises TimeoutError after ``timeout_s``, or when the place is taken."""
        try:
            async with asyncio.timeout(timeout_s) as self._reading:
                self.began_s = asyncio.get_running_loop().time()
                self._places.changed()
                try:
                    yield
                finally:
                    self._reading = None
        finally:
            self.give_back()

    def take(self) -> None:
        """End the answer, whose place another reader gets."""
        self.taken = True
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(0.0)

    def give_back(self) -> None:
        """Let another reader have the place."""
        self._places.give_back(self)


class AnswerPlaces:
    """A number of places. Of those who wait, the one with the fewest places is served first.

    Use it on the event loop.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[AnswerPlace] = []  # the oldest first
        self._waiting: list[tuple[AnswerPlace, asyncio.Future[None]]] = []  # in the order of arrival
        self._look: asyncio.TimerHandle | None = None

    async def place(self, reader: str, wait_s: float) -> AnswerPlace:
        """Return a place. Raises Unavailable after ``wait_s``."""
        place, free = AnswerPlace(self, reader), asyncio.get_running_loop().create_future()
        entry = place, free
        self._waiting.append(entry)
        try:
            self.changed()
            async with asyncio.timeout(wait_s):
                await free
        except BaseException as error:
            if place in self._held:
                place.give_back()
            elif entry in self._waiting:
                self._waiting.remove(entry)
            if isinstance(error, TimeoutError):
                raise Unavailable(f"{self._count} clients are reading long answers, the maximum; send the request again later") from None
            raise
        return place

    def give_back(self, place: AnswerPlace) -> None:
        """Let another reader have a place."""
        self._held.remove(place)
        self.changed()

    def changed(self) -> None:
        """Serve those who wait, and take places from slow readers that have more."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        while self._waiting and len(self._held) < self._count:
            place, free = entry = min(self._waiting, key=lambda each: self._places_of(each[0].reader))
            self._waiting.remove(entry)
            if not free.done():  # otherwise the client has left
                self._held.append(place)
                free.set_result(None)
        if self._waiting:
            self._take()

    def _places_of(self, reader: str) -> int:
        return sum(each.reader == reader and not each.taken for each in self._held)

    def _take(self) -> None:
        """Take places from slow readers for those who wait and have at least two places less. Look again when another reader is slow."""
        loop = asyncio.get_running_loop()
        held = Counter(each.reader for each in self._held if not each.taken)
        coming = sum(each.taken for each in self._held)
        slow_s: list[float] = []
        for place, _ in sorted(self._waiting, key=lambda each: held[each[0].reader]):
            if coming:  # the place is on its way
                coming -= 1
                held[place.reader] += 1
                continue
            for each in self._held:
                if each.taken or each.began_s is None or held[each.reader] < held[place.reader] + 2:
                    continue
                if loop.time() < each.began_s + SLOW_AFTER_S:
                    slow_s.append(each.began_s + SLOW_AFTER_S)
                    continue
                each.take()
                held[each.reader] -= 1
                held[place.reader] += 1
                break
        if slow_s:
            self._look = loop.call_at(min(slow_s), self.changed)
