"""Calls from a thread to an event loop: the waiting thread gets an error if the loop ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bascule.threads.background import in_background
from bascule.threads.loops import LoopGone, on_loop
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


@contextmanager
def running() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in its own thread, and close the loop after the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(cancel_others(), loop).result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


async def cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def endless(begun: threading.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


def test_caller_gets_result_or_error_of_the_coroutine() -> None:
    async def divide(number: int) -> float:
        return 1 / number

    with running() as loop:
        assert on_loop(loop, lambda: divide(2)) == 0.5
        with pytest.raises(ZeroDivisionError):
            on_loop(loop, lambda: divide(0))


def test_coroutine_beyond_its_time_limit_raises_loop_gone() -> None:
    with running() as loop, pytest.raises(LoopGone, match=r"not finish the coroutine within 0.01 s"):
        on_loop(loop, lambda: endless(threading.Event()), 0.01)


def test_call_on_closed_loop_raises_loop_gone_at_once() -> None:
    with running() as loop:
        pass
    with pytest.raises(LoopGone, match="closed"):
        on_loop(loop, lambda: endless(threading.Event()))


def test_loop_closed_before_the_coroutine_begins_raises_loop_gone_in_the_caller() -> None:
    loop = asyncio.new_event_loop()  # a loop that accepts the call but never runs
    waiting = in_background(lambda: on_loop(loop, lambda: endless(threading.Event())), "waits")
    while not loop._ready:  # type: ignore[attr-defined]
        threading.Event().wait(0.01)
    loop.close()
    with pytest.raises(LoopGone, match="closed"):
        waiting.result(WAIT_S)


def test_coroutine_cancelled_by_the_loop_raises_loop_gone_in_the_caller() -> None:
    begun = threading.Event()
    with running() as loop:
        waiting = in_background(lambda: on_loop(loop, lambda: endless(begun)), "waits")
        assert begun.wait(WAIT_S)
        asyncio.run_coroutine_threadsafe(cancel_others(), loop).result(WAIT_S)
        with pytest.raises(LoopGone, match="cancelled"):
            waiting.result(WAIT_S)
