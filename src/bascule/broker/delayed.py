"""The messages of a queue that wait for their time."""

from __future__ import annotations

from bascule.broker.message import BrokerMessage
from bascule.broker.order import Lines


class Delayed(Lines):
    """Delayed messages, with the time of each in milliseconds since the epoch."""

    __slots__ = ("_due_ms",)

    def __init__(self) -> None:
        super().__init__()
        self._due_ms: dict[int, int] = {}  # by position

    def put(self, message: BrokerMessage, due_ms: int) -> None:
        """A message waits for its time."""
        self.insert(message)
        self._due_ms[message.position] = due_ms

    def remove(self, message: BrokerMessage) -> bool:
        """Remove a message. Return False if it is not here."""
        if self._due_ms.pop(message.position, None) is None:
            return False
        return super().remove(message)

    def due_ms(self, message: BrokerMessage) -> int:
        """Return the time of a message; 0 of one that is not here."""
        return self._due_ms.get(message.position, 0)

    def __contains__(self, message: BrokerMessage) -> bool:
        return message.position in self._due_ms

    def __len__(self) -> int:
        return self.count
