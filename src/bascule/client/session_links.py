"""The links of a session across reconnects, with temporary destinations and subscriptions."""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Final

from bascule.amqp.session import Session
from bascule.client.coordinator import CoordinatorState
from bascule.client.destination import Destination, TemporaryQueue, TemporaryTopic, Topic, require_destination
from bascule.client.errors import ConnectionLost, IllegalState, InvalidDestination, Refused, TimedOut
from bascule.client.links import (
    ClientLink,
    ConsumerState,
    ReceivedDelivery,
    SenderState,
    SessionTransaction,
    Subscription,
    TemporaryState,
    UnsubscribingState,
)
from bascule.client.operation import Operation
from bascule.core.errors import BasculeError

if TYPE_CHECKING:
    from bascule.client.core import Core

#: Timeout of an answer to a drain, which takes a round trip; then the drain is sent again.
DRAIN_AGAIN_S: Final = 2.0


class Acknowledge(enum.Enum):
    """When a received message is acknowledged (Jakarta Messaging 3.1, section 6.2.10)."""

    AUTO = "auto"  # when receive() returns the message, or its listener returns
    CLIENT = "client"  # when the application calls acknowledge(), for all messages received so far
    DUPS_OK = "dups-ok"  # in batches; messages may be redelivered after a crash
    INDIVIDUAL = "individual"  # when the application calls acknowledge(), for each message
    TRANSACTED = "transacted"  # with context.commit(), together with the messages sent


