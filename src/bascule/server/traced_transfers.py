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


class TracedTransfers(Transfers):
    """The transfers of one client whose messages have spans."""

    __slots__ = ()

    def take(self, event: Transferred) -> Retry | None:
        """Begin the span of a message, and handle it."""
        if isinstance(event.link.context, TracedProducerLink):
            event.link.context.arrived(event)
        return super().take(event)


class TracedAuditedTransfers(TracedTransfers, AuditedTransfers):
    """The transfers of one client whose messages have spans and are audited."""

    __slots__ = ()


def transfers_of(client: Client, errors: ErrorContainment) -> Transfers:
    """Return the transfers of a client."""
    kinds: tuple[type[Transfers], type[Transfers]] = (Transfers, AuditedTransfers)
    if client.tracing is not None:
        kinds = (TracedTransfers, TracedAuditedTransfers)
    return kinds[bool(client.audit.messages)](client, errors)
