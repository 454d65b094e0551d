"""Interfaces between the engine and the links of clients, and between parts of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from bascule.broker.message import BrokerMessage
from bascule.core.errors import BasculeError

if TYPE_CHECKING:
    from bascule.broker.queue import BrokerQueue


class SendPort(Protocol):
    """A producer's link, as the engine sees it."""

    def accepted(self, token: Any) -> None:
        """Report that the message is stored (persistent) or held (non-persistent)."""

    def refused(self, token: Any, error: BasculeError) -> None:
        """Report that the message was not accepted, and never will be."""


class ConsumerPort(Protocol):
    """A consumer's link, as the engine sees it."""

    @property
    def credit(self) -> int:
        """Return the number of messages that the consumer may get now."""

    def deliver(self, message: BrokerMessage, delivery_count: int) -> int:
        """Send a message to the consumer. Return ``credit`` after that. ``delivery_count`` is the number of earlier, failed deliveries."""

    def dispatched(self) -> None:
        """Note that the queue has delivered all that it can now: a drain may be answered."""

    def ended(self, error: BasculeError) -> None:
        """Note that the queue was deleted, and that no message will follow."""


class DeliveryHooks(Protocol):
    """Functions of other parts of the engine that deliveries call."""

    @property
    def move(self) -> Callable[[BrokerQueue, BrokerMessage, str, str], bool]:
        """Move a message to another address, for a reason; see Sending."""

    @property
    def look_for_use(self) -> Callable[[BrokerQueue], None]:
        """Check whether a queue is unused; see Destinations."""

    @property
    def begin_use(self) -> Callable[[BrokerQueue], None]:
        """Note that a durable subscription has a consumer again; see SubscriptionUse."""
