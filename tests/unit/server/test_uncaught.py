"""Errors of the event loop that nobody awaits are logged with a name and a count; contained errors up to a number each second."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace

import pytest

from bascule.broker.containment import ErrorKind
from bascule.config.settings import Settings
from bascule.core.errors import Unavailable
from bascule.server import uncaught as module
from bascule.server.life import BrokerLife
from bascule.server.node import Node
from bascule.server.status import status_of
from bascule.server.uncaught import LINES_PER_S, ErrorLog, UncaughtErrorHandler


async def _failing() -> None:
    raise ValueError("x")


def test_unawaited_task_error_is_logged_with_coroutine_and_count(caplog: pytest.LogCaptureFixture) -> None:
    uncaught = UncaughtErrorHandler()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        uncaught.install(loop)
        for _ in range(2):
            task = loop.create_task(_failing())
            await asyncio.wait([task])
            del task
            gc.collect()

    asyncio.run(run())
    assert uncaught.counts == {"_failing": 2}
    first, second = (record for record in caplog.records if record.name == "bascule.server.uncaught")
    assert first.getMessage() == 'uncaught asyncio error source=_failing count=1 what="Task exception was never retrieved"'
    assert "count=2" in second.getMessage()
    assert first.exc_info is not None
    assert first.exc_info[0] is ValueError


def test_error_of_a_callback_and_of_a_future_is_logged_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    uncaught = UncaughtErrorHandler()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        uncaught.install(loop)
        loop.call_soon(lambda: 1 / 0)
        future = loop.create_future()
        future.set_exception(ValueError("y"))
        del future
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert uncaught.counts == {"Handle": 1, "Future": 1}
    assert len([record for record in caplog.records if record.exc_info]) == 2


def test_uncaught_errors_are_counted_in_metrics_from_broker_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: BrokerLife) -> None:
        raise Unavailable("no Kafka")

    monkeypatch.setattr(BrokerLife, "_ensure_topics", refuse)

    async def run() -> dict[str, float]:
        node = Node(Settings())
        with pytest.raises(Unavailable):
            await node.run(lambda *_: None, lambda *_: None)
        assert status_of(node, [], [], [])["counters"]["uncaught_errors"] == 0
        for _ in range(2):
            task = asyncio.get_running_loop().create_task(_failing())
            await asyncio.wait([task])
            del task
            gc.collect()
        return status_of(node, [], [], [])["counters"]

    assert asyncio.run(run())["uncaught_errors"] == 2


def test_contained_errors_beyond_the_rate_limit_are_counted_and_reported_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [7.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    errors = ErrorLog()

    def lines(count: int) -> list[str]:
        caplog.clear()
        for _ in range(count):
            errors.write(ErrorKind.LINK, ValueError("x"), {"queue": "q" * 1000})
        return [record.getMessage() for record in caplog.records]

    assert len(lines(LINES_PER_S + 3)) == LINES_PER_S
    now_s[0] += 1
    text, first = lines(1)
    assert text == "contained errors not logged count=3"
    assert "kind=link" in first
    assert len(first) < 500
    now_s[0] += 1
    assert len(lines(1)) == 1


def test_error_without_a_source_is_counted_for_the_event_loop() -> None:
    uncaught = UncaughtErrorHandler()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        uncaught.install(loop)
        loop.call_exception_handler({"message": "socket.accept() out of system resource"})

    asyncio.run(run())
    assert uncaught.counts == {"event loop": 1}
