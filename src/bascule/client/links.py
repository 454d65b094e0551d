"""The links of a client, across reconnects: each link attaches itself again and recovers its messages in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bascule.amqp.errors import AmqpError
from bascule.amqp.events import Transferred
from bascule.amqp.link import Link, ReceiverLink, SenderLink
from bascule.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    DeleteOnClose,
    Modified,
    Rejected,
    SenderSettleMode,
    Source,
    Target,
    TransactionalState,
)
from bascule.amqp.types import Described, Symbol, ULong
from bascule.client.destination import Destination
from bascule.client.errors import ConnectionLost, MessageRefused, TransactionRolledBack, of_link
from bascule.client.message import Message
from bascule.core.errors import BasculeError

if TYPE_CHECKING:
    from bascule.client.session_links import SessionLinks

OUTCOMES: Final = tuple(Symbol(f"amqp:{name}:list") for name in ("accepted", "rejected", "released", "modified"))
#: For a message that the application has seen: its delivery count goes up.
FAILED: Final = Modified(delivery_failed=True)
#: For a message that must not be delivered again.
UNDELIVERABLE: Final = Modified(delivery_failed=True, undeliverable_here=True)
_SELECTOR: Final = ULong(0x0000468C00000004)
_NO_LOCAL: Final = ULong(0x0000468C00000003)
_DURABLE: Final = 2  # terminus durability "unsettled-state" (AMQP 1.0 part 3, section 3.5.5)


class ClientLink:
    """A link. ``link`` is the link of the protocol engine, None without a connection and after the end."""

    #: Whether the node of the link survives a close of the link, as a durable subscription does.
    outlives_link = False

    def __init__(self, session: SessionLinks, name: str) -> None:
        """``name`` stays the same across reconnects; it identifies a durable subscription."""
        self.session = session
        self.name = name
        self.link: Any = None
        self.attached = False
        self.closing = False
        self.error: BasculeError | None = None

    def attach(self) -> None:
        """Attach the link on the session's current connection."""
        self.link = self._make()
        self.link.context = self

    def _make(self) -> Link:
        raise NotImplementedError

    @property
    def decided(self) -> bool:
        """Whether the broker has accepted or refused the link."""
        return self.attached or self.error is not None

    @property
    def gone(self) -> bool:
        """Whether the link is detached."""
        return self.link is None

    def close(self) -> None:
        """Detach the link for good."""
        self.closing = True
        if self.link is not None:
            self.link.detach(closed=not self.outlives_link)

    def confirmed(self) -> None:
        """Handle the broker's attach. A null terminus means a refusal; its detach follows (AMQP 1.0 part 2, section 2.6.3)."""
        if (self.link.source if self.link.RECEIVER else self.link.target) is not None:
            self.attached = True
            self.ready()

    def ready(self) -> None:
        """Start using the attached link."""

    def flowed(self) -> None:
        """Handle a change of the credit."""

    def detached(self, error: AmqpError | None) -> None:
        """Handle the detach of the link by either side."""
        self.attached, self.link = False, None
        if not self.closing:
            self.error = of_link(error, selector=False)
        self.session.forget(self)

    def lost(self) -> None:
        """Handle the loss of the connection and with it of the link."""
        self.attached, self.link = False, None

    def failed(self, error: BasculeError) -> None:
        """Handle the end of the connection for good."""
        self.lost()
        self.error = self.error or error


class SessionTransaction:
    """A local transaction. The first message sent or received in it declares it to the broker."""

    def __init__(self) -> None:
        self.id: bytes | None = None
        self.state = TransactionalState(b"")
        self.accepted = TransactionalState(b"", ACCEPTED)
        self.declaring = False
        self.ending = False  # it accepts no more sends; later sends belong to the next transaction
        self.sending = 0  # number of calls of send within the transaction
        self.unanswered = 0
        self.refused: BasculeError | None = None  # the error of a message that the broker refused
        self.lost = False  # lost with its connection

    def declared(self, txn_id: bytes) -> None:
        """Store the id that the broker has assigned."""
        self.id = txn_id
        self.state = TransactionalState(txn_id)
        self.accepted = TransactionalState(txn_id, ACCEPTED)

    @contextmanager
    def send(self) -> Iterator[None]:
        """Count a call that sends in the transaction; a commit waits for these calls."""
        self.sending += 1
        try:
            yield
        finally:
            self.sending -= 1

    def check(self) -> None:
        """Raise TransactionRolledBack if the transaction can no longer be committed."""
        if self.lost:
            lost = ConnectionLost("the connection was lost during the transaction")
            raise TransactionRolledBack(f"{lost}; the transaction was rolled back, do its work again", cause=lost)


