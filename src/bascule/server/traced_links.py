"""Links of clients whose messages have spans. They are used only if tracing is on.

A span ``send ADDRESS`` lasts from the arrival of a message to its answer, a span ``receive QUEUE`` from a delivery to its outcome.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from bascule.amqp.events import Dispositioned, Transferred
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.broker.errors import BodyUnavailable
from bascule.broker.message import BrokerMessage
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.server.dispositions import Dispositions
from bascule.server.links import AuditedConsumerLink, ConsumerLink, ProducerLink

if TYPE_CHECKING:
    from bascule.server.client import Client
    from bascule.tracing.spans import Attributes, TraceContext


class _Begun(NamedTuple):
    """A span that has begun."""

    begun_ns: int
    parent: TraceContext
    attributes: Attributes


def _begin(body: bytes, client: Client) -> _Begun | None:
    """Begin the span of a message, if it has a trace context."""
    from bascule.tracing.spans import attributes_of, now_ns, trace_context_of

    parent = trace_context_of(body)
    if parent is None:
        return None
    attributes = attributes_of(body)
    attributes["messaging.client.id"] = client.container
    attributes["network.peer.address"] = client.peer.rpartition(":")[0]
    return _Begun(now_ns(), parent, attributes)


def _end(begun: _Begun, client: Client, operation: str, destination: str, error_type: str = "", error: str = "") -> None:
    from opentelemetry.trace import SpanKind

    if client.tracing is not None:
        client.tracing.record(
            operation, destination, SpanKind.SERVER, begun.parent, begun.attributes, begun.begun_ns, error_type=error_type, error=error
        )


class TracedProducerLink(ProducerLink):
    """A producer whose messages have spans."""

    __slots__ = ("_begun",)

    def __init__(self, client: Client, link: ReceiverLink, address: str | None, routing: Routing | None) -> None:
        super().__init__(client, link, address, routing)
        self._begun: dict[int, _Begun] = {}  # by delivery id, of messages without an answer; the credit of the link limits them

    def arrived(self, event: Transferred) -> None:
        """Note the arrival of a message."""
        begun = _begin(event.payload, self.client)
        if begun is not None:
            self._begun[event.delivery_id] = begun

    def accepted(self, token: Transferred) -> None:
        """End the span of an accepted message, and tell the client."""
        self._end(token)
        super().accepted(token)

    def refused(self, token: Transferred, error: BasculeError) -> None:
        """End the span of a refused message, and tell the client."""
        self._end(token, error)
        super().refused(token, error)

    def _end(self, token: Transferred, error: BasculeError | None = None) -> None:
        from bascule.tracing.spans import address_of

        begun = self._begun.pop(token.delivery_id, None)
        if begun is not None:
            destination = address_of(token.payload) if self.address is None else self.address
            failed = ("", "") if error is None else (type(error).__name__, str(error))
            _end(begun, self.client, "send", destination, *failed)


class TracedConsumerLink(AuditedConsumerLink):
    """A consumer whose messages have spans."""

    __slots__ = ("_begun",)

    def __init__(self, client: Client, link: SenderLink, *, settled: bool, keeps_credit: bool = False) -> None:
        super().__init__(client, link, settled=settled, keeps_credit=keeps_credit)
        self._begun: dict[int, _Begun] = {}  # by position in the journal, of messages without an outcome

    def deliver(self, message: BrokerMessage, delivery_count: int, body: bytes | None = None) -> int:
        """Begin the span of a message, and send it."""
        begun = None
        with suppress(BodyUnavailable):  # raised again by the delivery
            if body is None:
                body = self.client.engine.bodies.read(message)
            begun = _begin(body, self.client)
        credit = super().deliver(message, delivery_count, body)
        if begun is not None:
            begun.attributes["bascule.delivery_count"] = delivery_count + 1
            self._begun[message.position] = begun
            if self.settled:
                self.settled_by(message, "")
        return credit

    def settled_by(self, message: BrokerMessage, outcome: str) -> None:
        """End the span of a message with the outcome that the client has reported, "" for none."""
        begun = self._begun.pop(message.position, None)
        if begun is None:
            return
        queue = self.consumer.queue if self.consumer is not None else None
        if queue is not None and queue.subscription:
            begun.attributes["messaging.destination.subscription.name"] = queue.subscription
        if outcome:
            begun.attributes["bascule.outcome"] = outcome
        _end(begun, self.client, "receive", "" if queue is None else queue.address)


class TracedDispositions(Dispositions):
    """The dispositions of one client, which end the spans of deliveries."""

    __slots__ = ()

    def take(self, event: Dispositioned) -> None:
        """End the spans of settled deliveries, and apply the outcome."""
        if event.state is not None or event.settled:
            outcome = "" if event.state is None else type(event.state).__name__.lower()
            for link, _, (_, message) in event.deliveries:
                if isinstance(link.context, TracedConsumerLink):
                    link.context.settled_by(message, outcome)
        super().take(event)


def producer_link(client: Client, link: ReceiverLink, address: str | None, routing: Routing | None) -> ProducerLink:
    """Return the producer of a link."""
    return (ProducerLink if client.tracing is None else TracedProducerLink)(client, link, address, routing)


def consumer_link(client: Client, link: SenderLink, *, settled: bool, keeps_credit: bool) -> ConsumerLink:
    """Return the consumer of a link."""
    if client.tracing is not None:
        return TracedConsumerLink(client, link, settled=settled, keeps_credit=keeps_credit)
    kind = AuditedConsumerLink if client.audit.messages else ConsumerLink
    return kind(client, link, settled=settled, keeps_credit=keeps_credit)


def dispositions_of(client: Client) -> Dispositions:
    """Return the dispositions of a client."""
    return (Dispositions if client.tracing is None else TracedDispositions)(client)
