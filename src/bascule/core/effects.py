"""Protocols without IO: coroutines over an object that performs their effects.

A protocol is written once, as ``async def`` functions that await the methods of a ``typing.Protocol`` class (append, read, commit, sleep).
The asyncio driver, blocking threads and the simulator each perform the effects in their own way. A blocking performer never suspends.
"""

from __future__ import annotations

import enum
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Severity(enum.IntEnum):
    """The severity of a protocol's log message."""

    INFO = 20
    WARNING = 30
    ERROR = 40


class Timer(Protocol):
    """A scheduled action."""

    def cancel(self) -> object:
        """Cancel the action; does nothing if it has run."""
        ...


class Waiter(Protocol[T]):
    """A future value or error. The first one set is used."""

    def keep(self, value: T) -> None:
        """Set the value."""
        ...

    def fail(self, error: Exception) -> None:
        """Set the error."""
        ...

    async def wait(self, timeout_s: float) -> T:
        """Return the value. Raises the error, or TimeoutError if neither is set within ``timeout_s`` seconds."""
        ...


def run_blocking(protocol: Coroutine[Any, Any, T]) -> T:
    """Run a protocol whose effects block the thread instead of suspending. Raises what the protocol raises."""
    try:
        protocol.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    protocol.close()
    raise RuntimeError(f"protocol {protocol!r} suspended; the effects of a blocking performer must block")
