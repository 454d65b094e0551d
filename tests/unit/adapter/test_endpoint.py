"""The adapter awaits the result of an endpoint if the result is awaitable, in each form of an endpoint."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

import pytest

from bascule.adapter.inbound import Record
from bascule.adapter.inbound.endpoint import Endpoint, Instance

RECORD = Record("topic", 0, 1, None, None)


def traced(function: Callable[[Record], Awaitable[None]]) -> Callable[[Record], Awaitable[None]]:
    @functools.wraps(function)
    def wrapper(record: Record) -> Awaitable[None]:
        return function(record)

    return wrapper


class Called:
    def __init__(self, function: Callable[[Record], Awaitable[None]]) -> None:
        self._function = function

    async def __call__(self, record: Record) -> None:
        await self._function(record)


@pytest.mark.parametrize("form", [lambda each: each, traced, Called, functools.partial], ids=["plain", "decorated", "object", "partial"])
def test_coroutine_endpoint_runs_to_completion(form: Callable[[Endpoint], Endpoint]) -> None:
    seen: list[Record] = []

    async def handle(record: Record) -> None:
        await asyncio.sleep(0)
        seen.append(record)

    instance = Instance(form(handle))
    instance(RECORD)
    instance(RECORD)
    instance.close()
    assert seen == [RECORD, RECORD]


def test_coroutine_close_of_endpoint_is_awaited() -> None:
    results: list[str] = []

    class Handler:
        def on_record(self, record: Record) -> None:
            results.append(record.topic)

        async def close(self) -> None:
            await asyncio.sleep(0)
            results.append("closed")

    instance = Instance(Handler)
    instance(RECORD)
    instance.close()
    assert results == ["topic", "closed"]


def test_cancellation_in_close_of_endpoint_is_contained() -> None:
    class Handler:
        def on_record(self, record: Record) -> None: ...

        async def close(self) -> None:
            raise asyncio.CancelledError

    instance = Instance(Handler)
    instance(RECORD)
    instance.close()
