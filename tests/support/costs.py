"""What an input costs: processor time, judged again in quiet where it is much, and memory that stays when the peer is gone."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from bascule.core.caches import forget_peers
from bascule.testing.broker import MemoryLog
from tests.support.speed import SLOWNESS

#: Processor time of the broker for one input, in seconds.
COST_S_MAX: Final = 0.1 * SLOWNESS
#: What inputs that come once more may leave behind, in bytes: the interpreter keeps some.
LEFT_BYTES_MAX: Final = 64 << 10


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions are called: a measure of work that is the same on every machine."""
    count = 0

    def look(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held_bytes() -> int:
    """Return what Python holds, without what caches remember. Needs tracemalloc."""
    forget_peers()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def left_bytes(work: Callable[[], Awaitable[None]], journal: MemoryLog) -> int:
    """Return how much more is held, beside the journal, behind the third run of ``work`` than behind the second.

    The first run fills what is made once. Its own tasks and names are not left over: the third run makes the same again.
    """
    tracemalloc.start()
    try:
        for _ in range(2):
            await work()
        before = held_bytes() - _size_bytes(journal)
        await work()
        return held_bytes() - _size_bytes(journal) - before
    finally:
        tracemalloc.stop()


def _size_bytes(journal: MemoryLog) -> int:
    return sum(sum(map(sys.getsizeof, (record, *record))) for record in journal.records)
