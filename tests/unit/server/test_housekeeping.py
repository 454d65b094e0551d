"""A round of housekeeping while Kafka is slow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from bascule.server.housekeeping import Housekeeping
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes


class Snapshots:
    """The snapshots topic, as far as a round asks for it."""

    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}

    def write(self, name: str, data: bytes) -> None:
        self.written[name] = data

    def delete_older(self, name: str) -> None:
        self.written = {name: self.written[name]}


def housekeeping_of(broker: BrokerInMemory, snapshots: Snapshots) -> Housekeeping:
    place: Any = SimpleNamespace(kafka={}, snapshots_topic="snapshots", store_topic="store", append_timeout_s=0.01)
    store: Any = SimpleNamespace(mids_now=set)
    found: Any = Housekeeping(place, broker.engine, broker.offsets, store, lambda: True)
    found._snapshots = snapshots
    return found


def test_an_announcement_that_is_stored_too_late_disturbs_nobody() -> None:
    async def late() -> None:
        broker, sender, snapshots = BrokerInMemory(), Sender(), Snapshots()
        housekeeping = housekeeping_of(broker, snapshots)
        await housekeeping.round()  # its announcement is not stored in time
        assert len(snapshots.written) == 1
        broker.send("q", message_bytes("x"), sender, "x")
        broker.settle()
        assert sender.accepted_tokens == ["x"]
        assert broker.engine.addresses.anycast["q"].waiting_count == 1

    asyncio.run(late())
