"""Several tasks send in one transaction. The transaction does not end during a send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.events import Attached, DeclareReceived, Discharged, Transferred
from bascule.amqp.link import ReceiverLink
from bascule.client import Acknowledge, IllegalState, Queue, TimedOut, TransactionRolledBack, connect, connect_async
from bascule.client.aio import AsyncContext
from bascule.jms.message import decode_message
from bascule.threads.background import in_background
from tests.support.speed import SLOWNESS
from tests.unit.client.coroutines import run_async
from tests.unit.client.server import obliging, server

QUICK, SLOW, GO = Queue("quick"), Queue("slow"), Queue("go")
WAIT_S = 20.0 * SLOWNESS


class Slow:
    """A server that answers the attach of a producer for ``slow`` when a message for ``go`` arrives. ``requests`` has its requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._slow: list[ReceiverLink] = []

    def __call__(self, connection: Connection, event: Any) -> None:
        match event:
            case Attached() if getattr(event.link.target, "address", "") == "slow":
                self.requests.append("attach")
                self._slow.append(event.link)
                return
            case Transferred() if event.txn_id is not None:
                self.requests.append(str(decode_message(event.payload).body))
            case Transferred() if event.link.target.address == "go":
                for link in self._slow:
                    link.accept()
                    link.flow(10)
                self._slow.clear()
            case DeclareReceived():
                self.requests.append("declare")
            case Discharged():
                self.requests.append("rollback" if event.fail else "commit")
        obliging(connection, event)


@asynccontextmanager
async def slow_send(slow: Slow) -> AsyncIterator[tuple[AsyncContext, AsyncContext, asyncio.Task[Any]]]:
    """Yield a transacted context, another context of the connection, and a task that is sending in the first one."""
    with server(slow) as url:
        async with (
            connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=WAIT_S) as context,
            await context.create_context(Acknowledge.AUTO) as other,
        ):
            await context.send(QUICK, "quick")
            sending = asyncio.create_task(context.send(SLOW, "slow"))
            while "attach" not in slow.requests:
                await asyncio.sleep(0)
                await other.send(QUICK, "answered")
            yield context, other, sending


@run_async
async def test_commit_waits_for_concurrent_send_of_other_task() -> None:
    slow = Slow()
    async with slow_send(slow) as (context, other, sending):
        committing = asyncio.create_task(context.commit())
        await other.send(QUICK, "a discharge that was on its way would have come before this")
        await other.send(GO, "go")
        await committing
        await sending
    assert slow.requests == ["declare", "quick", "attach", "slow", "commit"]


@run_async
async def test_commit_that_times_out_waiting_for_send_ends_no_transaction() -> None:
    slow = Slow()
    async with slow_send(slow) as (context, other, sending):
        with pytest.raises(TimedOut, match="commit"):
            await context.commit(timeout_s=0.01)
        await other.send(GO, "go")
        await sending
        await context.commit()
    assert slow.requests == ["declare", "quick", "attach", "slow", "commit"]


@run_async
async def test_send_in_transaction_rolled_back_meanwhile_raises_and_sends_nothing() -> None:
    slow = Slow()
    async with slow_send(slow) as (context, other, sending):
        await context.rollback()
        await other.send(GO, "go")
        with pytest.raises(TransactionRolledBack, match="the message was not sent"):
            await sending
        await context.send(QUICK, "next")
        await context.commit()
    assert slow.requests == ["declare", "quick", "attach", "rollback", "declare", "next", "commit"]


@run_async
async def test_send_started_during_commit_is_entirely_in_this_or_next_transaction() -> None:
    slow = Slow()
    async with slow_send(slow) as (context, other, sending):
        committing = asyncio.create_task(context.commit())
        late = asyncio.create_task(context.send(QUICK, "late"))
        await other.send(GO, "go")
        await asyncio.gather(committing, sending, late)
        await context.commit()
    assert slow.requests.count("late") == 1
    late_at, commits = slow.requests.index("late"), [place for place, request in enumerate(slow.requests) if request == "commit"]
    assert late_at < commits[-1]
    declared = [place for place, request in enumerate(slow.requests) if request == "declare"]
    assert late_at < commits[0] or declared[-1] < late_at


