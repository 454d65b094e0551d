"""How the tests of the asyncio face run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bascule.client import (
    Queue,
)

QUEUE = Queue("q")


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A coroutine as a test, on a loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


async def cancelled(work: Coroutine[Any, Any, Any], when: asyncio.Event) -> None:
    """Do the work until something happens, and cancel it then."""
    task = asyncio.create_task(work)
    await asyncio.wait_for(when.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
