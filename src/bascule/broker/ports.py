"""What the broker engine talks to: the links of clients."""

from __future__ import annotations

from typing import Any, Protocol

from bascule.broker.message import BrokerMessage
from bascule.core.errors import BasculeError


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

    def deliver(self, message: BrokerMessage, delivery_count: int) -> None:
        """Send it a message; ``delivery_count`` counts earlier, failed deliveries."""

    def dispatched(self) -> None:
        """All that the queue can give now has been delivered: a drain may be answered."""

    def ended(self, error: BasculeError) -> None:
        """The queue has been deleted: nothing will come any more."""