class SessionLinks:
    """The state of a session that survives the connection, and its recovery."""

    def __init__(self, core: Core, mode: Acknowledge) -> None:
        self.core = core
        self.mode = mode
        self.engine: Session
        self.begun = False
        self.started = True
        self.closing = False
        self.block: object = None  # the block whose transaction is open
        self.unanswered = 0
        self.error: BasculeError | None = None
        self.senders: dict[tuple[str, str, bool], SenderState] = {}
        self.consumers: list[ConsumerState] = []
        self.others: list[ClientLink] = []  # temporary destinations, and subscriptions being deleted
        self.coordinator: CoordinatorState | None = None
        self.transaction = SessionTransaction() if mode is Acknowledge.TRANSACTED else None
        self.unacknowledged: dict[ReceivedDelivery, ConsumerState] = {}
        self.untold: deque[BasculeError] = deque()  # errors that ended consumers with listeners

    # --- reconnects --------------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Begin on the current connection and attach all links, except those to temporary destinations without a name."""
        amqp = self.core.amqp
        if amqp is None:
            raise ConnectionLost("a session cannot begin without a connection")
        self.engine = amqp.begin()
        self.engine.context = self
        for link in (*self.others, *self.senders.values(), *self.consumers):
            if link.error is None and not self._unnamed(link):
                link.attach()

    def attach_waiting(self, destination: Destination) -> None:
        """Attach the consumers of a temporary destination that has got its name."""
        for consumer in self.consumers:
            if consumer.subscription.destination is destination and consumer.link is None and consumer.error is None:
                consumer.attach()

    def _unnamed(self, link: ClientLink) -> bool:
        """Return whether the link leads to a temporary destination that the broker has not created, or not recreated, yet."""
        if not isinstance(link, ConsumerState):
            return False
        temporary = self._temporary_link(link.subscription.destination)
        return temporary is not None and not temporary.attached

    def lost(self) -> None:
        """Handle the loss of the connection."""
        self.begun = False
        if self.transaction is not None and self.transaction.id is not None:
            self.transaction.lost = True
        for link in self._links():
            link.lost()
        self.coordinator = None
        # The temporary destination of another connection may be deleted, so attach its sender again only for messages in flight.
        self.senders = {key: each for key, each in self.senders.items() if not (each.idle and key[0].startswith("temporary"))}
        self.others = [each for each in self.others if isinstance(each, TemporaryState) and not each.closing]
        self.consumers = [each for each in self.consumers if not each.closing]
        self.unacknowledged.clear()

    def failed(self, error: BasculeError) -> None:
        """Handle the end of the connection for good."""
        for link in self._links():
            link.failed(error)

    def ended(self, error: BasculeError) -> None:
        """Handle the broker's end of the session."""
        self.begun = False
        if not self.closing:
            self.error = error
        self.failed(error)

    def forget(self, link: ClientLink) -> None:
        """Remove a detached link."""
        if isinstance(link, SenderState):
            if self.senders.get(link.key) is link:
                del self.senders[link.key]
        elif isinstance(link, ConsumerState):
            if link in self.consumers:
                self.consumers.remove(link)
        elif link is self.coordinator:
            self.coordinator = None
            if self.transaction is not None and self.transaction.id is not None:
                self.transaction.lost = True
        elif link in self.others:
            self.others.remove(link)

    def pump(self) -> None:
        """Send queued messages after the socket has room again."""
        for sender in list(self.senders.values()):
            sender.flowed()

    def _links(self) -> list[ClientLink]:
        coordinator = () if self.coordinator is None else (self.coordinator,)
        return [*coordinator, *self.others, *self.senders.values(), *self.consumers]

    # --- common ------------------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the session has ended for good, or is being closed."""
        return self.closing or self.error is not None or self.core.error is not None

    def check(self) -> None:
        """Raise the error that ended the session."""
        if self.closing:
            raise IllegalState("the context is closed")
        self.core.check()
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def _attach(self, link: ClientLink, what: str, until_s: float) -> Operation[None]:
        if self.core.opened and not self._unnamed(link):
            link.attach()
        try:
            yield from self.core.until(lambda: link.decided or self.error is not None, what, until_s)
        except BaseException:
            link.close()
            self.forget(link)
            raise
        self.check()
        if link.error is not None:
            self.forget(link)
            raise link.error

    def _detach(self, link: ClientLink, until_s: float) -> Operation[None]:
        link.close()
        yield from self.core.until(lambda: link.gone or not self.begun, f"close {link.name}", until_s)
        self.forget(link)

    # --- destinations ------------------------------------------------------------------------------------------------------------

    def temporary(self, destination: TemporaryQueue | TemporaryTopic, until_s: float) -> Operation[None]:
        """Create a temporary destination, which the broker names."""
        self.check()
        own = self.core.own
        link = TemporaryState(own, destination, self.core.link_name(destination.kind))
        own.others.append(link)
        yield from own._attach(link, f"create a {destination.kind}", until_s)

    def delete_temporary(self, destination: TemporaryQueue | TemporaryTopic, until_s: float) -> Operation[None]:
        """Delete a temporary destination and its messages. Raises IllegalState if it has consumers of this connection."""
        self.check()
        if any(each.subscription.destination is destination for session in self.core.sessions for each in session.consumers):
            raise IllegalState(f"cannot delete {destination!r}: it has a consumer; close the consumer first")
        link = self._temporary_link(destination)
        if link is None:
            raise InvalidDestination(f"cannot delete {destination!r}: it belongs to another connection or was deleted")
        yield from self.core.own._detach(link, until_s)

    def _temporary_link(self, destination: Destination) -> TemporaryState | None:
        others = self.core.own.others
        return next((each for each in others if isinstance(each, TemporaryState) and each.destination is destination), None)

    def consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, until_s: float) -> Operation[ConsumerState]:
        """Attach a consumer; ``name`` is the name of its subscription. Raises InvalidDestination, InvalidSelector, Refused."""
        self.check()
        require_destination(wanted.destination)
        destination, has_client_id = wanted.destination, self.core.settings.client_id is not None
        if isinstance(destination, TemporaryQueue | TemporaryTopic) and self._temporary_link(destination) is None:
            raise InvalidDestination(f"cannot consume from {destination!r}: only the connection that created it may do so")
        if name is not None and not isinstance(destination, Topic):
            raise InvalidDestination(f"cannot subscribe to {destination!r}: only a topic can have subscriptions")
        if wanted.durable and not wanted.shared and not has_client_id:
            raise IllegalState("an unshared durable subscription needs a client id; use connect(..., client_id=...)")
        link_name = self.core.link_name("consumer") if name is None else self._subscription_link(name, wanted)
        if prefetch is None:
            prefetch = self.core.settings.prefetch
        consumer = ConsumerState(self, wanted, link_name, prefetch)
        self.consumers.append(consumer)
        yield from self._attach(consumer, f"consume from {destination.name}", until_s)
        return consumer

    def _subscription_link(self, name: str, wanted: Subscription) -> str:
        """Return the link name that identifies a subscription to brokers. Each link of a shared one needs its own name, as in Qpid JMS."""
        if not wanted.shared:
            return name
        everybodys = "" if self.core.settings.client_id is not None else "global"
        kind = everybodys if wanted.durable else f"{everybodys}-volatile".lstrip("-")
        taken = {each.name for session in self.core.sessions for each in session.consumers}
        number = 1
        while True:
            suffix = kind if wanted.durable and number == 1 else f"{kind}{number}"
            link_name = f"{name}|{suffix}" if suffix else name
            if link_name not in taken:
                return link_name
            number += 1

    def unsubscribe(self, name: str, until_s: float) -> Operation[None]:
        """Delete a durable subscription. Raises InvalidDestination if it does not exist, Refused if it has a consumer."""
        self.check()
        if any(each.name.partition("|")[0] == name for session in self.core.sessions for each in session.consumers):
            raise Refused(f"cannot delete subscription {name!r}: it has a consumer; close the consumer first")
        link = UnsubscribingState(self, name if self.core.settings.client_id is not None else f"{name}|global")
        self.others.append(link)
        yield from self._attach(link, f"unsubscribe {name}", until_s)
        yield from self._detach(link, until_s)

    # --- credit ---------------------------------------------------------------------------------------------------------------------

    def _drain(self, consumer: ConsumerState, credit: int, until_s: float) -> Operation[None]:
        """Have the broker send up to ``credit`` available messages and return the rest of the credit.

        If no answer arrives, send the drain again: Artemis ignores a drain that reaches it just before it answers the previous one.
        """
        link = consumer.link
        if link is None or not consumer.attached or not max(link.credit, credit):
            return
        link.flow(max(link.credit, credit), drain=True)

        def over() -> bool:
            return consumer.link is not link or not link.drain

        while not over():
            again_s = min(until_s, self.core.clock() + DRAIN_AGAIN_S)
            try:
                yield from self.core.until(over, "drain", again_s)
            except TimedOut:
                if again_s >= until_s:
                    raise
                link.flow(link.credit, drain=True)

    def _suspend(self, consumers: list[ConsumerState], until_s: float) -> Operation[None]:
        """Stop the delivery to ``consumers`` and release their unseen messages."""
        for consumer in consumers:
            consumer.suspended = True
        for consumer in consumers:
            yield from self._drain(consumer, 0, until_s)
            consumer.accept_lazy()
            consumer.give_back()

    def _resume(self, consumers: list[ConsumerState]) -> None:
        for consumer in consumers:
            consumer.suspended = False
            consumer.top_up()
