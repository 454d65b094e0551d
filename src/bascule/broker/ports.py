"""What the broker engine is told and what it talks to: its owner's policy, and the links of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from bascule.broker.duplicates import WINDOW_COUNT, WINDOW_MS
from bascule.broker.message import Message
from bascule.core.errors import BasculeError


@dataclass(frozen=True, slots=True)
class Policy:
    """What the broker's owner decides."""

    deliveries_max: int = 10  # failed deliveries after which a message goes to the dead-letter address
    dead_letter_address: str = "DLQ"
    transaction_bytes_max: int = 64 << 20  # a transaction must fit into one journal record, which Kafka bounds
    duplicate_count: int = WINDOW_COUNT
    duplicate_ms: int = WINDOW_MS


class SendPort(Protocol):
    """A producer's link, as the broker sees it."""

    def accepted(self, token: Any) -> None:
        """The message is stored (persistent), or held (not persistent)."""

    def refused(self, token: Any, error: BasculeError) -> None:
        """The message was not taken and never will be."""


class ConsumerPort(Protocol):
    """A consumer's link, as the broker sees it."""

    @property
    def credit(self) -> int:
        """Messages it may be sent now."""

    def deliver(self, message: Message, delivery_count: int) -> None:
        """Send it a message; ``delivery_count`` counts earlier, failed deliveries."""

    def dispatched(self) -> None:
        """All that the queue can give now has been delivered: a drain may be answered."""
