"""Protocols without IO: coroutines over an object that performs their effects.

A protocol is written once, as ``async def`` functions that await the methods of a ``typing.Protocol`` class (append, read, commit, sleep).
The asyncio shell, blocking threads and the simulator each perform the effects in their own way. A blocking performer never suspends.
"""

from __future__ import annotations

import enum
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Severity(enum.IntEnum):
    """How much attention a note of a protocol needs."""

    INFO = 20
    WARNING = 30
    ERROR = 40


class Timer(Protocol):
    """Something that will be done later."""

    def cancel(self) -> object:
        """Do not do it; a no-op when it is done."""
        ...


class Waiter(Protocol[T]):
    """A value that comes later, or an error instead. The first of both counts."""

    def keep(self, value: T) -> None:
        """The value is there."""
        ...

    def fail(self, error: Exception) -> None:
        """It never will be."""
        ...

    async def wait(self, timeout_s: float) -> T:
        """The value. Raises the error, or TimeoutError when neither comes in time."""
        ...


def run_blocking(protocol: Coroutine[Any, Any, T]) -> T:
    """Run a protocol whose effects block the thread instead of suspending. Raises what the protocol raises."""
    try:
        protocol.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    protocol.close()
    raise RuntimeError(f"{protocol!r} suspended: its effects must block")
