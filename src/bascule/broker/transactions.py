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
    """A message that is accepted and not routed yet."""

    message: BrokerMessage
    address: str
    routing: Routing
    body: bytes
    durable: bool
    container: str
    duplicate_ids: tuple[bytes, ...] = ()
    delivery_time_ms: int = 0


class LocalTransaction:
    """The messages and acknowledgements of one transaction. ``doomed`` says why it can only be rolled back, or is None.

    ``handed_over`` is true if the transaction has become a branch: prepared, read-only or committed in one phase.

    ``suspended`` is true if the discharge of the transaction leaves it to its connection, so that its session can begin another branch.
    """

    __slots__ = (
        "acks", "begun_at", "charged_bytes", "charged_deliveries", "commit_steps", "doomed", "drafts", "handed_over", "id", "joined",
        "plan", "queues", "routed_at", "since_ms", "size_bytes", "suspended", "user",
    )  # fmt: skip

    def __init__(self, transaction_id: bytes, begun_at: int, user: str) -> None:
        """``begun_at`` is how far the journal was confirmed then."""
        self.id = transaction_id
        self.user = user
        self.begun_at = begun_at
        self.drafts: list[Draft] = []
        self.acks: list[tuple[QueueConsumer, BrokerMessage]] = []
        self.queues: dict[BrokerQueue, None] = {}  # queues from which it has received
        self.size_bytes = 0
        self.commit_steps = 0  # steps to decide about its messages on the routes of their arrival
        self.routed_at = -1  # AddressBook.forgotten when its first message arrived
        self.plan: PlanInTurns | None = None  # of its commit or prepare, if that is long
        self.charged_bytes = 0  # in the account of memory
        self.charged_deliveries = 0  # in the account of memory: acknowledged deliveries, unsettled until the end
        self.since_ms = 0  # since when it holds messages
        self.doomed: BasculeError | None = None
        self.handed_over = False
        self.suspended = False
        self.joined: list[LocalTransaction] = []  # whose work it has taken over

    def hand_over(self) -> None:
        """Note that the transaction has become a branch, which has all its messages. The connection keeps only the name for a while."""
        self.handed_over = True
        self.drafts, self.acks, self.queues = [], [], {}
        for each in self.joined:
            each.hand_over()
