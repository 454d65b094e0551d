"""Local transactions: sends and acknowledgements that wait for their commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bascule.broker.message import BrokerMessage
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError

if TYPE_CHECKING:
    from bascule.broker.plans import PlanInTurns


class Draft(NamedTuple):
    """A message accepted and not yet routed."""

    message: BrokerMessage
    address: str
    routing: Routing
    body: bytes
    durable: bool
    container: str
    duplicate_ids: tuple[bytes, ...] = ()
    delivery_time_ms: int = 0


class LocalTransaction:
    """What one transaction has gathered. ``doomed`` is why it can only be rolled back.

    ``handed_over`` tells that it became a branch: prepared, read-only or committed in one phase.
    """

    __slots__ = (
        "acks", "begun_at", "charged_bytes", "charged_deliveries", "commit_steps", "doomed", "drafts", "handed_over", "id", "plan",
        "queues", "since_ms", "size_bytes",
    )  # fmt: skip

    def __init__(self, transaction_id: bytes, begun_at: int) -> None:
        """``begun_at`` is how far the journal was confirmed then."""
        self.id = transaction_id
        self.begun_at = begun_at
        self.drafts: list[Draft] = []
        self.acks: list[tuple[QueueConsumer, BrokerMessage]] = []
        self.queues: dict[BrokerQueue, None] = {}  # from which it has received
        self.size_bytes = 0
        self.commit_steps = 0  # of deciding about the messages that it sends
        self.plan: PlanInTurns | None = None  # of its commit, or of the branch that it is to become, if that takes long
        self.charged_bytes = 0  # in the account of memory
        self.charged_deliveries = 0  # the same: deliveries that it has acknowledged, which stay unsettled until it ends
        self.since_ms = 0  # since when it holds something
        self.doomed: BasculeError | None = None
        self.handed_over = False

    def hand_over(self) -> None:
        """It became a branch, which has all that it has gathered. A connection remembers it for a while, and keeps no message with it."""
        self.handed_over = True
        self.drafts, self.acks, self.queues = [], [], {}