# --- sending ---------------------------------------------------------------------------------------------------------------------


class PendingSend:
    """A message that is being sent to the broker."""

    __slots__ = ("abandoned", "data", "done", "error", "message", "on_done", "refusals", "sender", "session", "transaction")

    def __init__(self, message: Message, data: bytes, sender: SenderState, transaction: SessionTransaction | None) -> None:
        self.message = message
        self.data = data
        self.sender = sender
        self.session = sender.session
        self.transaction = transaction
        self.done = False
        self.abandoned = False  # no caller waits for the message, so it is not sent again
        self.error: BasculeError | None = None
        self.on_done: Callable[[Message, BasculeError | None], None] | None = None
        self.refusals: list[BasculeError] | None = None  # gets the error before waiting callers continue

    def answered(self, state: Any) -> None:
        """Handle the broker's outcome."""
        self.sender.sent.pop(self, None)
        self.finish(_refusal(state))

    def finish(self, error: BasculeError | None) -> None:
        """Complete the send, with its error or None."""
        if self.done:
            return
        self.error, self.done = error, True  # in this order, for a reader on another thread
        self.session.unanswered -= 1
        if error is not None and self.refusals is not None:
            self.refusals.append(error)
        if self.transaction is not None:
            self.transaction.unanswered -= 1
            self.transaction.refused = self.transaction.refused or error
        if self.on_done is not None:
            self.session.core.completed.append(self)


def _refusal(state: Any) -> BasculeError | None:
    """Return the error of an outcome, or None if the broker accepted the message."""
    if isinstance(state, Accepted):
        return None
    if isinstance(state, Rejected) and state.error is not None:
        return MessageRefused(f"the broker refused the message: {state.error.exception()}")
    return MessageRefused(f"the broker did not accept the message; outcome: {type(state).__name__.lower()}")


class SenderState(ClientLink):
    """The link for all messages to one destination. After a reconnect, unanswered messages are sent again in order.

    ``settled``: the broker answers no message, and messages are not sent again.
    """

    def __init__(self, session: SessionLinks, destination: Destination, name: str, *, settled: bool = False) -> None:
        super().__init__(session, name)
        self.destination = destination
        self.settled = settled
        self.key = (destination.kind, destination.name, settled)
        self.queue: deque[PendingSend] = deque()
        self.sent: dict[PendingSend, None] = {}
        self.waiting = 0  # tasks with a message that wait for the attach

    def _make(self) -> Link:
        kind, address, settled = self.key
        return self.session.engine.attach_sender(
            self.name,
            Source(address=self.name, outcomes=OUTCOMES),
            Target(address=address, capabilities=(Symbol(kind),)),
            snd_settle_mode=SenderSettleMode.SETTLED if settled else SenderSettleMode.UNSETTLED,
        )

    @property
    def idle(self) -> bool:
        """Whether no message is in flight or about to be sent."""
        return not self.queue and not self.sent and not self.waiting

    def holds_back(self, transaction: SessionTransaction) -> bool:
        """Return True if a message of a transaction waits for credit, for the socket, or for the broker's window.

        This includes a message with some frames already sent.
        """
        unwritten = [*self.queue, *self.sent] if self.link is not None and self.link.sending else self.queue
        return any(each.transaction is transaction for each in unwritten)

    def put(self, sending: PendingSend) -> None:
        """Send a message as soon as the credit allows."""
        self.session.unanswered += 1
        if sending.transaction is not None:
            sending.transaction.unanswered += 1
        self.queue.append(sending)
        self.flowed()

    def withdraw(self, sending: PendingSend, error: BasculeError | None = None) -> bool:
        """Withdraw a message and report ``error`` for it. Return whether the message was certainly not sent."""
        sending.abandoned = True
        if sending in self.queue:
            self.queue.remove(sending)
            sending.finish(error)
            return True
        return False

    def flowed(self) -> None:
        """Send as many messages as the credit and the socket allow."""
        link = self.link
        if not self.attached or not isinstance(link, SenderLink):
            return
        largest = link.remote.max_message_size
        while self.queue and link.credit > 0 and not self.session.core.congested:
            sending = self.queue.popleft()
            if largest and len(sending.data) > largest:
                sending.finish(MessageRefused(f"message of {len(sending.data)} bytes is too large; the broker accepts {largest}"))
                continue
            if self.settled:
                link.send(sending.data, settled=True)
                sending.finish(None)
                continue
            self.sent[sending] = None
            transaction = sending.transaction
            link.send(sending.data, context=sending, state=None if transaction is None else transaction.state)

    ready = flowed

    def detached(self, error: AmqpError | None) -> None:
        """Fail the messages in flight; the broker will not answer them."""
        super().detached(error)
        self._finish_all(self.error or of_link(error, selector=False))

    def lost(self) -> None:
        """Queue unanswered messages to be sent again under the same id; messages of a transaction fail with it."""
        super().lost()
        unanswered = [*self.sent, *self.queue]
        self.sent.clear()
        self.queue = deque(each for each in unanswered if each.transaction is None and not each.abandoned)
        for each in unanswered:
            if each.transaction is not None:
                lost = ConnectionLost("the connection was lost during the transaction")
                each.finish(TransactionRolledBack(str(lost), cause=lost))
            elif each.abandoned:
                each.finish(None)

    def failed(self, error: BasculeError) -> None:
        """Fail all messages."""
        super().failed(error)
        self._finish_all(error)

    def _finish_all(self, error: BasculeError) -> None:
        for each in [*self.sent, *self.queue]:
            each.finish(error)
        self.sent.clear()
        self.queue.clear()


