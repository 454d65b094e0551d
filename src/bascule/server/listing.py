"""Parts of long lists: the server searches, sorts and cuts a list, so that a console with 10,000 queues stays quick."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from bascule.core.errors import InvalidInput
from bascule.server.admin_arguments import number_in
from bascule.server.in_turns import ENTRIES_PER_TURN, beside, in_turns

T = TypeVar("T")

#: Default and maximum number of entries of a part: more do not fit on a screen.
PART_ENTRIES: Final = 50
PART_ENTRIES_MAX: Final = 500
#: Maximum number of characters of a search, since each entry is compared with it.
SEARCH_MAX: Final = 200
#: Entries that one call sorts.
SORTED_AT_ONCE: Final = 1_000
#: Maximum offset of a part: no broker has more entries.
PART_OFFSET_MAX: Final = 999_999_999


def number_of(parameters: Mapping[str, str], name: str, default: int, lowest: int, highest: int) -> int:
    """Return a number in the parameters of a request. Raises InvalidInput."""
    return number_in(name, parameters.get(name, str(default)), lowest, highest)


def check_known(parameters: Mapping[str, str], known: Iterable[str]) -> None:
    """Check that no parameter is unknown. Raises InvalidInput."""
    if unknown := [name for name in parameters if name not in known]:
        names = ", ".join(known)
        raise InvalidInput(f"unknown parameter {unknown[0]!r:.60}; {f'known are {names}' if names else 'the request takes none'}")


class ListColumns(NamedTuple):
    """The columns by which a list can be sorted, the first one by default, and those in which a search looks.

    ``attributes`` are attributes of an entry that order entries as a column does: a list with them describes only the entries of the part.
    """

    sortable: tuple[str, ...]
    searched: tuple[str, ...]
    attributes: Mapping[str, str] = MappingProxyType({})


class PartRequest(NamedTuple):
    """Which part of a list is wanted."""

    search: str
    sort: str
    descending: bool
    offset: int
    limit: int

    @classmethod
    def of(cls, parameters: Mapping[str, str], columns: ListColumns) -> PartRequest:
        """Return what the parameters of a request ask for. Raises InvalidInput."""
        check_known(parameters, ("search", "sort", "order", "offset", "limit"))
        search, sort = parameters.get("search", ""), parameters.get("sort", columns.sortable[0])
        order = parameters.get("order", "ascending")
        if len(search) > SEARCH_MAX:
            raise InvalidInput(f"search has {len(search)} characters; at most {SEARCH_MAX} are allowed")
        if sort not in columns.sortable:
            raise InvalidInput(f"sort {sort!r:.60} must be one of {', '.join(columns.sortable)}")
        if order not in ("ascending", "descending"):
            raise InvalidInput(f"order {order!r:.60} must be ascending or descending")
        offset = number_of(parameters, "offset", 0, 0, PART_OFFSET_MAX)
        limit = number_of(parameters, "limit", PART_ENTRIES, 1, PART_ENTRIES_MAX)
        return cls(search.casefold(), sort, order == "descending", offset, limit)


async def part_of(
    describe: Callable[[T], Mapping[str, Any]], entries: Iterable[T], request: PartRequest, columns: ListColumns,
    per_turn: int = ENTRIES_PER_TURN,
) -> dict[str, Any]:  # fmt: skip
    """Return the wanted part of a list, the number of entries that the search finds, and the number of all entries."""
    listed, compared = list(entries), tuple(dict.fromkeys((request.sort, *columns.searched)))
    if len(compared) > 1 and all(name in columns.attributes for name in compared):
        read = attrgetter(*(columns.attributes[name] for name in compared))
        keys: Mapping[str, Any] = {name: place for place, name in enumerate(compared)}
        chosen, found = await beside(partial(_cut, await in_turns(read, listed, per_turn), request, columns, keys))
        part = await in_turns(describe, [listed[place] for place in chosen], per_turn)
    else:
        rows = await in_turns(describe, listed, per_turn)
        chosen, found = await beside(partial(_cut, rows, request, columns, {name: name for name in compared}))
        part = [rows[place] for place in chosen]
    return {"entries": part, "found": found, "total": len(listed)}


def _cut(rows: Sequence[Any], request: PartRequest, columns: ListColumns, keys: Mapping[str, Any]) -> tuple[list[int], int]:
    """Return the places of the wanted rows, and the number of those that the search finds. ``keys`` are those of columns in a row."""
    places: Sequence[int] = range(len(rows))
    if request.search:
        searched = [keys[column] for column in columns.searched]
        places = [place for place in places if any(request.search in str(rows[place][key]).casefold() for key in searched)]
    sort, end = keys[request.sort], request.offset + request.limit

    def key(place: int) -> Any:
        return rows[place][sort]

    # Not ``sorted`` of all, which holds the interpreter, and with it the event loop, until all is sorted. So does a large heap.
    if end <= SORTED_AT_ONCE:
        pick = heapq.nlargest if request.descending else heapq.nsmallest
        return pick(end, places, key=key)[request.offset :], len(places)
    runs = [
        sorted(places[begin : begin + SORTED_AT_ONCE], key=key, reverse=request.descending)
        for begin in range(0, len(places), SORTED_AT_ONCE)
    ]
    return list(islice(heapq.merge(*runs, key=key, reverse=request.descending), request.offset, end)), len(places)
