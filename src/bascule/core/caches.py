"""Caches of what is made of a peer's data: bounded in their entries, and in the size of each, and emptied when a peer is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class PeerCache(NamedTuple):
    """One cache: how many entries it has, what an entry takes at most, and how to empty it."""

    entries: Callable[[], int]
    entry_bytes: int
    clear: Callable[[], None]


#: All caches of this process.
_CACHES: Final[list[PeerCache]] = []


def add(cache: PeerCache) -> None:
    """Count a cache, and empty it with the others."""
    _CACHES.append(cache)


def peer_cache(entries: int, entry_bytes: int, length_max: int | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember results of a function, as ``lru_cache`` does, where no argument is longer than ``length_max``.

    ``length_max`` None is for arguments that cannot be long. ``entry_bytes`` is what an entry takes at most, in bytes.
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
    """Empty all caches: a peer has gone, and nothing of it is kept. What is still used is worked out once more."""
    for cache in _CACHES:
        cache.clear()


def kept_bytes() -> int:
    """What all caches take at most, by the number of their entries."""
    return sum(cache.entries() * cache.entry_bytes for cache in _CACHES)
