"""Objects of a broker process that outlive an epoch, or the event loop."""

from __future__ import annotations

import asyncio

from bascule.config import Settings
from bascule.server.life import BrokerLife
from bascule.server.node import Node


def test_change_of_an_election_that_outlives_the_loop_is_ignored() -> None:
    async def live() -> BrokerLife:
        return BrokerLife(Node(Settings()), lambda *_: None, lambda *_: None)

    life, told = asyncio.run(live()), list[bool]()
    life._on_loop(told.append, False)
    assert told == []
