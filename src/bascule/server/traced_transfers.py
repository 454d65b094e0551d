"""The transfers of a client whose messages have spans, and the choice among the kinds of transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bascule.amqp.events import Transferred
from bascule.broker.containment import ErrorContainment
from bascule.server.traced_links import TracedProducerLink
from bascule.server.transfers import AuditedTransfers, Transfers

if TYPE_CHECKING:
    from bascule.broker.turns import Retry
    from bascule.server.client import Client


class TracedTransfers(AuditedTransfers):
    """The transfers of one client whose messages have spans."""

    __slots__ = ()

    def take(self, event: Transferred) -> Retry | None:
        """Begin the span of a message, and handle it."""
        if isinstance(event.link.context, TracedProducerLink):
            event.link.context.arrived(event)
        return super().take(event)


def transfers_of(client: Client, errors: ErrorContainment) -> Transfers:
    """Return the transfers of a client."""
    if client.tracing is not None:
        return TracedTransfers(client, errors)
    return (AuditedTransfers if client.audit.messages else Transfers)(client, errors)
