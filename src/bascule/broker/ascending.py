"""Ascending lists of mids, which may be a million long.

The functions go through a list number by number and are meant for another thread than the event loop's. A set of a million numbers, or a
sort of them, would hold the interpreter, and with it the event loop, for 50 to 500 ms in one call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby, islice
from typing import Final

#: Numbers that one call sorts: about a millisecond.
SORTED_AT_ONCE: Final = 10_000


def has(ascending: Sequence[int], mid: int) -> bool:
    """Return True if an ascending list contains a mid."""
    place = bisect_left(ascending, mid)
    return place < len(ascending) and ascending[place] == mid


def in_order(mids: Iterable[int]) -> Iterator[int]:
    """Return the mids in ascending order."""
    remaining, parts = iter(mids), []
    while part := sorted(islice(remaining, SORTED_AT_ONCE)):
        parts.append(part)
    return merge(*parts)


def union(*lists: Iterable[int]) -> Iterator[int]:
    """Return the mids that occur in any of the ascending lists, ascending, each once."""
    return (mid for mid, _ in groupby(merge(*lists)))


def intersection(ascending: Iterable[int], others: Iterable[int]) -> Iterator[int]:
    """Return the mids of an ascending list that also occur in the other one."""
    return (mid for mid, found in _compared(ascending, others) if found)


def difference(ascending: Iterable[int], others: Iterable[int]) -> Iterator[int]:
    """Return the mids of an ascending list that do not occur in the other one."""
    return (mid for mid, found in _compared(ascending, others) if not found)


def _compared(ascending: Iterable[int], others: Iterable[int]) -> Iterator[tuple[int, bool]]:
    remaining = iter(others)
    other = next(remaining, None)
    for mid in ascending:
        while other is not None and other < mid:
            other = next(remaining, None)
        yield mid, mid == other
