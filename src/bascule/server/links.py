"""AMQP links bound to the broker engine, where AMQP terms become JMS terms.

docs/reference/amqp.md describes how Qpid JMS uses terminus capabilities, link names and filters.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bascule.amqp.composite import Composite
from bascule.amqp.errors import INVALID_FIELD, AmqpError, amqp_error
from bascule.amqp.events import Transferred
from bascule.amqp.link import SERIAL_HALF, Link, ReceiverLink, SenderLink
from bascule.amqp.performatives import ACCEPTED, UINT_MAX, Error, Rejected, TransactionalState
from bascule.broker.containment import ErrorKind
from bascule.broker.delivery import DELIVERY_STEPS
from bascule.broker.errors import BodyUnavailable, RequestFailed
from bascule.broker.matching import EVALUATION_STEPS
from bascule.broker.message import BrokerMessage
from bascule.broker.order import FRONT, place_of
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.broker.turns import Allowance, Work
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.jms.errors import MalformedMessage
from bascule.jms.sections import head_of, header_bytes, message_id_of
from bascule.jms.selector import Selector

if TYPE_CHECKING:
    from bascule.amqp.outgoing import Buffer
    from bascule.server.client import Client

#: Messages that a producer may have in flight: enough to hide a round trip at full speed.
PRODUCER_CREDIT = 1000
#: Waiting messages of a queue with consumers above which its producers get credit late, since they would otherwise leave the consumers no
#: processor time.
OUTRUN_MESSAGES = 4 * PRODUCER_CREDIT
#: Delay of such credit. A producer still sends half its credit in that time, so consumers that sleep do not stop it.
YIELD_S = 0.1
#: A producer's credit is topped up at the latest when half is used: one flow frame for this many messages.
PRODUCER_CREDIT_LOW = PRODUCER_CREDIT // 2
#: Bytes that the consumers of a client may get before they are written. After that, they get no more until the socket has taken them.
WRITE_BUFFER_BYTES = 1 << 20
#: Steps of a browser in one turn: they take half a millisecond.
BROWSED_STEPS = 500


class ProducerLink:
    """A client's producer; the broker's :class:`~bascule.broker.ports.SendPort`. The token of a message is the event of its arrival.

    If ``address`` is None, each message names its own in ``to``.
    """

    __slots__ = ("_accepted_in", "_allowed_to", "_counted", "_granted", "_waiting", "_yielding", "address", "client", "link", "routing")

    def __init__(self, client: Client, link: ReceiverLink, address: str | None, routing: Routing | None) -> None:
        self.client = client
        self.link = link
        self.address = address
        self.routing = routing
        self._counted = False  # it is counted among the producers that share credit
        self._granted = 0  # the last credit granted
        self._allowed_to = 0  # the link's delivery count once it has used what it took of the user's allowance
        self._waiting = False  # for room in a full queue, or in memory, or for the allowance of the user
        self._yielding = False  # credit comes later, so that consumers get a share of the broker
        self._accepted_in = TransactionalState(b"", ACCEPTED)

    def accepted(self, token: Transferred) -> None:
        """Tell the client that the message is accepted, with the outcome in its transaction if it has one."""
        if token.settled:
            return
        outcome: Composite = ACCEPTED
        if token.txn_id is not None:
            if self._accepted_in.txn_id != token.txn_id:
                self._accepted_in = TransactionalState(token.txn_id, ACCEPTED)  # shared: the engine gathers equal answers
            outcome = self._accepted_in
        if self.link.session.settle_incoming(token.delivery_id, outcome):
            self.client.touch()  # once for all answers until they are written

    def refused(self, token: Transferred, error: BasculeError) -> None:
        """Tell the client why the message is refused. If the client would not see the refusal, close the link."""
        told = amqp_error(error)
        if token.settled:
            self.link.detach(told)
        else:
            outcome = Rejected(Error(told.condition, told.description))
            self.link.settle(token.delivery_id, outcome if token.txn_id is None else TransactionalState(token.txn_id, outcome))
        self.client.touch()

    def top_up(self) -> None:
        """Give credit when half is used; later if consumers cannot keep up.

        The memory that a connection can use is limited in bytes, where they are read.
        """
        if self.link.credit > self._granted // 2 or self._yielding or self._waiting:
            return
        if self._outruns_consumers():
            self._yielding = True
            asyncio.get_running_loop().call_later(YIELD_S, self._grant)
        else:
            self._grant()

    def _outruns_consumers(self) -> bool:
        queue = self.client.engine.addresses.anycast.get(self.address or "")
        return queue is not None and bool(queue.consumers) and queue.ready.count > OUTRUN_MESSAGES

    def _grant(self) -> None:
        self._yielding = False
        if self.link.context is not self:
            return
        engine = self.client.engine
        memory = engine.memory
        if memory.blocked and self.address != MANAGEMENT_ADDRESS:  # requests to the management node end transactions, which makes room
            self._waiting = True
            memory.when_free(self, self._room)
            return
        credit = memory.credit(PRODUCER_CREDIT)
        if self.address is not None and self.routing is not None:
            credit = engine.share_of_room(self.address, self.routing, credit)
            if not credit and not self.link.credit:
                self._waiting = True
                engine.when_room(self.address, self.routing, self, self._room)
        if credit > self.link.credit:
            credit = self._allowed(credit)
        if credit > self.link.credit:
            self._granted = credit
            self.link.flow(credit)
            self.client.touch()
            self.client.send_output()

    def _allowed(self, credit: int) -> int:
        """Return the part of ``credit`` that the user's allowance permits. If it permits no more, wait for the next part."""
        if self.address == MANAGEMENT_ADDRESS:
            return credit
        sending = self.client.sending
        more = sending.take(credit - self.link.credit)
        if not more:
            self._waiting = True
            sending.when_allowed(self, self._room)
        self._allowed_to += more
        return self.link.credit + more

    def _room(self) -> None:
        """Resume after a full queue, or memory, has room again, or the user may send again."""
        self._waiting = False
        self._grant()

    def opened(self) -> None:
        """Let the attached link take part in the credit of all producers."""
        self._counted = True
        self._allowed_to = self.link.delivery_count
        self.client.engine.memory.producers += 1
        self.top_up()

    def closed(self) -> None:
        """Release the link."""
        memory = self.client.engine.memory
        memory.producers -= self._counted
        self._counted = False
        # The link has lost its credit with its end, but not its delivery count.
        unused = (self._allowed_to - self.link.delivery_count) & UINT_MAX
        self.client.sending.put_back(unused if unused < SERIAL_HALF else 0)
        if self._waiting:
            self.client.sending.forget(self)
            memory.forget(self)
            if self.address is not None and self.routing is not None:
                self.client.engine.forget_waiting(self.address, self.routing, self)


