"""The result of loading the journal, in a form in which two loads can be compared."""

from __future__ import annotations

from typing import Any

from bascule.broker.loading import Loader


def state_of(loader: Loader) -> dict[str, Any]:
    """Return the result of a load, without the positions in memory."""
    queues = {
        queue.id: [
            queue.describe(),
            queue.reserved_mid,
            *((message.mid, message.body, queue.delivery_count(message)) for message in queue.ready),
            sorted((message.mid, message.body, queue.delayed.due_ms(message)) for message in queue.delayed),
        ]
        for queue in loader.engine.addresses.queues.values()
    }
    prepared = {
        xid: [branch.entry, sorted((queue.id, message.mid, queue.delivery_count(message)) for queue, message in branch.acks)]
        for xid, branch in loader.engine.branches.prepared.items()
    }
    return {
        "sequence": loader.fence.sequence, "ingress": loader.engine.ingress_positions, "queues": queues, "prepared": prepared,
        "ended": loader.engine.branches.ended,
    }  # fmt: skip


def digests_of(loader: Loader) -> set[tuple[str, bytes]]:
    """Return what would be recognised as a repetition."""
    return {(address, digest) for address, window in loader.engine.windows.by_address.items() for digest in window.digests}
