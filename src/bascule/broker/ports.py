"""What the broker engine talks to: the links of clients, and what its parts need of one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from bascule.broker.message import BrokerMessage
from bascule.core.errors import BasculeError

if TYPE_CHECKING:
    from bascule.broker.queue import BrokerQueue


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


class DeliveryHooks(Protocol):
    """What deliveries need of the other parts of the engine."""

    @property
    def move(self) -> Callable[[BrokerQueue, BrokerMessage, str, str], bool]:
        """Send a message on, for a reason; see Sending."""

    @property
    def look_for_use(self) -> Callable[[BrokerQueue], None]:
        """The queue may be one that nobody uses any more; see Destinations."""

    @property
    def begin_use(self) -> Callable[[BrokerQueue], None]:
        """A durable subscription has a consumer again; see SubscriptionUse."""
