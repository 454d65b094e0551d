"""Relations of two address patterns: whether one matches all that the other matches, and whether an address can match both.

In doubt, ``covers`` returns False and ``overlaps`` returns True. The time of both grows with the number of words of one pattern times that
of the other.
"""

from __future__ import annotations

from typing import Final

#: Stands for the first word of what a leading ``#`` matches, which may be empty. No word has a dot.
_FIRST: Final = "."


def covers(pattern: str, other: str) -> bool:
    """Return True only if ``pattern`` matches each address without empty words that ``other`` matches.

    If ``other`` begins with ``#``, it may also match addresses that begin with a dot, some of which ``pattern`` may not match.

    >>> covers("news.#", "news.*"), covers("news.*", "news.#")
    (True, False)
    """
    wanted = other.split(".")
    if pattern == other or "" in wanted:
        return pattern == other
    words = _split(pattern)
    many = sum(1 << index for index, word in enumerate(words) if word == "#")
    state = _skipped(1, many)
    for word in _split(other):
        taken = 0
        for index, own in enumerate(words):
            if state >> index & 1 and _includes(own, word):
                taken |= 1 << index + (own != "#")
        if not taken:
            return False
        state = _skipped(taken, many)
    return bool(state >> len(words) & 1)


def overlaps(pattern: str, other: str) -> bool:
    """Return False only if no address can match both patterns.

    >>> overlaps("news.*.late", "news.uk.#"), overlaps("news.*", "sport.#")
    (True, False)
    """
    words = pattern.split(".")
    many = sum(1 << index for index, word in enumerate(words) if word == "#")
    every = (1 << len(words) + 1) - 1
    state = _skipped(1, many)
    for word in other.split("."):
        if word == "#":  # the words that the rest of the pattern needs
            state = every & ~((state & -state) - 1)
            continue
        taken = state & many
        for index, own in enumerate(words):
            if state >> index & 1 and own != "#" and (own == word or "*" in (own, word)):
                taken |= 1 << index + 1
        if not taken:
            return False
        state = _skipped(taken, many)
    return bool(state >> len(words) & 1)


def _split(pattern: str) -> list[str]:
    """Return the words; a leading ``#`` matches at least one word."""
    words = pattern.split(".")
    return [_FIRST, *words] if words[0] == "#" else words


def _includes(own: str, word: str) -> bool:
    """Return whether a word of a pattern takes all that a word of another pattern matches."""
    match own:
        case "#":
            return word != _FIRST
        case "*":
            return word not in (_FIRST, "#")
        case ".":
            return word != "#"
    return own == word


def _skipped(state: int, many: int) -> int:
    """Return the places that are reached without a further word: ``#`` matches none, too."""
    while (further := state | (state & many) << 1) != state:
        state = further
    return state
