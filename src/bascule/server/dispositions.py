"""The outcomes that a client reports for its deliveries: the AMQP side."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bascule.amqp.events import Dispositioned
from bascule.amqp.link import Link
from bascule.amqp.performatives import Accepted
from bascule.amqp.session import Session
from bascule.server.links import ConsumerLink
from bascule.server.outcomes import OUTCOMES, Settle, accept, accept_in, bare_outcome, return_failed, returns_messages

if TYPE_CHECKING:
    from bascule.broker.returns import RangeReturn
    from bascule.server.client import Client


class Dispositions:
    """The dispositions of one client. A wide range arrives in pieces, and its messages return to their queues together."""

    __slots__ = ("_client", "_range")

    def __init__(self, client: Client) -> None:
        self._client = client
        self._range: RangeReturn | None = None  # a range with more pieces to follow

    def take(self, event: Dispositioned) -> None:
        """Apply the client's outcome to a range of deliveries, or to a piece of it."""
        state = event.state
        if state is None and not event.settled:
            return
        engine = self._client.engine
        if event.deliveries:
            link, _, (consumer, message) = event.deliveries[0]
            if isinstance(link.context, ConsumerLink):
                link.context.settling(consumer, message)
        if event.lost:
            self._acknowledged_too_late(event)
        settle = OUTCOMES.get(type(state), return_failed) if event.txn_id is None else self._settle_in(event.txn_id, event)
        if event.more and self._range is None and returns_messages(settle, state):
            self._range = engine.return_range()
        if settle is accept and event.settled:  # the usual case
            acknowledge = engine.acknowledge
            for _, _, (consumer, message) in event.deliveries:
                acknowledge(consumer, message)
            return
        answer = None if event.settled else bare_outcome(state)
        for link, delivery_id, (consumer, message) in event.deliveries:
            if self._range is not None:
                self._range.hold(consumer.queue)
            settle(engine, consumer, message, state)
            if not event.settled:
                engine.journaling.tell(self._settled, event.session, link, delivery_id, answer)
        if self._range is not None and not event.more:
            self.end_range()

    def end_range(self) -> None:
        """End a range after its last piece, or if no more pieces will follow: its queues deliver again."""
        if self._range is not None:
            self._range.end()
            self._range = None

    def _acknowledged_too_late(self, event: Dispositioned) -> None:
        transaction = None if event.txn_id is None else self._client.transactions.held.get(event.txn_id)
        if transaction is not None and isinstance(event.state, Accepted):
            self._client.engine.acknowledgement_lost(transaction)

    def _settle_in(self, txn_id: bytes, event: Dispositioned) -> Settle:
        client = self._client
        transaction = client.transactions.held.get(txn_id)
        if transaction is None:
            return return_failed
        if not isinstance(event.state, Accepted):
            return OUTCOMES.get(type(event.state), return_failed)
        if client.first_transactions:
            for consumer in {link.context for link, _, _ in event.deliveries if link.context is not None}:
                consumer.taken()
        return partial(accept_in, transaction)

    def _settled(self, session: Session, link: Link, delivery_id: int, state: Any) -> None:
        if link in self._client.links:
            session.settle_outgoing(delivery_id, state)
            self._client.touch()
