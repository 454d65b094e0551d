"""Links as a client keeps them over its reconnects: each knows how to attach itself again, and what to make of what it had under way."""

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
#: Given back after it was seen: its delivery count goes up.
FAILED: Final = Modified(delivery_failed=True)
#: Not to be seen again by anybody.
UNDELIVERABLE: Final = Modified(delivery_failed=True, undeliverable_here=True)
_SELECTOR: Final = ULong(0x0000468C00000004)
_NO_LOCAL: Final = ULong(0x0000468C00000003)
_DURABLE: Final = 2  # terminus durability "unsettled-state" (AMQP 1.0 part 3, section 3.5.5)


class ClientLink:
    """One link. ``link`` is the engine's, None while there is no connection or after the end."""

    #: Whether what the link leads to stays when the link is closed: a durable subscription does.
    outlives_link = False

    def __init__(self, session: SessionLinks, name: str) -> None:
        """``name`` is the same after a reconnect: durable subscriptions are known by it."""
        self.session = session
        self.name = name
        self.link: Any = None
        self.attached = False
        self.closing = False
        self.error: BasculeError | None = None

    def attach(self) -> None:
        """Ask for the link on the session's present connection."""
        self.link = self._make()
        self.link.context = self

    def _make(self) -> Link:
        raise NotImplementedError

    @property
    def decided(self) -> bool:
        """Whether the broker has said yes or no."""
        return self.attached or self.error is not None

    @property
    def gone(self) -> bool:
        """Whether there is nothing to wait for after a close."""
        return self.link is None

    def close(self) -> None:
        """Detach for good."""
        self.closing = True
        if self.link is not None:
            self.link.detach(closed=not self.outlives_link)

    def confirmed(self) -> None:
        """The broker's answer to the attach. A null terminus is a refusal: the reason follows (part 2, section 2.6.3)."""
        if (self.link.source if self.link.RECEIVER else self.link.target) is not None:
            self.attached = True
            self.ready()

    def ready(self) -> None:
        """The link can be used."""

    def flowed(self) -> None:
        """Credit changed."""

    def detached(self, error: AmqpError | None) -> None:
        """The end of the link, by either side."""
        self.attached, self.link = False, None
        if not self.closing:
            self.error = of_link(error, selector=False)
        self.session.forget(self)

    def lost(self) -> None:
        """The connection is gone, and the link with it."""
        self.attached, self.link = False, None

    def failed(self, error: BasculeError) -> None:
        """There will be no other connection."""
        self.lost()
        self.error = self.error or error


class SessionTransaction:
    """A local transaction. It is declared to the broker when the first message is sent or received in it."""

    def __init__(self) -> None:
        self.id: bytes | None = None
        self.state = TransactionalState(b"")
        self.accepted = TransactionalState(b"", ACCEPTED)
        self.declaring = False
        self.ending = False  # it takes no more sends: they are for the next one
        self.sending = 0  # calls of send that are within it
        self.unanswered = 0
        self.refused: BasculeError | None = None  # a message of it was not taken
        self.lost = False  # with its connection

    def declared(self, txn_id: bytes) -> None:
        """The broker knows it."""
        self.id = txn_id
        self.state = TransactionalState(txn_id)
        self.accepted = TransactionalState(txn_id, ACCEPTED)

    @contextmanager
    def send(self) -> Iterator[None]:
        """Around a call that sends in it: a commit waits for that."""
        self.sending += 1
        try:
            yield
        finally:
            self.sending -= 1

    def check(self) -> None:
        """Raises TransactionRolledBack where it cannot be committed any more."""
        if self.lost:
            lost = ConnectionLost("the connection was lost within the transaction")
            raise TransactionRolledBack(f"{lost}: nothing of it happened; do its work again", cause=lost)


# --- sending ---------------------------------------------------------------------------------------------------------------------


class PendingSend:
    """A message on its way to the broker."""

    __slots__ = ("abandoned", "data", "done", "error", "message", "on_done", "refusals", "sender", "session", "transaction")

    def __init__(self, message: Message, data: bytes, sender: SenderState, transaction: SessionTransaction | None) -> None:
        self.message = message
        self.data = data
        self.sender = sender
        self.session = sender.session
        self.transaction = transaction
        self.done = False
        self.abandoned = False  # nobody waits for it any more: not to be repeated
        self.error: BasculeError | None = None
        self.on_done: Callable[[Message, BasculeError | None], None] | None = None
        self.refusals: list[BasculeError] | None = None  # gets the error before anybody who waits goes on

    def answered(self, state: Any) -> None:
        """The broker's outcome."""
        self.sender.sent.pop(self, None)
        self.finish(_refusal(state))

    def finish(self, error: BasculeError | None) -> None:
        """It is over."""
        if self.done:
            return
        self.done, self.error = True, error
        self.session.unanswered -= 1
        if error is not None and self.refusals is not None:
            self.refusals.append(error)
        if self.transaction is not None:
            self.transaction.unanswered -= 1
            self.transaction.refused = self.transaction.refused or error
        if self.on_done is not None:
            self.session.core.completed.append(self)


