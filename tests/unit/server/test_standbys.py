"""The connections between the elected broker and its standbys, and what a stranger can do with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from bascule.server import standbys
from bascule.server.standbys import LINE_BYTES_MAX, StandbyListener, watch
from tests.support.speed import SLOWNESS
from tests.unit.server.served import run_async

MEMBER = "one-1"
HOST = "127.0.0.1"
WAIT_S = 60.0 * SLOWNESS


@asynccontextmanager
async def listening(member: str = MEMBER) -> AsyncIterator[StandbyListener]:
    listener = StandbyListener(HOST, 0, 8, lambda: member)
    try:
        yield listener
    finally:
        listener.close()
        for _ in range(10):  # turns in which closed transports tell their ends
            await asyncio.sleep(0)


@asynccontextmanager
async def watching(listener: StandbyListener) -> AsyncIterator[asyncio.Task[None]]:
    """Yield the task of a standby that is connected."""
    connected = asyncio.Event()
    task = asyncio.create_task(watch(HOST, listener.port, MEMBER, connected.set))
    await asyncio.wait_for(connected.wait(), WAIT_S)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, ConnectionError):
            await task


async def answer(listener: StandbyListener, data: bytes) -> bytes:
    """Return everything that a peer gets until the broker ends the connection."""
    reader, writer = await asyncio.open_connection(HOST, listener.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), WAIT_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@run_async
async def test_standby_is_told_when_its_broker_is_no_longer_elected() -> None:
    async with listening() as listener, watching(listener) as task:
        listener.dismiss()
        await asyncio.wait_for(task, WAIT_S)
        assert not listener._standbys


@run_async
async def test_connection_that_the_broker_resets_is_refused() -> None:
    async with listening() as listener, watching(listener) as task:
        next(iter(listener._standbys)).abort()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(task, WAIT_S)


@run_async
async def test_port_on_which_nobody_listens_refuses() -> None:
    async with listening() as listener:
        port = listener.port
    with pytest.raises(ConnectionError):
        await watch(HOST, port, MEMBER, lambda: None)


@run_async
async def test_broker_that_is_not_elected_refuses_standbys() -> None:
    async with listening("") as listener:
        with pytest.raises(ConnectionError):
            await watch(HOST, listener.port, "", lambda: None)


@run_async
async def test_broker_that_does_not_answer_the_greeting_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "HELLO_S", 0.1)
    held = asyncio.Event()

    async def hold(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        writer.close()

    server = await asyncio.start_server(hold, HOST, 0)
    async with server:
        with pytest.raises(TimeoutError):
            await watch(HOST, server.sockets[0].getsockname()[1], MEMBER, lambda: None)
        held.set()


@pytest.mark.parametrize("data", [b"AMQP\0\1\0\0\n", b"one-2\n", b"\n", b"\xff" * (LINE_BYTES_MAX + 1), MEMBER.encode() + b"\nmore\n"])
@run_async
async def test_stranger_is_refused_and_harms_no_standby(data: bytes) -> None:
    async with listening() as listener, watching(listener) as task:
        assert b"elected" not in await answer(listener, data)
        assert not task.done()


@run_async
async def test_silent_stranger_is_closed_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "HELLO_S", 0.1)
    async with listening() as listener:
        assert await answer(listener, b"") == b""
        assert not listener._pending


@run_async
async def test_many_silent_strangers_keep_no_standby_out() -> None:
    async with listening() as listener:
        strangers = [await asyncio.open_connection(HOST, listener.port) for _ in range(3 * standbys.PENDING_MAX)]
        async with watching(listener):
            assert len(listener._pending) <= standbys.PENDING_MAX
        for _, writer in strangers:
            writer.close()


@run_async
async def test_more_standbys_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "STANDBYS_MAX", 1)
    async with listening() as listener, watching(listener):
        with pytest.raises(ConnectionError):
            await watch(HOST, listener.port, MEMBER, lambda: None)