class ConsumerLink:
    """A client's consumer; the broker's :class:`~bascule.broker.ports.ConsumerPort`."""

    __slots__ = ("_keeps_credit", "_kept", "client", "consumer", "gave_back", "link", "on_close", "selective", "settled")

    def __init__(self, client: Client, link: SenderLink, *, settled: bool, keeps_credit: bool = False) -> None:
        self.client = client
        self.link = link
        self.settled = settled
        self._keeps_credit = keeps_credit
        self._kept = 0  # credit that is kept back, see bascule.server.connection_reset
        #: If no credit is left: whether the client has returned it. Messages did not use it up, and the client has received none since.
        self.gave_back = False
        self.consumer: QueueConsumer | None = None
        self.on_close: BrokerQueue | None = None  # a queue that is deleted with its last consumer
        #: The client has settled a message before an older one: it acknowledges messages individually, and its application may be working
        #: on older ones.
        self.selective = False

    @property
    def credit(self) -> int:
        """Return the number of messages that may be sent now: none while output for the client is unwritten."""
        return 0 if self.client.full else self.link.credit - self._kept

    @property
    def has_credit(self) -> bool:
        """Return whether the client accepts another message."""
        return self.link.credit + self.link.withheld > 0

    def granted(self) -> None:
        """Take over the client's credit: the broker may keep back the last of several. A drain uses all credit."""
        credit, drain = self.link.credit, self.link.drain
        self._kept = int(self._keeps_credit and not drain and credit > 1 - self._kept)
        self.gave_back = bool(self._kept) or drain

    def settling(self, consumer: QueueConsumer, message: BrokerMessage) -> None:
        """Record that the client settles this message, and possibly later ones."""
        if next(iter(consumer.unacked), message.position) != message.position:
            self.selective = True

    def taken(self) -> None:
        """Record that the application has received a message: an earlier drain was not part of a rollback."""
        self.gave_back = bool(self._kept)

    def spend_all(self) -> None:
        """Keep no credit."""
        self._keeps_credit = False
        if self._kept:
            self._kept = 0
            self.client.wake(self.link)

    def deliver(self, message: BrokerMessage, delivery_count: int, body: bytes | None = None) -> int:
        """Send a message with its current header. Return the credit that is left. ``body`` is the body if the caller has read it."""
        client, link = self.client, self.link
        engine = client.engine
        if body is None:
            body = message.body
            if body is None:
                body = engine.bodies.read(message)
        parts: tuple[Buffer, ...] = (body,)
        if delivery_count:
            with suppress(MalformedMessage):  # a message of an earlier version is sent unchanged
                (durable, _, ttl_ms, *_), body_start = head_of(body)
                header = header_bytes(durable, message.priority, ttl_ms, False, delivery_count)
                parts = (header, memoryview(body)[body_start:])  # a copy of 64 MiB takes 50 ms
        link.send(parts, (self.consumer, message), self.settled)
        if self.settled and self.consumer is not None:
            engine.acknowledge(self.consumer, message)
        if not client.given_bytes:  # as Client.given does; a call costs more
            client.touch()
        client.given_bytes += message.size_bytes
        if client.given_bytes > WRITE_BUFFER_BYTES:
            client.full = True
        return 0 if client.full else link.credit - self._kept

    def fail_oldest(self) -> None:
        """Count a failed delivery of the oldest message that a dead client held, on which the client most likely worked.

        Without this rule a message that kills its consumers would never be dead-lettered. If all messages counted, prefetched ones would
        be dead-lettered too.
        """
        consumer = self.consumer
        if consumer is not None and consumer.unacked:
            oldest = min(consumer.unacked)
            self.client.engine.give_back(consumer, consumer.unacked[oldest], failed=True)

    def ended(self, error: BasculeError) -> None:
        """End the link because its queue was deleted."""
        self.link.detach(AmqpError(error.condition, str(error)))
        self.client.touch()

    def dispatched(self) -> None:
        """Answer a drain when no more messages are available now, also if its credit is used up."""
        if self.link.drain and not self.link.withheld and not self.client.full:
            self.link.drained()
            self.client.touch()


