"""Long work of the admin server, divided: over turns of the event loop, or beside it in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, TypeVar

from bascule.threads.background import in_background

T = TypeVar("T")
S = TypeVar("S")

#: Queues, consumers or branches that one turn of the event loop describes. That takes about 2 ms.
ENTRIES_PER_TURN: Final = 500


async def in_turns(describe: Callable[[T], S], entries: Iterable[T], per_turn: int = ENTRIES_PER_TURN) -> list[S]:
    """Describe the current entries over as many turns of the event loop as needed."""
    remaining = iter(list(entries))
    described = [describe(entry) for entry in islice(remaining, per_turn)]
    while piece := list(islice(remaining, per_turn)):
        await asyncio.sleep(0)
        described += map(describe, piece)
    return described


async def beside(make: Callable[[], T]) -> T:
    """Return ``make()`` from another thread: the text about 10,000 queues takes 100 ms."""
    return await asyncio.wrap_future(in_background(make, "admin"))