class TemporaryState(ClientLink):
    """The link that keeps a temporary destination. The destination is recreated after a reconnect, under another name."""

    def __init__(self, session: SessionLinks, destination: Destination, name: str) -> None:
        super().__init__(session, name)
        self.destination = destination

    def _make(self) -> Link:
        target = Target(
            dynamic=True,
            expiry_policy=Symbol("link-detach"),
            dynamic_node_properties={Symbol("lifetime-policy"): DeleteOnClose()},
            capabilities=(Symbol(self.destination.kind),),
        )
        return self.session.engine.attach_sender(self.name, Source(address=self.name, outcomes=OUTCOMES), target)

    def ready(self) -> None:
        """Store the name from the broker and attach the consumers of the destination."""
        self.destination.name = str(self.link.target.address)
        self.session.core.named(self.destination)


# --- receiving -------------------------------------------------------------------------------------------------------------------


class ReceivedDelivery(NamedTuple):
    """A delivery that the application has not seen. ``link`` identifies deliveries of an earlier connection, which need no answer."""

    link: ReceiverLink
    delivery_id: int
    payload: bytes
    settled: bool


class Subscription(NamedTuple):
    """The source of a consumer: the destination, the selector and the kind of subscription."""

    destination: Destination
    selector: str = ""
    no_local: bool = False
    durable: bool = False
    shared: bool = False
    browse: bool = False
    #: The broker sends each message once, and does not wait for an acknowledgement.
    settled: bool = False