def _refusal(state: Any) -> BasculeError | None:
    """Why a message was not taken; None for one that was."""
    if isinstance(state, Accepted):
        return None
    if isinstance(state, Rejected) and state.error is not None:
        return MessageRefused(f"message refused: {state.error.exception()}")
    return MessageRefused(f"message not taken: {type(state).__name__.lower()}")


class SenderState(ClientLink):
    """The link of all messages to one destination. What is unanswered when the connection breaks is sent again, in order."""

    def __init__(self, session: SessionLinks, destination: Destination, name: str) -> None:
        super().__init__(session, name)
        self.destination = destination
        self.key = (destination.kind, destination.name)
        self.queue: deque[PendingSend] = deque()
        self.sent: dict[PendingSend, None] = {}
        self.waiting = 0  # tasks that have a message for it once it is attached

    def _make(self) -> Link:
        kind, address = self.key
        return self.session.engine.attach_sender(
            self.name,
            Source(address=self.name, outcomes=OUTCOMES),
            Target(address=address, capabilities=(Symbol(kind),)),
            snd_settle_mode=SenderSettleMode.UNSETTLED,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way, or is about to be."""
        return not self.queue and not self.sent and not self.waiting

    def holds_back(self, transaction: SessionTransaction) -> bool:
        """Whether a message of a transaction waits for credit, for the socket, or for the broker's window with some of its frames."""
        unwritten = [*self.queue, *self.sent] if self.link is not None and self.link.sending else self.queue
        return any(each.transaction is transaction for each in unwritten)

    def put(self, sending: PendingSend) -> None:
        """Send a message as soon as credit allows."""
        self.session.unanswered += 1
        if sending.transaction is not None:
            sending.transaction.unanswered += 1
        self.queue.append(sending)
        self.flowed()

    def withdraw(self, sending: PendingSend, error: BasculeError | None = None) -> bool:
        """Forget about a message; whether it has certainly not been sent. ``error`` is for who wants to be told."""
        sending.abandoned = True
        if sending in self.queue:
            self.queue.remove(sending)
            sending.finish(error)
            return True
        return False

    def flowed(self) -> None:
        """Send what credit, and the socket, allow."""
        link = self.link
        if not self.attached or not isinstance(link, SenderLink):
            return
        largest = link.remote.max_message_size
        while self.queue and link.credit > 0 and not self.session.core.congested:
            sending = self.queue.popleft()
            if largest and len(sending.data) > largest:
                sending.finish(MessageRefused(f"message of {len(sending.data)} bytes: the broker takes no more than {largest}"))
                continue
            self.sent[sending] = None
            transaction = sending.transaction
            link.send(sending.data, context=sending, state=None if transaction is None else transaction.state)

    ready = flowed

    def detached(self, error: AmqpError | None) -> None:
        """Nobody will answer what is on its way."""
        super().detached(error)
        self._finish_all(self.error or of_link(error, selector=False))

    def lost(self) -> None:
        """What was not answered is sent again under the same id; what was part of a transaction went with it."""
        super().lost()
        unanswered = [*self.sent, *self.queue]
        self.sent.clear()
        self.queue = deque(each for each in unanswered if each.transaction is None and not each.abandoned)
        for each in unanswered:
            if each.transaction is not None:
                lost = ConnectionLost("the connection was lost within the transaction")
                each.finish(TransactionRolledBack(str(lost), cause=lost))
            elif each.abandoned:
                each.finish(None)

    def failed(self, error: BasculeError) -> None:
        """Nothing more will be sent."""
        super().failed(error)
        self._finish_all(error)

    def _finish_all(self, error: BasculeError) -> None:
        for each in [*self.sent, *self.queue]:
            each.finish(error)
        self.sent.clear()
        self.queue.clear()


class TemporaryState(ClientLink):
    """What keeps a temporary destination: it goes with this link, and is made anew after a reconnect, under another name."""

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
        """The broker has named it; who consumes from it may attach."""
        self.destination.name = str(self.link.target.address)
        self.session.core.named(self.destination)


# --- receiving -------------------------------------------------------------------------------------------------------------------


class ReceivedDelivery(NamedTuple):
    """A delivery that the application has not seen. ``link`` tells those of an earlier connection, which need no answer."""

    link: ReceiverLink
    delivery_id: int
    payload: bytes
    settled: bool


class Subscription(NamedTuple):
    """What a consumer wants."""

    destination: Destination
    selector: str = ""
    no_local: bool = False
    durable: bool = False
    shared: bool = False
    browse: bool = False


class ConsumerState(ClientLink):
    """A consumer, or a browser. ``prefetch`` messages are asked for ahead; with 0 each is asked for when it is waited for."""

    def __init__(self, session: SessionLinks, subscription: Subscription, name: str, prefetch: int) -> None:
        super().__init__(session, name)
        self.subscription = subscription
        self.outlives_link = subscription.durable
        self.prefetch = prefetch
        self.buffer: deque[ReceivedDelivery] = deque()
        self.listener: Callable[[Message], Any] | None = None
        self.receiving = 0  # tasks at it
        self.waiting = 0  # those of them for whom a message is to be asked for
        self.suspended = False
        self.lazy: list[ReceivedDelivery] = []  # DUPS_OK: seen, and acknowledged by and by

    def _make(self) -> Link:
        destination, selector, no_local, durable, shared, browse = self.subscription
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
        mode = SenderSettleMode.SETTLED if browse else SenderSettleMode.UNSETTLED
        return self.session.engine.attach_receiver(self.name, source, Target(address=self.name), snd_settle_mode=mode)

    @property
    def available(self) -> bool:
        """Whether a message can be handed over now."""
        return bool(self.buffer) and self.session.started

    def arrived(self, event: Transferred) -> None:
        """A message."""
        self.buffer.append(ReceivedDelivery(event.link, event.delivery_id, event.payload, event.settled))
        self._leave_to_others()

    @contextmanager
    def receives(self) -> Iterator[None]:
        """While somebody receives. After that nothing is kept, or still asked for, without prefetch: another consumer may wait for it."""
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
        """Ask for the first messages."""
        self.top_up()

    flowed = ready  # a drain is over, and who asked for it may be gone

    def top_up(self) -> None:
        """Ask for more when half is used."""
        if not self.attached or not self.session.started or self.suspended or self.closing or self.subscription.browse or self.link.drain:
            return
        wanted = self.prefetch or max(self.waiting, int(self.listener is not None))
        held = len(self.buffer)
        if wanted > held and held + self.link.credit <= wanted // 2:
            self.link.flow(wanted - held)

    def give_back(self) -> None:
        """What the application has not seen goes back as if it had never been sent."""
        for each in self.buffer:
            each.link.settle(each.delivery_id, RELEASED)
        self.buffer.clear()

    def accept_lazily(self, arrived: ReceivedDelivery) -> None:
        """Acknowledge now and then."""
        self.lazy.append(arrived)
        if not self.buffer or len(self.lazy) > self.prefetch // 2:
            self.accept_lazy()

    def accept_lazy(self) -> None:
        """Acknowledge what has gathered."""
        for each in self.lazy:
            each.link.settle(each.delivery_id, ACCEPTED)
        self.lazy.clear()

    def close(self) -> None:
        """Give back what was not seen, and detach."""
        self.accept_lazy()
        self.give_back()
        super().close()

    def detached(self, error: AmqpError | None) -> None:
        """The broker ended it."""
        selector = bool(self.subscription.selector)
        super().detached(error)
        if not self.closing:
            self.error = of_link(error, selector=selector)
            self.buffer.clear()
            if self.listener is not None:
                self.session.untold.append(self.error)

    def lost(self) -> None:
        """What was not acknowledged comes again from the broker."""
        super().lost()
        self.buffer.clear()
        self.lazy.clear()


class UnsubscribingState(ClientLink):
    """Looks a durable subscription up by its name; closing this link deletes it."""

    def _make(self) -> Link:
        # Without a client id it can only be a shared one that is everybody's: brokers want to be told, as Qpid JMS does it.
        everybodys = self.session.core.settings.client_id is None
        hints = (Symbol("shared"), Symbol("global")) if everybodys else ()
        return self.session.engine.attach_receiver(self.name, None, Target(address=self.name), desired_capabilities=hints)
