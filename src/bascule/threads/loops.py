"""From a thread to an event loop of other people: run something there, and wait for the result."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopGone(Exception):
    """The event loop is closed, or does not get round to it."""


def on_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
    """Run a coroutine on a loop that runs in another thread; return its result. Raises LoopGone, and what the coroutine raises."""
    coroutine = make()
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError as error:
        coroutine.close()
        raise LoopGone(str(error)) from error
    if not concurrent.futures.wait([future], timeout_s).done:
        future.cancel()
        raise LoopGone(f"the event loop has not done it within {timeout_s:g} s")
    return future.result()
