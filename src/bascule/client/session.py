"""What one context does: sends, receives, acknowledges, transactions. One AMQP session at a time, over all reconnects."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bascule.amqp.performatives import ACCEPTED, Accepted, Declare, Declared, Discharge, Rejected, TransactionalState
from bascule.amqp.session import Session
from bascule.client.destination import Destination, TemporaryQueue, TemporaryTopic, Topic
from bascule.client.errors import (
    ConnectionLost,
    IllegalState,
    InvalidDestination,
    MessageRefused,
    Refused,
    TimedOut,
    TransactionInDoubt,
    TransactionRolledBack,
)
from bascule.client.links import (
    FAILED,
    UNDELIVERABLE,
    Arrived,
    ConsumerState,
    Control,
    CoordinatorState,
    LinkState,
    SenderState,
    Sending,
    Subscription,
    TemporaryState,
    UnsubscribingState,
)
from bascule.client.message import Body, Message, SendOptions, encode, stamp
from bascule.client.operation import Operation, Wait
from bascule.core.errors import BasculeError
from bascule.jms.message import decode_message
from bascule.jms.sections import MalformedMessage

if TYPE_CHECKING:
    from bascule.client.core import Core

#: Messages on their way to the broker, unanswered: enough to hide a round trip, little to send again.
SEND_WINDOW: Final = 1000
#: Links to destinations that a context keeps for its next message there.
SENDERS_MAX: Final = 32
#: What a browser asks for at once.
BROWSE_AHEAD: Final = 100
FOREVER: Final = float("inf")

OnDone = Callable[[Message, BasculeError | None], None]


class Acknowledge(enum.Enum):
    """When a message that was received is done with (Jakarta Messaging 3.1, section 6.2.10)."""

    AUTO = "auto"  # when receive() returns it, or its listener returns
    CLIENT = "client"  # when the application says so, for all received so far
    DUPS_OK = "dups-ok"  # by and by: after a crash some come again
    INDIVIDUAL = "individual"  # when the application says so, for each
    TRANSACTED = "transacted"  # with context.commit(), together with what was sent


def now_ms() -> int:
    """The time that messages carry, in ms since the epoch."""
    return time.time_ns() // 1_000_000


class Transaction:
    """A local transaction. It is declared to the broker when the first message is sent or received in it."""

    def __init__(self) -> None:
        self.id: bytes | None = None
        self.state = TransactionalState(b"")
        self.accepted = TransactionalState(b"", ACCEPTED)
        self.declaring = False
        self.unanswered = 0
        self.refused: BasculeError | None = None  # a message of it was not taken
        self.lost = False  # with its connection

    def declared(self, txn_id: bytes) -> None:
        """The broker knows it."""
        self.id = txn_id
        self.state = TransactionalState(txn_id)
        self.accepted = TransactionalState(txn_id, ACCEPTED)

    def check(self) -> None:
        """Raises TransactionRolledBack where it cannot be committed any more."""
        if self.lost:
            raise TransactionRolledBack("the connection was lost within the transaction: nothing of it happened; do its work again")


class SessionState:
    """One session. ``acknowledging`` is how a message's own ``acknowledge`` gets here, through the face's lock."""

    def __init__(self, core: Core, mode: Acknowledge) -> None:
        self.core = core
        self.mode = mode
        self.engine: Session
        self.begun = False
        self.started = True
        self.closing = False
        self.in_block = False
        self.listening = False  # a listener has a message in its hands
        self.unanswered = 0
        self.error: BasculeError | None = None
        self.senders: dict[tuple[str, str], SenderState] = {}
        self.consumers: list[ConsumerState] = []
        self.others: list[LinkState] = []  # temporary destinations, a subscription being deleted
        self.coordinator: CoordinatorState | None = None
        self.transaction = Transaction() if mode is Acknowledge.TRANSACTED else None
        self.unacknowledged: dict[Arrived, ConsumerState] = {}
        self.answers: ConsumerState | None = None  # to requests
        self.acknowledging: Callable[[Arrived], None] = self.acknowledge

    # --- over reconnects ---------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Begin on the connection there is, with all links but those to temporary destinations that have no name yet."""
        assert self.core.amqp is not None
        self.engine = self.core.amqp.begin()
        self.engine.context = self
        for link in (*self.others, *self.senders.values(), *self.consumers):
            if link.error is None and not self._unnamed(link):
                link.attach()

    def attach_waiting(self, destination: Destination) -> None:
        """A temporary destination has its name: attach who waits for it."""
        for consumer in self.consumers:
            if consumer.subscription.destination is destination and consumer.link is None and consumer.error is None:
                consumer.attach()

    def _unnamed(self, link: LinkState) -> bool:
        """Whether a link leads to a temporary destination that the broker has not made (again) yet."""
        if not isinstance(link, ConsumerState):
            return False
        temporary = self._temporary_link(link.subscription.destination)
        return temporary is not None and not temporary.attached

    def lost(self) -> None:
        """The connection is gone."""
        self.begun = False
        if self.transaction is not None and self.transaction.id is not None:
            self.transaction.lost = True
        for link in self._links():
            link.lost()
        self.coordinator = None
        # A temporary destination of somebody else may be gone: only what is on its way there is a reason to look again.
        self.senders = {key: each for key, each in self.senders.items() if not (each.idle and key[0].startswith("temporary"))}
        self.others = [each for each in self.others if isinstance(each, TemporaryState) and not each.closing]
        self.consumers = [each for each in self.consumers if not each.closing]
        self.unacknowledged.clear()

    def failed(self, error: BasculeError) -> None:
        """There will be no other connection."""
        for link in self._links():
            link.failed(error)

    def ended(self, error: BasculeError) -> None:
        """The broker ended the session, or answered our end."""
        self.begun = False
        if not self.closing:
            self.error = error
        self.failed(error)

    def forget(self, link: LinkState) -> None:
        """A link is detached."""
        if isinstance(link, SenderState):
            self.senders.pop(link.key, None)
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
        """The socket takes more."""
        for sender in list(self.senders.values()):
            sender.flowed()

    def _links(self) -> list[LinkState]:
        coordinator = () if self.coordinator is None else (self.coordinator,)
        return [*coordinator, *self.others, *self.senders.values(), *self.consumers]

    # --- common ------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what ended the session."""
        if self.closing:
            raise IllegalState("the context is closed")
        self.core.check()
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def _attach(self, link: LinkState, what: str, until_s: float) -> Operation[None]:
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

    def _detach(self, link: LinkState, until_s: float) -> Operation[None]:
        link.close()
        yield from self.core.until(lambda: link.gone, f"close {link.name}", until_s)
        self.forget(link)

    # --- sending -----------------------------------------------------------------------------------------------------------------

    def send(
        self,
        destination: Destination,
        content: Message | Body,
        options: SendOptions,
        until_s: float,
        *,
        wait: bool = True,
        repeat: bool = False,
        on_done: OnDone | None = None,
    ) -> Operation[Message]:
        """Send a message; with ``wait`` return when the broker has it, in a transaction at once. Raises as Producer.send does."""
        self.check()
        message = Message.of(content)
        transaction = self.transaction
        sender = yield from self._sender(destination, until_s)
        if not (repeat and message.message_id):
            stamp(message, destination, options, self.core.message_id(), now_ms())
        if message.delivery_time_ms and "DELAYED_DELIVERY" not in self.core.offered:
            raise MessageRefused("this broker does not offer delivery delay")
        data = encode(message)
        if transaction is not None:
            yield from self._declare(transaction, until_s)
        yield from self.core.until(lambda: self.unanswered < SEND_WINDOW or sender.error is not None, "send", until_s)
        if sender.error is not None:
            raise sender.error
        if transaction is not None:
            transaction.check()
        sending = Sending(message, data, sender, transaction)
        sending.on_done = on_done
        sender.put(sending)
        if wait and transaction is None:
            yield from self._await_answer(sending, until_s)
        return message

    def _await_answer(self, sending: Sending, until_s: float) -> Operation[None]:
        message_id = sending.message.message_id
        try:
            yield from self.core.until(lambda: sending.done, f"send {message_id}", until_s)
        except TimedOut as error:
            if sending.sender.withdraw(sending):
                raise TimedOut(f"{error}; the message was not sent") from None
            raise TimedOut(f"{error}; whether the broker has stored it is not known: repeat() it, under the same id") from None
        except BaseException:
            sending.sender.withdraw(sending)
            raise
        if sending.error is not None:
            raise type(sending.error)(*sending.error.args)

    def _sender(self, destination: Destination, until_s: float) -> Operation[SenderState]:
        key = (destination.kind, destination.name)
        if key not in self.senders:
            yield from self._evict(until_s)
        known = self.senders.pop(key, None)
        sender = known or SenderState(self, destination, self.core.link_name("sender"))
        self.senders[key] = sender  # the one used last is the last to go
        if known is None:
            yield from self._attach(sender, f"send to {destination.name}", until_s)
        elif not sender.decided and self.core.up:  # another task has asked for it
            yield from self.core.until(lambda: sender.decided, f"send to {destination.name}", until_s)
        return sender

    def _evict(self, until_s: float) -> Operation[None]:
        if len(self.senders) >= SENDERS_MAX:
            oldest = next((each for each in self.senders.values() if each.idle), None)
            if oldest is not None:
                yield from self._detach(oldest, until_s)

    def flush(self, until_s: float) -> Operation[None]:
        """Return when everything sent so far has its answer."""
        yield from self.core.until(lambda: not self.unanswered, "flush", until_s)

    def request(self, destination: Destination, content: Message | Body, options: SendOptions, until_s: float) -> Operation[Message]:
        """Send a message with a temporary queue to answer to, and return the answer. Raises TimedOut, ConnectionLost."""
        if self.transaction is not None:
            raise IllegalState("a request in a transaction is not sent before the commit: nobody can answer it")
        if self.answers is None or self.answers.error is not None:
            queue = TemporaryQueue("temporary")
            yield from self.temporary(queue, until_s)
            self.answers = yield from self.consumer(Subscription(queue), None, None, until_s)
        answers = self.answers
        generation = self.core.generation
        message = Message.of(content)
        message.reply_to = answers.subscription.destination
        yield from self.send(destination, message, options, until_s)
        while True:
            yield Wait(lambda: answers.available or self._ended(answers) or self.core.generation != generation, until_s)
            if self.core.generation != generation:
                raise ConnectionLost("the connection was lost while the answer was waited for, and its temporary queue with it: ask again")
            answer = yield from self.receive(answers, until_s)
            if answer is None:
                raise TimedOut(f"no answer to {message.message_id} from {destination.name} in time")
            self._accept_answers(answers)
            if answer.correlation_id in (message.message_id, message.correlation_id):
                return answer

    def _accept_answers(self, answers: ConsumerState) -> None:
        """An answer is done with when it is returned, whatever the mode."""
        for arrived in [each for each, consumer in self.unacknowledged.items() if consumer is answers]:
            del self.unacknowledged[arrived]
            arrived.link.settle(arrived.delivery_id, ACCEPTED)

    # --- destinations ------------------------------------------------------------------------------------------------------------

    def temporary(self, destination: TemporaryQueue | TemporaryTopic, until_s: float) -> Operation[None]:
        """Have the broker make and name a temporary destination."""
        self.check()
        own = self.core.own
        link = TemporaryState(own, destination, self.core.link_name(destination.kind))
        own.others.append(link)
        yield from own._attach(link, f"make a {destination.kind}", until_s)

    def delete_temporary(self, destination: TemporaryQueue | TemporaryTopic, until_s: float) -> Operation[None]:
        """Delete it, and what is in it. Raises IllegalState while it has consumers of this connection."""
        self.check()
        if any(each.subscription.destination is destination for session in self.core.sessions for each in session.consumers):
            raise IllegalState(f"{destination!r} has a consumer: close it first")
        link = self._temporary_link(destination)
        if link is None:
            raise InvalidDestination(f"{destination!r} is not one of this connection")
        yield from self.core.own._detach(link, until_s)

    def _temporary_link(self, destination: Destination) -> TemporaryState | None:
        others = self.core.own.others
        return next((each for each in others if isinstance(each, TemporaryState) and each.destination is destination), None)

    # --- consumers ---------------------------------------------------------------------------------------------------------------

    def consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, until_s: float) -> Operation[ConsumerState]:
        """A consumer, attached. ``name`` is that of its subscription. Raises InvalidDestination, InvalidSelector, Refused."""
        self.check()
        destination, has_client_id = wanted.destination, self.core.settings.client_id is not None
        if isinstance(destination, TemporaryQueue | TemporaryTopic) and self._temporary_link(destination) is None:
            raise InvalidDestination(f"{destination!r} is not one of this connection: only the one that made it consumes from it")
        if name is not None and not isinstance(destination, Topic):
            raise InvalidDestination(f"{destination!r} is no topic: only topics have subscriptions")
        if wanted.durable and not wanted.shared and not has_client_id:
            raise IllegalState("a durable subscription that is not shared belongs to a client id: connect(..., client_id=...)")
        link_name = self.core.link_name("consumer") if name is None else self._subscription_link(name, wanted)
        if prefetch is None:
            prefetch = self.core.settings.prefetch
        consumer = ConsumerState(self, wanted, link_name, prefetch)
        self.consumers.append(consumer)
        yield from self._attach(consumer, f"consume from {destination.name}", until_s)
        return consumer

    def _subscription_link(self, name: str, wanted: Subscription) -> str:
        """The link name by which brokers know a subscription: several links of one need different ones (as Qpid JMS has them)."""
        if not wanted.shared:
            return name
        suffix = ("" if self.core.settings.client_id is not None else "global") + ("" if wanted.durable else "-volatile")
        base = f"{name}|{suffix.lstrip('-')}"
        taken = {each.name for session in self.core.sessions for each in session.consumers}
        number = 1
        while f"{base}{number}" in taken:
            number += 1
        if number == 1 and wanted.durable:
            plain = base.rstrip("|")
            return plain if plain not in taken else f"{base}2"
        return f"{base}{number}"

    def unsubscribe(self, name: str, until_s: float) -> Operation[None]:
        """Delete a durable subscription. Raises InvalidDestination for one that is not there, Refused for one in use."""
        self.check()
        if any(each.name.partition("|")[0] == name for session in self.core.sessions for each in session.consumers):
            raise Refused(f"subscription {name!r} has a consumer: close it first")
        link = UnsubscribingState(self, name if self.core.settings.client_id is not None else f"{name}|global")
        self.others.append(link)
        yield from self._attach(link, f"unsubscribe {name}", until_s)
        yield from self._detach(link, until_s)

    def close_consumer(self, consumer: ConsumerState, until_s: float) -> Operation[None]:
        """Close a consumer; what of it was received and not acknowledged can still be: the link goes with the last of it."""
        if consumer.closing:
            return
        if consumer in self.unacknowledged.values():
            yield from self._suspend([consumer], until_s)
            consumer.closing = True
        else:
            yield from self._detach(consumer, until_s)

    def receive(self, consumer: ConsumerState, until_s: float) -> Operation[Message | None]:
        """The next message, None when time is up or the consumer is closed. Raises what ended the consumer."""
        self._check_consumer(consumer)
        while True:
            if not consumer.available:
                consumer.waiting = True
                consumer.top_up()
                found = yield Wait(lambda: consumer.available or consumer.closing or self._ended(consumer), until_s)
                consumer.waiting = False
                if not found and not consumer.prefetch and self.started:
                    yield from self._drain(consumer, 0, self.core.clock() + self.core.settings.timeout_s)
            if not consumer.available:
                if consumer.closing or self.closing:
                    return None
                self._check_consumer(consumer)
                return None
            message = yield from self._take(consumer, ACCEPTED)
            if message is not None:
                return message

    def receive_no_wait(self, consumer: ConsumerState, until_s: float) -> Operation[Message | None]:
        """A message if the broker has one now."""
        self._check_consumer(consumer)
        while self.started:
            if not consumer.buffer:
                yield from self._drain(consumer, consumer.prefetch or 1, until_s)
            if not consumer.available:
                break
            message = yield from self._take(consumer, ACCEPTED)
            if message is not None:
                return message
        consumer.top_up()
        return None

    def browse(self, consumer: ConsumerState, until_s: float) -> Operation[Message | None]:
        """The next message of a browser, None after the last."""
        if not consumer.buffer:
            yield from self._drain(consumer, BROWSE_AHEAD, until_s)
            self._check_consumer(consumer)
        return Message.received(decode_message(consumer.buffer.popleft().payload)) if consumer.buffer else None

    def _ended(self, consumer: ConsumerState) -> bool:
        return (consumer.error or self.error or self.core.error) is not None or self.closing

    def _check_consumer(self, consumer: ConsumerState) -> None:
        if consumer.closing:
            raise IllegalState("the consumer is closed")
        self.check()
        if consumer.error is not None:
            raise type(consumer.error)(*consumer.error.args)

    def _drain(self, consumer: ConsumerState, credit: int, until_s: float) -> Operation[None]:
        """Have the broker send what it has, up to ``credit`` messages, and give the rest of the credit back."""
        link = consumer.link
        if link is None or not consumer.attached or not max(link.credit, credit):
            return
        link.flow(max(link.credit, credit), drain=True)
        yield from self.core.until(lambda: consumer.link is not link or link.credit == 0, "drain", until_s)

    def _take(self, consumer: ConsumerState, outcome: Any) -> Operation[Message | None]:
        """Hand the oldest message over, acknowledged as the mode has it; None for one that has expired meanwhile, or is gone."""
        transaction = self.transaction
        if transaction is not None:
            yield from self._declare(transaction, self.core.clock() + self.core.settings.timeout_s)
            transaction.check()
            if not consumer.buffer:
                return None
        arrived = consumer.buffer.popleft()
        consumer.top_up()
        link, delivery_id, payload, settled = arrived
        try:
            message = Message.received(decode_message(payload))
        except MalformedMessage:
            link.settle(delivery_id, Rejected())
            raise
        if message.expiration_ms and message.expiration_ms <= now_ms():
            link.settle(delivery_id, UNDELIVERABLE)
            return None
        if settled:
            return message
        if transaction is not None:
            link.settle(delivery_id, transaction.accepted)
        elif self.mode in (Acknowledge.CLIENT, Acknowledge.INDIVIDUAL):
            self.unacknowledged[arrived] = consumer
            message._acknowledge = partial(self._acknowledge_message, arrived)
        elif outcome is None:  # of a listener, which has not seen it yet
            self.unacknowledged[arrived] = consumer
        elif self.mode is Acknowledge.DUPS_OK:
            consumer.accept_lazily(arrived)
        else:
            link.settle(delivery_id, ACCEPTED)
        return message

    def _acknowledge_message(self, arrived: Arrived) -> None:
        self.acknowledging(arrived)

    # --- listeners ---------------------------------------------------------------------------------------------------------------

    def next_for_listener(self) -> Operation[tuple[Callable[[Message], Any], Message, Arrived] | None]:
        """The next message of any consumer that has a listener; None when the context is closed. Raises what ended the connection."""

        def ready() -> ConsumerState | None:
            return next((each for each in self.consumers if each.listener is not None and each.available and not each.closing), None)

        while True:
            yield Wait(lambda: ready() is not None or self.closing or self.error is not None or self.core.error is not None, FOREVER)
            if self.closing:
                return None
            self.check()
            consumer = ready()
            if consumer is None:
                continue
            self.consumers.remove(consumer)
            self.consumers.append(consumer)  # the others have their turn first
            arrived = consumer.buffer[0]
            try:
                message = yield from self._take(consumer, None)
            except MalformedMessage:
                continue  # rejected: the broker keeps it among the dead letters
            if message is not None and consumer.listener is not None:
                self.listening = True
                return consumer.listener, message, arrived

    def listened(self, arrived: Arrived, failed: bool) -> None:
        """A listener returned, or raised: then the message comes again, where it is not for the application to acknowledge."""
        self.listening = False
        if self.mode in (Acknowledge.CLIENT, Acknowledge.INDIVIDUAL):
            return
        consumer = self.unacknowledged.pop(arrived, None)
        if consumer is None:
            return
        if failed:
            arrived.link.settle(arrived.delivery_id, FAILED)
        elif self.mode is Acknowledge.DUPS_OK:
            consumer.accept_lazily(arrived)
        else:
            arrived.link.settle(arrived.delivery_id, ACCEPTED)
        self._detach_done()

    # --- acknowledging -----------------------------------------------------------------------------------------------------------

    def acknowledge(self, arrived: Arrived | None = None) -> None:
        """Acknowledge all that was received, or with INDIVIDUAL the one given. What an earlier connection delivered comes again."""
        self.check()
        chosen = [arrived] if arrived is not None and self.mode is Acknowledge.INDIVIDUAL else list(self.unacknowledged)
        for each in chosen:
            if self.unacknowledged.pop(each, None) is not None:
                each.link.settle(each.delivery_id, ACCEPTED)
        self._detach_done()

    def recover(self, until_s: float) -> Operation[None]:
        """Have everything that was received and not acknowledged delivered again, marked."""
        self.check()
        if self.transaction is not None:
            raise IllegalState("recover() is not for transactions: roll back")
        consumers = list(self.consumers)
        yield from self._suspend(consumers, until_s)
        for each in self.unacknowledged:
            each.link.settle(each.delivery_id, FAILED)
        self.unacknowledged.clear()
        self._detach_done()
        self.engine.flush_settled()  # before new credit: the broker is to have all of them back when it delivers again
        self._resume(consumers)

    def _detach_done(self) -> None:
        """Close the links of closed consumers whose last message is acknowledged."""
        busy = set(map(id, self.unacknowledged.values()))
        for consumer in list(self.consumers):
            if consumer.closing and consumer.link is not None and id(consumer) not in busy:
                consumer.close()

    def _suspend(self, consumers: list[ConsumerState], until_s: float) -> Operation[None]:
        """No more messages come, and those that came go back unseen."""
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

    def stop(self, until_s: float) -> Operation[None]:
        """Hand over no more messages; returns when no listener has one in its hands."""
        self.check()
        self.started = False
        yield from self.core.until(lambda: not self.listening, "stop: a listener is at work", until_s)

    def start(self) -> None:
        """Hand messages over (again)."""
        self.check()
        self.started = True
        for consumer in self.consumers:
            consumer.top_up()

    # --- transactions ------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A transaction for a block. Raises IllegalState within another."""
        self.check()
        if self.in_block or (self.transaction is not None and self.transaction.id is not None):
            raise IllegalState("transactions do not nest: this context has one open; another context can have its own")
        self.in_block = True
        if self.transaction is None:
            self.transaction = Transaction()

    def end(self, until_s: float, *, failed: bool) -> Operation[None]:
        """The end of a block: commit, or roll back where it failed. Raises TransactionRolledBack, TransactionInDoubt."""
        try:
            if failed:
                yield from self.rollback(until_s)
                return
            try:
                yield from self.commit(until_s)
            except TimedOut as error:
                yield from self.rollback(self.core.clock() + self.core.settings.timeout_s)
                raise TransactionRolledBack(f"{error}; rolled back") from error
        finally:
            self.in_block = False
            self._next_transaction()

    def _next_transaction(self) -> None:
        self.transaction = Transaction() if self.in_block or self.mode is Acknowledge.TRANSACTED else None

    def commit(self, until_s: float) -> Operation[None]:
        """Commit. Raises TransactionRolledBack, TransactionInDoubt; TimedOut where nothing is decided and a rollback is possible."""
        self.check()
        transaction = self._open_transaction()
        if transaction.id is None and not transaction.lost:
            return
        yield from self.core.until(lambda: not transaction.unanswered or transaction.lost, "commit", until_s)
        if transaction.refused is not None and not transaction.lost:
            yield from self.rollback(until_s)
            raise TransactionRolledBack(f"a message of the transaction was not taken: {transaction.refused}")
        try:
            transaction.check()
            control = yield from self._discharge(transaction, until_s, fail=False)
        finally:
            if transaction.lost:
                self._next_transaction()
        self._next_transaction()
        try:
            yield from self.core.until(lambda: control.done, "commit", until_s)
        except BasculeError as error:
            raise TransactionInDoubt(f"commit without an answer: {error}") from error
        if control.lost:
            raise TransactionInDoubt("the connection was lost before the commit was answered")
        if not isinstance(control.outcome, Accepted):
            raise TransactionRolledBack(f"the broker rolled back: {_reason(control.outcome)}")

    def rollback(self, until_s: float) -> Operation[None]:
        """Undo the transaction: its sends are gone, what was received in it comes again."""
        self.check()
        transaction = self._open_transaction()
        for sender in self.senders.values():
            for sending in [each for each in sender.queue if each.transaction is transaction]:
                sender.withdraw(sending)
        if transaction.id is None or transaction.lost:
            self._next_transaction()
            return
        consumers = list(self.consumers)
        try:
            yield from self._suspend(consumers, until_s)
            control = yield from self._discharge(transaction, until_s, fail=True)
            yield from self.core.until(lambda: control.done, "rollback", until_s)
        except TransactionRolledBack:
            pass  # by the end of the connection
        except TimedOut:
            if self.coordinator is not None:
                self.coordinator.close()  # the end of its link rolls it back whenever the broker hears of it
            raise
        finally:
            self._next_transaction()
            self._resume(consumers)

    def _open_transaction(self) -> Transaction:
        if self.transaction is None:
            raise IllegalState("no transaction: connect(..., acknowledge=Acknowledge.TRANSACTED), or context.transaction()")
        return self.transaction

    def _declare(self, transaction: Transaction, until_s: float) -> Operation[None]:
        """Make the transaction known to the broker, if it is not."""
        if transaction.declaring:  # by another task
            yield from self.core.until(lambda: not transaction.declaring, "begin a transaction", until_s)
        if transaction.id is not None:
            transaction.check()
            return
        transaction.declaring = True
        try:
            while transaction.id is None:
                coordinator = yield from self._coordinator(until_s)
                control = coordinator.send(Declare())
                yield from self.core.until(partial(getattr, control, "done"), "begin a transaction", until_s)
                if isinstance(control.outcome, Declared):
                    transaction.declared(control.outcome.txn_id)
                elif not control.lost:
                    raise Refused(f"no transaction: {_reason(control.outcome)}")
        finally:
            transaction.declaring = False

    def _coordinator(self, until_s: float) -> Operation[CoordinatorState]:
        """The link that controls transactions, ready to send."""
        while True:
            current = self.coordinator
            if current is None:
                yield from self.core.until(lambda: self.begun, "begin a transaction", until_s)
                if self.coordinator is None:
                    self.coordinator = CoordinatorState(self, self.core.link_name("coordinator"))
                    self.coordinator.attach()
            elif current.usable:
                return current
            else:
                yield from self.core.until(partial(self._coordinator_settled, current), "begin a transaction", until_s)
                if current.error is not None:
                    raise current.error

    def _coordinator_settled(self, coordinator: CoordinatorState) -> bool:
        return coordinator.usable or coordinator.error is not None or self.coordinator is not coordinator

    def _discharge(self, transaction: Transaction, until_s: float, *, fail: bool) -> Operation[Control]:
        coordinator = yield from self._coordinator(until_s)
        transaction.check()
        assert transaction.id is not None
        return coordinator.send(Discharge(transaction.id, fail))

    # --- the end -----------------------------------------------------------------------------------------------------------------

    def close(self, until_s: float) -> Operation[None]:
        """Flush, roll back what is open, give back what was not acknowledged; the connection goes with its last context."""
        if self.closing:
            return
        try:
            if self.core.error is None and self.error is None:
                yield from self.flush(until_s)
        finally:
            for consumer in list(self.consumers):
                consumer.accept_lazy()
            self.closing = True
            if self.begun:
                self.engine.end()
            if self in self.core.sessions:
                self.core.sessions.remove(self)
            if not self.core.sessions:
                yield from self.core.close(until_s)


def _reason(outcome: Any) -> str:
    error = outcome.error if isinstance(outcome, Rejected) else None
    return str(error.exception()) if error is not None else type(outcome).__name__.lower()
