"""Helpers that run the tests of the asyncio API."""

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
    """Run a coroutine function as a test, on its own event loop."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


async def cancel_when(work: Coroutine[Any, Any, Any], when: asyncio.Event) -> None:
    """Run ``work`` as a task, and cancel the task when the event ``when`` is set."""
    task = asyncio.create_task(work)
    await asyncio.wait_for(when.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
