"""The delayed messages of a queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from bascule.broker.message import BrokerMessage
from bascule.broker.order import Lines, QueuePlace


class Delayed(Lines):
    """Delayed messages, each with the time at which it may be delivered, in milliseconds since the epoch.

    ``leaving`` is a message whose delay has ended and that does not wait for consumers yet: see FanOut. Unlike the others it is found by
    identity, since its place changes meanwhile.
    """

    __slots__ = ("_due_ms", "leaving")

    def __init__(self) -> None:
        super().__init__()
        self._due_ms: dict[int, int] = {}  # by position
        self.leaving: BrokerMessage | None = None

    def put(self, message: BrokerMessage, due_ms: int) -> None:
        """Add a message that may be delivered at ``due_ms``."""
        self.insert(message)
        self._due_ms[message.position] = due_ms

    def remove(self, message: BrokerMessage) -> bool:
        """Remove a message. Return False if it is not among these messages."""
        if message is self.leaving:
            self.leaving = None
            return True
        if self._due_ms.pop(message.position, None) is None:
            return False
        return super().remove(message)

    def let_leave(self, message: BrokerMessage) -> bool:
        """End the delay of a message, which is ``leaving`` until it is removed. Return False if it is not among these messages."""
        if not self.remove(message):
            return False
        self.leaving = message
        return True

    def pop_some(self) -> deque[BrokerMessage]:
        """Remove and return some messages; an empty deque if there are none."""
        leaving, self.leaving = self.leaving, None
        return super().pop_some() if leaving is None else deque((leaving,))

    def after(self, place: QueuePlace, count: int) -> list[BrokerMessage]:
        """Return the next messages behind a place, at most ``count``, all of one priority. An empty list means that there are none."""
        found, leaving = super().after(place, count), self.leaving
        if leaving is None or (-leaving.priority, leaving.position) <= (-place.priority, place.position):
            return found
        if found and found[0].priority == leaving.priority:
            return sorted((*found, leaving), key=lambda message: message.position)[:count]
        return found if found and found[0].priority > leaving.priority else [leaving]

    def due_ms(self, message: BrokerMessage) -> int:
        """Return the time of a message in ms since the epoch; 0 if it is not among these messages, or leaves them now."""
        return self._due_ms.get(message.position, 0)

    def __contains__(self, message: BrokerMessage) -> bool:
        return message.position in self._due_ms or message is self.leaving

    def __iter__(self) -> Iterator[BrokerMessage]:
        return super().__iter__() if self.leaving is None else chain(super().__iter__(), (self.leaving,))

    def __len__(self) -> int:
        return self.count + (self.leaving is not None)