def test_block_that_ends_during_call_of_other_thread_is_rolled_back_and_context_stays_usable() -> None:
    slow = Slow()
    with server(slow) as url, connect(url, timeout_s=WAIT_S) as context, context.create_context() as other:

        def block() -> None:
            with context.transaction():
                context.send(QUICK, "quick")
                sending.append(in_background(lambda: context.send(SLOW, "slow"), "sends"))
                while "attach" not in slow.requests:
                    other.send(QUICK, "answered")

        sending: list[Any] = []
        with pytest.raises(IllegalState, match="another thread is using the context"):
            block()
        other.send(GO, "go")
        assert isinstance(sending[0].exception(WAIT_S), TransactionRolledBack)
        with context.transaction():
            context.send(QUICK, "next")
    assert "slow" not in slow.requests
    assert slow.requests.index("next") < slow.requests.index("commit")
    assert slow.requests.count("commit") == 1


class Late:
    """A server that answers requests of the type ``event`` (declare or discharge) when a message for ``go`` arrives."""

    def __init__(self, event: type[Any]) -> None:
        self.requests: list[str] = []
        self._event, self._late, self._released = event, list[Any](), False

    def __call__(self, connection: Connection, event: Any) -> None:
        match event:
            case Transferred() if event.link.target.address == "go":
                self._released = True
                for late in self._late:
                    obliging(connection, late)
            case Transferred():
                within = "" if event.txn_id is None else " in a transaction"
                self.requests.append(f"{decode_message(event.payload).body}{within}")
            case DeclareReceived():
                self.requests.append("declare")
            case Discharged():
                self.requests.append("rollback" if event.fail else "commit")
        if isinstance(event, self._event) and not self._released:
            self._late.append(event)
        else:
            obliging(connection, event)


async def send_in_a_block(context: AsyncContext) -> None:
    async with context.transaction():
        await context.send(QUICK, "quick")


async def until_requested(late: Late, what: str, other: AsyncContext) -> None:
    while what not in late.requests:
        await asyncio.sleep(0)
        await other.send(Queue("asked"), "?")


@run_async
async def test_send_during_unanswered_commit_of_block_is_not_lost() -> None:
    """The message must not be sent in a new transaction of the block, which the end of the block would abandon."""
    late = Late(Discharged)
    with server(late) as url:
        async with connect_async(url, timeout_s=WAIT_S) as context, await context.create_context() as other:
            committing = asyncio.create_task(send_in_a_block(context))
            await until_requested(late, "commit", other)
            await context.send(QUICK, "late")
            await other.send(GO, "go")
            await committing
    assert [each for each in late.requests if each != "?"] == ["declare", "quick in a transaction", "commit", "late"]


@run_async
async def test_block_started_during_commit_of_other_block_continues_after_it() -> None:
    late = Late(Discharged)
    with server(late) as url:
        async with connect_async(url, timeout_s=WAIT_S) as context, await context.create_context() as other:
            committing = asyncio.create_task(send_in_a_block(context))
            await until_requested(late, "commit", other)
            async with context.transaction():
                await context.send(QUICK, "first")
                await other.send(GO, "go")
                await committing
                await context.send(QUICK, "second")
    assert late.requests[-3:] == ["first in a transaction", "second in a transaction", "commit"]


@run_async
async def test_transaction_declared_after_rollback_is_reused_by_next_send() -> None:
    """Otherwise nobody would end the transaction at the broker."""
    late = Late(DeclareReceived)
    with server(late) as url:
        async with (
            connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=WAIT_S) as context,
            await context.create_context(Acknowledge.AUTO) as other,
        ):
            sending = asyncio.create_task(context.send(QUICK, "undone"))
            await until_requested(late, "declare", other)
            await context.rollback()
            await other.send(GO, "go")
            with pytest.raises(TransactionRolledBack, match="the message was not sent"):
                await sending
            await context.send(QUICK, "next")
            await context.commit()
    assert [each for each in late.requests if each != "?"] == ["declare", "next in a transaction", "commit"]


@run_async
async def test_transaction_committed_by_two_tasks_is_discharged_once() -> None:
    """The second task must not get the error that the broker has rolled back the transaction."""
    late = Late(Discharged)
    with server(late) as url:
        async with (
            connect_async(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=WAIT_S) as context,
            await context.create_context(Acknowledge.AUTO) as other,
        ):
            await context.send(QUICK, "quick")
            tasks = [asyncio.create_task(context.commit()), asyncio.create_task(context.commit())]
            await until_requested(late, "commit", other)
            await other.send(GO, "go")
            results = await asyncio.gather(*tasks, return_exceptions=True)
    assert late.requests.count("commit") == 1
    assert sorted(type(each) for each in results if each is not None) == [IllegalState]
