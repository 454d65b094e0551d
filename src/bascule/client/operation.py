"""Operations of a context: generators that yield the conditions they wait for. The blocking and the asyncio API both run them.

A generator receives True when its condition is true, False after the timeout. It runs without interruption between two waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")


class Wait(NamedTuple):
    """Continue when ``condition()`` is true, or when the connection's clock reaches ``until_s``."""

    condition: Callable[[], bool]
    until_s: float


Operation: TypeAlias = Generator[Wait, bool, T]
