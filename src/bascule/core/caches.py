"""Caches of data derived from a peer's input: limited in entries and in entry size, and cleared when a peer disconnects."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class PeerCache(NamedTuple):
    """A cache: its number of entries, the maximum size of an entry, and how to clear it."""

    entries: Callable[[], int]
    entry_bytes: int
    clear: Callable[[], None]


#: All caches of this process.
_CACHES: Final[list[PeerCache]] = []


def add(cache: PeerCache) -> None:
    """Register a cache for ``kept_bytes`` and ``forget_peers``."""
    _CACHES.append(cache)


def peer_cache(entries: int, entry_bytes: int, length_max: int | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Cache the results of a function, as ``lru_cache`` does, if no argument is longer than ``length_max``.

    Use None for ``length_max`` if arguments cannot be long. ``entry_bytes`` is the maximum size of an entry in bytes.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kept = lru_cache(maxsize=entries)(function)
        add(PeerCache(lambda: kept.cache_info().currsize, entry_bytes, kept.cache_clear))
        if length_max is None:
            return cast(Callable[P, R], kept)

        @wraps(function)
        def call(*arguments: Any) -> R:
            for argument in arguments:
                if len(argument) > length_max:
                    return function(*arguments)  # type: ignore[call-arg]  # arguments by position are all there are
            return kept(*arguments)

        return cast(Callable[P, R], call)

    return decorate


def forget_peers() -> None:
    """Clear all caches after a peer has disconnected. Values still in use are computed again."""
    for cache in _CACHES:
        cache.clear()


def kept_bytes() -> int:
    """Return the maximum memory of all caches in bytes, from their number of entries."""
    return sum(cache.entries() * cache.entry_bytes for cache in _CACHES)
