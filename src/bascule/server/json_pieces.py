"""JSON of long answers, made in pieces on the event loop: the answer about 10,000 queues has megabytes.

The entries of a list are described and encoded right before they are sent, so an answer of any length needs memory for one piece only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from bascule.server.in_turns import ENTRIES_PER_TURN

T = TypeVar("T")

JSON_TYPE: Final = "application/json"
#: Bytes of an answer that are made before they are sent.
JSON_PIECE_BYTES: Final = 64 << 10
#: Entries that one call encodes, so that entries with long names make no large piece.
ENCODED_AT_ONCE: Final = 100

#: As starlette's JSONResponse. ``encode`` is one call in C: it takes a third of the time of ``iterencode``.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class LongList(Generic[T]):
    """A list in an answer, the entries of which are described when they are needed, as they are then.

    ``cost``: the time to describe an entry, as a multiple of the time for a queue.
    """

    def __init__(self, describe: Callable[[T], Any], entries: Iterable[T], cost: int = 1) -> None:
        self.describe = describe
        self.entries = list(entries)
        self.cost = cost

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:
        return map(self.describe, self.entries)


async def json_pieces(content: object) -> AsyncGenerator[bytes, None]:
    """Yield the JSON of an answer in pieces, over as many turns of the event loop as needed.

    A list is divided, and an object the values of which are lists. Raises ValueError if something in it has no JSON.
    """
    texts: list[str] = []
    size = cost = 0
    for text, text_cost in _texts(content):
        texts.append(text)
        size += len(text)
        cost += text_cost
        if (full := size >= JSON_PIECE_BYTES) or cost >= ENTRIES_PER_TURN:
            if full:
                yield "".join(texts).encode()
                texts, size = [], 0
            await asyncio.sleep(0)
            cost = 0
    if texts:
        yield "".join(texts).encode()


def _texts(content: object) -> Iterator[tuple[str, int]]:
    """Yield parts of the JSON, each with its cost."""
    if not isinstance(content, dict):
        yield from _value(content)
        return
    before = "{"
    for name, value in content.items():
        yield f"{before}{_ENCODER.encode(name)}:", 0
        yield from _value(value)
        before = ","
    yield "}" if content else "{}", 0


def _value(value: object) -> Iterator[tuple[str, int]]:
    if isinstance(value, LongList):
        described, cost = iter(value), value.cost
    elif isinstance(value, list | tuple):
        described, cost = iter(value), 1
    else:
        yield _ENCODER.encode(value), 1
        return
    before = "["
    at_once = max(1, ENCODED_AT_ONCE // cost)
    while part := list(islice(described, at_once)):
        yield before + _ENCODER.encode(part)[1:-1], cost * len(part)
        before = ","
    yield "]" if before == "," else "[]", 0
