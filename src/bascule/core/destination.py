"""Addresses, routing types and address patterns (``.`` separates words, ``*`` is one word, ``#`` any number)."""

from __future__ import annotations

import enum
import re

from bascule.core.caches import peer_cache

#: An address stands in every record of a message, and its length there in two bytes; nobody types one as long as this.
ADDRESS_MAX = 1000


class Routing(enum.IntEnum):
    """How an address hands a message on: to one of its queues, or to every subscription."""

    ANYCAST = 0  # a JMS queue
    MULTICAST = 1  # a JMS topic


@peer_cache(entries=1024, entry_bytes=16_384)
def _compiled(pattern: str) -> re.Pattern[str]:
    out: list[str] = []
    for position, word in enumerate(pattern.split(".")):
        dot = r"\." if position else ""
        if word == "#":
            # "a.#" matches "a" itself; a leading "#" matches whatever stands before the next word.
            out.append(r"(?:\.[^.]+)*" if position else r"(?:[^.]+(?:\.[^.]+)*)?")
        elif word == "*":
            out.append(dot + r"[^.]+")
        else:
            out.append(dot + re.escape(word))
    return re.compile("".join(out))


def address_matches(pattern: str, address: str) -> bool:
    """Whether ``address`` is one that ``pattern`` names (``news.*``, ``news.#``, or the address itself).

    >>> address_matches("news.*", "news.uk"), address_matches("news.#", "news"), address_matches("news.*", "news.uk.london")
    (True, True, False)
    """
    if pattern == address:
        return True
    if "*" not in pattern and "#" not in pattern:
        return False
    return _compiled(pattern).fullmatch(address) is not None
