"""Waits of protocols on the broker's event loop."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from bascule.core.effects import Severity
from bascule.core.errors import Unavailable
from bascule.server.effects import FutureWaiter, LoopEffects
from tests.support.speed import SLOWNESS

WAIT_S = 30.0 * SLOWNESS


def waiter() -> FutureWaiter[Any]:
    return FutureWaiter(asyncio.get_running_loop())


async def outcome(waiting: FutureWaiter[Any]) -> object:
    try:
        return await waiting.wait(WAIT_S)
    except Unavailable as error:
        return str(error)


@pytest.mark.parametrize("first", ["kept", "failed"])
@pytest.mark.parametrize("second", ["kept", "failed"])
def test_only_the_first_of_a_value_and_an_error_counts(first: str, second: str) -> None:
    async def run() -> object:
        waiting = waiter()
        for number, what in enumerate((first, second)):
            if what == "kept":
                waiting.keep(f"kept {number}")
            else:
                waiting.fail(Unavailable(f"failed {number}"))
        return await outcome(waiting)

    assert asyncio.run(run()) == f"{first} 0"


def test_wait_for_a_late_value_times_out() -> None:
    async def run() -> None:
        waiting = waiter()
        with pytest.raises(TimeoutError):
            await waiting.wait(0.0)
        waiting.keep("late")
        waiting.fail(Unavailable("later"))

    asyncio.run(run())


def test_unawaited_error_is_not_reported_by_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        waiting = waiter()
        waiting.fail(Unavailable("nobody asked"))
        await asyncio.sleep(0)
        del waiting
        gc.collect()

    asyncio.run(run())
    assert caplog.text == ""


def test_protocols_that_still_run_are_cancelled_at_the_end() -> None:
    ended: list[str] = []

    async def protocol() -> None:
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def run() -> None:
        effects = LoopEffects("test")
        effects.spawn(protocol())
        await asyncio.sleep(0)
        effects.cancel_spawned()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ended == ["cancelled"]


def test_note_of_a_protocol_is_in_the_log_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        LoopEffects("test").note(Severity.WARNING, "housekeeping round failed", "the disk is full", Unavailable("no room"))

    asyncio.run(run())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the disk is full" in record.getMessage()
