"""The costs of an input: processor time, measured again without garbage collection if it is high, and memory that stays after the peer has
gone."""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from bascule.core.caches import forget_peers
from bascule.testing.broker import MemoryLog
from tests.support.speed import SLOWNESS

#: Most processor time of the broker for one input, in seconds.
COST_S_MAX: Final = 0.1 * SLOWNESS
#: Most bytes that repeated inputs may leave behind: the interpreter keeps some.
LEFT_BYTES_MAX: Final = 64 << 10


def calls_of(work: Callable[[], object]) -> int:
    """Return the number of function calls, a measure of work that is the same on every machine."""
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


def processor_s(work: Callable[[], object], enough_s: float = COST_S_MAX) -> float:
    """Return the processor time of work. If it is above ``enough_s``, measure again without garbage collection, up to three times."""
    last_s = spent_s(work)
    for _ in range(3):
        if last_s < enough_s:
            break
        with quiet():
            last_s = spent_s(work)
    return last_s


def spent_s(work: Callable[[], object]) -> float:
    """Return the processor time of one run of the work."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


@contextmanager
def quiet() -> Iterator[None]:
    """Switch garbage collection off."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held_bytes() -> int:
    """Return the memory that Python holds, without the content of caches. Needs tracemalloc."""
    forget_peers()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


class Leftovers:
    """A measurement of the additional memory, besides the journal, after the last pass of some work, compared with the pass before.

    The first pass fills what is created once. Tasks and names of the last pass do not count, since the pass before made the same.
    """

    def __init__(self, journal: MemoryLog) -> None:
        self.size_bytes = 0
        self._journal = journal

    def passes(self) -> Iterator[None]:
        """Yield once for each pass of the work."""
        tracemalloc.start()
        try:
            before = 0
            for _ in range(3):
                yield
                now = held_bytes() - _size_bytes(self._journal)
                self.size_bytes, before = now - before, now
        finally:
            tracemalloc.stop()


async def left_bytes(work: Callable[[], Awaitable[None]], journal: MemoryLog) -> int:
    """Return the bytes that the work leaves behind."""
    leftovers = Leftovers(journal)
    for _ in leftovers.passes():
        await work()
    return leftovers.size_bytes


def _size_bytes(journal: MemoryLog) -> int:
    return sum(sum(map(sys.getsizeof, (record, *record))) for record in journal.records)
