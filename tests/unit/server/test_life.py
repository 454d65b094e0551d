"""Objects of a broker process that outlive an epoch, or the event loop."""

from __future__ import annotations

import asyncio
import gc
import weakref

from bascule.config import Settings
from bascule.server.life import BrokerLife
from bascule.server.node import Node, free_what_ended


def test_change_of_an_election_that_outlives_the_loop_is_ignored() -> None:
    async def live() -> BrokerLife:
        return BrokerLife(Node(Settings()), lambda *_: None, lambda *_: None)

    life, outcomes = asyncio.run(live()), list[bool]()
    life._on_loop(outcomes.append, False)
    assert outcomes == []


class _Ended:
    def __init__(self) -> None:
        self.itself = self


def test_objects_of_an_ended_epoch_are_freed() -> None:
    ended = _Ended()
    found = weakref.ref(ended)
    gc.freeze()
    del ended
    gc.collect()
    assert found() is not None
    free_what_ended()
    assert found() is None
