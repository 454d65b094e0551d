"""Operations: what a context does, written once as generators that yield what they wait for; the blocking and the asyncio face run them.

A generator gets True when its condition came true, False when time ran out. It runs undisturbed between two waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")


class Wait(NamedTuple):
    """Go on when ``condition()`` is true, or when the clock of the connection shows ``until_s``."""

    condition: Callable[[], bool]
    until_s: float


Operation: TypeAlias = Generator[Wait, bool, T]
