"""The delayed messages of a queue."""

from __future__ import annotations

from bascule.broker.message import BrokerMessage
from bascule.broker.order import Lines


class Delayed(Lines):
    """Delayed messages, each with the time at which it may be delivered, in milliseconds since the epoch."""

    __slots__ = ("_due_ms",)

    def __init__(self) -> None:
        super().__init__()
        self._due_ms: dict[int, int] = {}  # by position

    def put(self, message: BrokerMessage, due_ms: int) -> None:
        """Add a message that may be delivered at ``due_ms``."""
        self.insert(message)
        self._due_ms[message.position] = due_ms

    def remove(self, message: BrokerMessage) -> bool:
        """Remove a message. Return False if it is not among these messages."""
        if self._due_ms.pop(message.position, None) is None:
            return False
        return super().remove(message)

    def due_ms(self, message: BrokerMessage) -> int:
        """Return the time of a message in ms since the epoch; 0 if it is not among these messages."""
        return self._due_ms.get(message.position, 0)

    def __contains__(self, message: BrokerMessage) -> bool:
        return message.position in self._due_ms

    def __len__(self) -> int:
        return self.count
