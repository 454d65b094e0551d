"""The required content of a snapshot, from one pass over all queues and from the journal, to compare with snapshots of many turns."""

from __future__ import annotations

from typing import Any

from bascule.broker.engine import Engine
from bascule.broker.snapshot import Snapshot
from bascule.testing.broker import BrokerInMemory


class ComparingBroker(BrokerInMemory):
    """A broker that compares each snapshot with the state at its moment before it is announced."""

    def announce(self, taken: Snapshot) -> None:
        """Compare, and announce."""
        assert taken.sequence == self.engine.journaling.confirmed_sequence
        expected = state_at_once(self.engine)
        assert described(taken, self.engine) == expected
        journaled = self.replay(None, end=taken.next_offset).engine.addresses.queues
        for content, mids in zip(taken.queues, taken.mids, strict=True):
            assert list(mids) == sorted(message.mid for message in journaled[content["id"]].held), content["name"]
        super().announce(taken)


def state_at_once(engine: Engine) -> dict[str, Any]:
    """Return the state between two records."""
    journaling = engine.journaling
    queues = {
        queue: [message.mid for message in queue.held] for queue in engine.addresses.queues.values() if queue.durable and queue.confirmed
    }
    for queue, mids in journaling.unconfirmed_acks():
        if queue in queues:
            queues[queue] += mids
    unconfirmed = set(journaling.unconfirmed_digests())
    return {
        "queues": [{**queue.describe(), "reserved": queue.reserved_mid, "unused_since_ms": queue.unused_since_ms} for queue in queues],
        "mids": [sorted(mids) for mids in queues.values()],
        "counts": [
            sorted((message.mid, count) for message in queue.held if (count := queue.counts.get(message.position))) for queue in queues
        ],
        "ids": {
            address: window.digests if window.sequence <= journaling.confirmed_sequence else window.digests - unconfirmed
            for address, window in engine.windows.by_address.items()
            if window.digests
        },
        "branches": engine.branches.entries(engine.clock())(),
        "ingress": engine.confirmed_ingress,
    }


def described(taken: Snapshot, engine: Engine) -> dict[str, Any]:
    """Return the same of a snapshot, without ids that have expired since the snapshot was begun."""
    windows, now_ms = engine.windows.by_address, engine.clock()
    ids: dict[str, set[bytes]] = {}
    for address, remembered in taken.windows.items():
        window = windows[address]
        ids[address] = {digest for digest, time_ms in remembered.ids() if digest in window or time_ms >= now_ms - window.period_ms}
    return {
        "queues": taken.queues,
        "mids": [list(mids) for mids in taken.mids],
        "counts": taken.counts,
        "ids": ids,
        "branches": taken.branches,
        "ingress": taken.ingress,
    }
