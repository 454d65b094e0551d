from __future__ import annotations

import asyncio

import pytest

from bascule.core.effects import run_blocking


async def blocking(value: int) -> int:
    return value


def test_run_blocking_returns_the_result_of_the_protocol() -> None:
    async def protocol() -> int:
        return await blocking(1) + await blocking(2)

    assert run_blocking(protocol()) == 3


def test_run_blocking_raises_the_error_of_the_protocol() -> None:
    async def protocol() -> None:
        raise ValueError("from the protocol")

    with pytest.raises(ValueError, match="from the protocol"):
        run_blocking(protocol())


def test_run_blocking_refuses_an_effect_that_suspends() -> None:
    async def protocol() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="must block"):
        run_blocking(protocol())
