"""Addresses, routing types and address patterns (``.`` separates words, ``*`` is one word, ``#`` any number)."""

from __future__ import annotations

import enum

from bascule.core.caches import peer_cache

#: Every record of a message contains its address, with a length of two bytes; no useful address is longer than this.
ADDRESS_MAX = 1000


class Routing(enum.IntEnum):
    """How an address routes a message: to one of its queues, or to every subscription."""

    ANYCAST = 0  # a JMS queue
    MULTICAST = 1  # a JMS topic


class AddressPattern:
    """An address pattern. A match takes one step for each word of the address, for any pattern."""

    __slots__ = ("_any", "_behind_empty", "_literals", "_many", "_words")

    def __init__(self, pattern: str) -> None:
        words: list[str] = []
        first, second = (*pattern.split(".", 2), "", "")[:2]
        #: The state after an empty first word, which a leading ``#`` matches alone.
        self._behind_empty = 0 if first != "#" else 0b110 if second == "#" else 0b100
        for word in pattern.split("."):
            if word == "#" and not words:
                words += ["*", "#"]  # a leading ``#`` matches at least one word, which may be empty
            elif word != "#" or words[-1] != "#":
                words.append(word)
        self._words = len(words)
        self._literals: dict[str, int] = {}  # by word, the indexes of this literal in the pattern
        self._any = self._many = 0  # indexes of ``*`` and of ``#``
        for index, word in enumerate(words):
            if word == "#":
                self._many |= 1 << index
            elif word == "*":
                self._any |= 1 << index
            else:
                self._literals[word] = self._literals.get(word, 0) | 1 << index

    def matches(self, address: str) -> bool:
        """Return whether the pattern matches an address."""
        literals, many = self._literals, self._many
        # Bit ``n`` means that the words so far match the first ``n`` words of the pattern.
        state, words = 1, address.split(".")
        if self._behind_empty and not words[0]:
            del words[0]
            state = self._behind_empty
        for word in words:
            taken, passed = literals.get(word, 0), 0
            if word:  # neither * nor # matches an empty word
                taken, passed = taken | self._any, state & many
            state = (state & taken) << 1 | passed
            state |= (state & many) << 1
            if not state:
                return False
        return bool(state >> self._words & 1)


@peer_cache(entries=1024, entry_bytes=16_384)
def _compiled(pattern: str) -> AddressPattern:
    return AddressPattern(pattern)


def has_wildcards(pattern: str) -> bool:
    """Return whether a pattern has wildcards."""
    return "*" in pattern or "#" in pattern


def specificity(pattern: str) -> tuple[bool, bool, int, tuple[bool, ...]]:
    """Return the sort key of a pattern: a more specific pattern comes later.

    Of two patterns that are equal otherwise, the one with the earlier fixed word is more specific, whatever their order in the settings.

    >>> specificity("*.eu") < specificity("orders.*")
    True
    """
    words = pattern.split(".")
    fixed = tuple([word not in ("*", "#") for word in words])
    return ("#" not in words, "*" not in words, sum(fixed), fixed)


def address_matches(pattern: str, address: str) -> bool:
    """Return whether ``pattern`` matches ``address``.

    >>> address_matches("news.*", "news.uk"), address_matches("news.#", "news"), address_matches("news.*", "news.uk.london")
    (True, True, False)
    """
    if pattern == address:
        return True
    return has_wildcards(pattern) and _compiled(pattern).matches(address)