class ConsumerState(ClientLink):
    """A consumer or a browser. It prefetches ``prefetch`` messages; with 0, each receive requests one message."""

    def __init__(self, session: SessionLinks, subscription: Subscription, name: str, prefetch: int) -> None:
        super().__init__(session, name)
        self.subscription = subscription
        self.outlives_link = subscription.durable
        self.prefetch = prefetch
        self.buffer: deque[ReceivedDelivery] = deque()
        self.listener: Callable[[Message], Any] | None = None
        self.receiving = 0  # number of tasks that receive
        self.waiting = 0  # number of these tasks that need a message requested
        self.suspended = False
        self.lazy: list[ReceivedDelivery] = []  # DUPS_OK: seen, and not yet acknowledged

    def _make(self) -> Link:
        destination, selector, no_local, durable, shared, browse, settled = self.subscription
        filters: dict[Symbol, Described] = {}
        if selector:
            filters[Symbol("jms-selector")] = Described(_SELECTOR, selector)
        if no_local:
            filters[Symbol("no-local")] = Described(_NO_LOCAL, "NoLocalFilter{}")
        capabilities = [Symbol(destination.kind)]
        if shared:
            capabilities.append(Symbol("shared"))
            if self.session.core.settings.client_id is None:
                capabilities.append(Symbol("global"))
        topic = destination.kind.endswith("topic")
        source = Source(
            address=destination.name,
            durable=_DURABLE if durable else 0,
            expiry_policy=Symbol("never" if durable else "link-detach"),
            distribution_mode=Symbol("copy") if browse or topic else None,
            filter=filters or None,
            default_outcome=FAILED,
            outcomes=OUTCOMES,
            capabilities=tuple(capabilities),
        )
        mode = SenderSettleMode.SETTLED if browse or settled else SenderSettleMode.UNSETTLED
        return self.session.engine.attach_receiver(self.name, source, Target(address=self.name), snd_settle_mode=mode)

    @property
    def available(self) -> bool:
        """Whether a message can be delivered now."""
        return bool(self.buffer) and self.session.started

    def arrived(self, event: Transferred) -> None:
        """Handle a message."""
        self.buffer.append(ReceivedDelivery(event.link, event.delivery_id, event.payload, event.settled))
        self._leave_to_others()

    @contextmanager
    def receives(self) -> Iterator[None]:
        """Guard a receive. Without prefetch, an unused message and unused credit are returned afterwards, for other consumers."""
        self.receiving += 1
        try:
            yield
        finally:
            self.receiving -= 1
            self._leave_to_others()

    def _leave_to_others(self) -> None:
        if self.prefetch or self.receiving or self.listener is not None or self.subscription.browse:
            return
        self.give_back()
        if self.attached and self.link.credit and not self.link.drain:
            self.link.flow(self.link.credit, drain=True)

    def ready(self) -> None:
        """Request the first messages."""
        self.top_up()

    flowed = ready  # a drain has ended, and its caller may no longer wait

    def top_up(self) -> None:
        """Request more messages when half of the prefetched messages are used."""
        if not self.attached or not self.session.started or self.suspended or self.closing or self.subscription.browse or self.link.drain:
            return
        wanted = self.prefetch or max(self.waiting, int(self.listener is not None))
        held = len(self.buffer)
        if wanted > held and held + self.link.credit <= wanted // 2:
            self.link.flow(wanted - held)

    def give_back(self) -> None:
        """Release the messages that the application has not seen, as if they had never been sent."""
        for each in self.buffer:
            each.link.settle(each.delivery_id, RELEASED)
        self.buffer.clear()

    def accept_lazily(self, arrived: ReceivedDelivery) -> None:
        """Acknowledge a message later, in a batch."""
        self.lazy.append(arrived)
        if not self.buffer or len(self.lazy) > self.prefetch // 2:
            self.accept_lazy()

    def accept_lazy(self) -> None:
        """Acknowledge the batch."""
        for each in self.lazy:
            each.link.settle(each.delivery_id, ACCEPTED)
        self.lazy.clear()

    def close(self) -> None:
        """Release unseen messages and detach."""
        self.accept_lazy()
        self.give_back()
        super().close()

    def detached(self, error: AmqpError | None) -> None:
        """Handle the end of the consumer by the broker."""
        selector = bool(self.subscription.selector)
        super().detached(error)
        if not self.closing:
            self.error = of_link(error, selector=selector)
            self.buffer.clear()
            if self.listener is not None:
                self.session.untold.append(self.error)

    def lost(self) -> None:
        """Forget the messages of the lost connection; the broker redelivers those that are not acknowledged."""
        super().lost()
        self.buffer.clear()
        self.lazy.clear()


class UnsubscribingState(ClientLink):
    """A link that finds a durable subscription by its name; closing the link deletes the subscription."""

    def _make(self) -> Link:
        # Without a client id, only a shared subscription with a global name is possible. Brokers need the capabilities, as Qpid JMS sends
        # them.
        everybodys = self.session.core.settings.client_id is None
        hints = (Symbol("shared"), Symbol("global")) if everybodys else ()
        return self.session.engine.attach_receiver(self.name, None, Target(address=self.name), desired_capabilities=hints)
