"""Calls between threads and event loops of other owners: run something in the other one, and wait for its result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from bascule.threads.background import in_background

T = TypeVar("T")


#: Interval in seconds at which a waiting caller checks whether the loop was closed, because nothing reports it.
LOOK_S = 0.5


class LoopGone(Exception):
    """The event loop is closed, has cancelled the coroutine, or did not finish it before the timeout."""


def on_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
    """Run a coroutine on a loop of another thread and return its result. Raises LoopGone and the error of the coroutine."""
    coroutine = make()
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError as error:
        coroutine.close()
        raise LoopGone(str(error)) from error
    deadline_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    while not future.done():
        if loop.is_closed():
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
            raise LoopGone("the event loop of the coroutine was closed")
        if (left_s := deadline_s - time.monotonic()) <= 0:
            future.cancel()
            raise LoopGone(f"the event loop did not finish the coroutine within {timeout_s:g} s")
        concurrent.futures.wait([future], min(left_s, LOOK_S))
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:  # the loop has ended
        raise LoopGone("the event loop has cancelled the coroutine") from error


async def to_the_end(ending: asyncio.Future[T]) -> T:
    """Wait until a thread's work has ended; then raise a cancellation of this task."""
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.wait([ending])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from ending.exception()
    return ending.result()


async def in_own_thread(work: Callable[[], T], name: str) -> T:
    """Run work in a new thread with this name, in the context of this task. A cancellation is raised when the work has ended.

    A thread of an executor is not safe: all of its threads may wait for something that only the end of this work releases.
    """
    context = contextvars.copy_context()
    return await to_the_end(asyncio.wrap_future(in_background(functools.partial(context.run, work), name)))