class AuditedConsumerLink(ConsumerLink):
    """A consumer whose messages are audited, if the log of audits has messages."""

    __slots__ = ()

    def deliver(self, message: BrokerMessage, delivery_count: int, body: bytes | None = None) -> int:
        """Record a message, and send it."""
        client, consumer = self.client, self.consumer
        if not client.audit.messages:
            return super().deliver(message, delivery_count, body)
        if body is None:
            body = client.engine.bodies.read(message)  # once: it may be in the spill files
        on = consumer.queue.name if consumer is not None else ""
        client.audit.record(
            "receive", on, who=client.user, peer=client.peer, bytes=message.size_bytes, redelivered=delivery_count > 0,
            message_id=message_id_of(body),
        )  # fmt: skip
        return super().deliver(message, delivery_count, body)


class BrowserLink:
    """A queue browser: one pass over the waiting messages in order. It removes none, and does not show later messages.

    A long search continues in the next turns of the event loop; see bascule.broker.turns.
    """

    __slots__ = ("_ahead", "_chars", "_end", "_place", "_pumping", "_selector", "client", "link", "queue")

    def __init__(self, client: Client, link: SenderLink, queue: BrokerQueue, selector: Selector | None = None) -> None:
        """Begin at the front of a queue. Raises ResourceLimit if there is no room for the selector."""
        self.client = client
        self.link = link
        self.queue = queue
        self._selector = selector
        selectors = client.engine.memory.selectors
        self._chars = 0 if selector is None else selectors.check(selector.text, client.user)
        selectors.add(self._chars, client.user)
        look_steps = 1 if selector is None else EVALUATION_STEPS + selector.steps
        self._ahead = max(1, BROWSED_STEPS // (look_steps + DELIVERY_STEPS))
        self._end = client.engine.next_position
        self._place = FRONT
        self._pumping = False

    def closed(self) -> None:
        """Release the memory of the selector."""
        self.client.engine.memory.selectors.add(-self._chars, self.client.user)
        self._chars, self._selector = 0, None

    def pump(self) -> None:
        """Send what credit and connection allow."""
        if not self._pumping:
            self._pumping = True
            self.client.engine.turns.begin(self._pumped_or_ended())

    def _pumped_or_ended(self) -> Work:
        """Send messages in turns. An error ends this link; uncaught it would end the epoch."""
        try:
            yield from self._pumped()
        except Exception as error:
            self.client.engine.journaling.errors.contain(ErrorKind.LINK, error, queue=self.queue.name)
            if self.link.context is self:
                failed = RequestFailed(f"the broker failed to browse {self.queue.name!r}; see the broker's log")
                self.link.detach(AmqpError(failed.condition, str(failed)))
                self.client.touch()

    def _pumped(self) -> Work:
        client, link = self.client, self.link
        while link.context is self and link.credit > 0 and not client.full and not self.queue.deleted:
            ahead = self.queue.after(self._place, self._ahead)
            if not ahead:
                break
            yield sum(map(self._show, ahead))
        self._pumping = False
        if link.context is self and not link.withheld and not client.full:
            link.drained()
        client.touch()

    def _show(self, message: BrokerMessage) -> int:
        """Send a message, unless the client accepts no more. Return the steps."""
        client, link, selector = self.client, self.link, self._selector
        if link.credit <= 0 or client.full:
            return 0
        engine = client.engine
        self._place = place_of(message)
        if message.position >= self._end or (message.expiry_ms and message.expiry_ms <= engine.clock()):
            return 1
        steps = Allowance(0)
        if selector is not None and not engine.matches(selector, message, steps):
            return -steps.left
        try:
            body = engine.bodies.read(message)
        except BodyUnavailable as error:
            engine.journaling.errors.contain(ErrorKind.BODY, error, mid=message.mid)
            return 1 - steps.left
        link.send(body, context=None, settled=True)
        client.given(message.size_bytes)
        return DELIVERY_STEPS + engine.bodies.read_steps(message) - steps.left


def selector_of(link: Link) -> str:
    """Return the JMS selector of a consumer's source, "" if none. Raises AmqpError for a selector that is not a string."""
    value = _filter(link, ("apache.org:selector-filter:string", 0x0000468C00000004))
    if value is not None and not isinstance(value, str):
        raise AmqpError(INVALID_FIELD, f"a selector must be a string, not {type(value).__name__}")
    return value or ""


def no_local_of(link: Link) -> bool:
    """Return whether a consumer excludes messages of its own connection."""
    return _filter(link, ("apache.org:no-local-filter:list", 0x0000468C00000003)) is not None


def _filter(link: Link, descriptors: tuple[str, int]) -> Any:
    source = link.source
    for described in (source.filter or {}).values() if source is not None else ():
        if getattr(described, "descriptor", None) in descriptors:
            return described.value
    return None
