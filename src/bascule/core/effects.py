"""Protocols without IO: coroutines over an object that performs their effects.

A protocol is written once, as ``async def`` functions that await the methods of a ``typing.Protocol`` class (append, read, commit, sleep).
The asyncio shell, blocking threads and the simulator each perform the effects in their own way. A blocking performer never suspends.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(protocol: Coroutine[Any, Any, T]) -> T:
    """Run a protocol whose effects block the thread instead of suspending. Raises what the protocol raises."""
    try:
        protocol.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    protocol.close()
    raise RuntimeError(f"{protocol!r} suspended: its effects must block")
