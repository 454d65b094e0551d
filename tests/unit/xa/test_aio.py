"""The asyncio API of a transaction manager: the event loop keeps running while a phase waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import Propagation, TransactionManager, TransactionRolledBack, TransactionTimedOut
from bascule.xa import reaper as reaping
from bascule.xa.aio import AsyncTransaction, AsyncTransactionManager
from bascule.xa.errors import NoTransaction, OutOfOrder, ResourceFailed
from bascule.xa.report import TransactionFinding
from bascule.xa.two_phase import TransactionStatus
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


class Gate:
    """Blocks a thread at a point until the event loop opens the gate. A blocked event loop cannot open the gate."""

    def __init__(self, loop: asyncio.AbstractEventLoop, point: str) -> None:
        self._loop, self._point = loop, point
        self.reached, self.opened = asyncio.Event(), threading.Event()
        self.error: Exception | None = None

    def __call__(self, point: str) -> None:
        if point == self._point:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self.opened.wait(WAIT_S), "the event loop was blocked"
            if self.error is not None:
                raise self.error


@asynccontextmanager
async def opened(*resources: ModelResource, log: ModelLog | None = None) -> AsyncIterator[AsyncTransactionManager]:
    async with AsyncTransactionManager(TransactionManager("shop", log or ModelLog(), resources)) as manager:
        yield manager


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize(
    "point", ["one.start.before", "one.end.before", "one.prepare.before", "log.decide.before", "two.commit.before", "log.forget.before"]
)
def test_event_loop_keeps_running_while_transaction_step_blocks(point: str) -> None:
    async def main() -> None:
        gate = Gate(asyncio.get_running_loop(), point)
        one, two = ModelResource("one", watch=gate), ModelResource("two", watch=gate)

        async def work(manager: AsyncTransactionManager) -> None:
            async with manager.begin() as transaction:
                for resource in (one, two):
                    (await transaction.enlist(resource)).append("work")

        async with opened(one, two, log=ModelLog(watch=gate)) as manager:
            task = asyncio.create_task(work(manager))
            await gate.reached.wait()
            gate.opened.set()
            await task
        assert one.durable.committed == two.durable.committed == ["work"]

    run(main)


@pytest.mark.parametrize("fails", [False, True])
def test_cancellation_is_raised_when_the_commit_has_ended(fails: bool) -> None:
    async def main() -> None:
        gate = Gate(asyncio.get_running_loop(), "one.commit.before")
        gate.error = ResourceFailed("gone") if fails else None
        one = ModelResource("one", watch=gate)
        seen: list[AsyncTransaction] = []

        async def work(manager: AsyncTransactionManager) -> None:
            async with manager.begin() as transaction:
                seen.append(transaction)
                (await transaction.enlist(one)).append("work")

        async with opened(one) as manager:
            task = asyncio.create_task(work(manager))
            await gate.reached.wait()
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
                assert not task.done()
            gate.opened.set()
            with pytest.raises(asyncio.CancelledError) as raised:
                await task
        assert seen[0].status is (TransactionStatus.IN_DOUBT if fails else TransactionStatus.COMMITTED)
        assert (raised.value.__cause__ is not None) is fails

    run(main)


def test_cancelled_enlist_leaves_no_branch() -> None:
    async def main() -> None:
        gate = Gate(asyncio.get_running_loop(), "one.start.after")
        one = ModelResource("one", watch=gate)

        async def work(manager: AsyncTransactionManager) -> None:
            async with manager.begin() as transaction:
                await transaction.enlist(one)

        async with opened(one) as manager:
            task = asyncio.create_task(work(manager))
            await gate.reached.wait()
            task.cancel()
            await asyncio.sleep(0)
            gate.opened.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not manager.blocking._live
        assert one.durable.committed == []
        assert one.recover() == []

    run(main)


def test_exception_in_async_block_rolls_back_and_nested_block_is_refused() -> None:
    async def main() -> None:
        one = ModelResource("one")
        async with opened(one) as manager:

            async def nested() -> None:
                async with manager.begin():
                    pass

            async def work() -> None:
                async with manager.begin():
                    (await manager.enlist(one)).append("work")
                    with pytest.raises(OutOfOrder, match="do not nest"):
                        await nested()
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await work()
            with pytest.raises(NoTransaction):
                manager.current  # noqa: B018 - it raises
            assert not manager.blocking._live
        assert one.durable.committed == []

    run(main)


def test_each_task_has_its_own_transaction() -> None:
    async def main() -> None:
        one = ModelResource("one")
        async with opened(one) as manager:

            async def work(number: int) -> None:
                async with manager.begin() as transaction:
                    assert manager.current is transaction
                    await asyncio.sleep(0)
                    (await manager.enlist(one)).append(f"work {number}")
                    assert manager.current is transaction

            await asyncio.gather(*map(work, range(20)))
        assert sorted(one.durable.committed) == sorted(f"work {number}" for number in range(20))

    run(main)


def test_async_transaction_hooks_run_on_event_loop() -> None:
    async def main() -> None:
        one, seen = ModelResource("one"), []
        async with opened(one) as manager:
            async with manager.begin() as transaction:

                async def before() -> None:
                    assert asyncio.current_task() is not None
                    (await transaction.enlist(one)).append("by a hook")

                transaction.before_completion(before)
                transaction.after_completion(lambda status: seen.append((status, threading.current_thread() is threading.main_thread())))

            async def refuse() -> None:
                raise ValueError("no more")

            async def refused() -> None:
                async with manager.begin() as transaction:
                    (await transaction.enlist(one)).append("undone")
                    transaction.before_completion(refuse)

            with pytest.raises(TransactionRolledBack, match="no more"):
                await refused()
        assert seen == [(TransactionStatus.COMMITTED, True)]
        assert one.durable.committed == ["by a hook"]

    run(main)


def test_async_transactional_functions_join_retry_and_mark_transaction_of_caller() -> None:
    async def main() -> None:
        one = ModelResource("one")
        async with opened(one) as manager:
            calls = []

            @manager.transactional()
            async def inner(fails: bool) -> str:
                (await manager.enlist(one)).append("inner")
                if fails:
                    raise LookupError
                return manager.current.id

            @manager.transactional(attempts=2, retry_on=(ConnectionError,))
            async def outer() -> bool:
                calls.append(None)
                if len(calls) == 1:
                    raise ConnectionError
                return await inner(False) == manager.current.id

            @manager.transactional(propagation=Propagation.MANDATORY)
            async def within() -> None:
                pass

            assert await outer()
            with pytest.raises(NoTransaction):
                await within()

            async def caught() -> None:
                async with manager.begin():
                    with pytest.raises(LookupError):
                        await inner(True)

            with pytest.raises(TransactionRolledBack, match="marked"):
                await caught()
        assert one.durable.committed == ["inner"]

    run(main)


def test_async_transaction_beyond_timeout_is_rolled_back_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaping, "GRACE_S", 0.0)

    async def main() -> None:
        one, over = ModelResource("one"), asyncio.Event()
        async with opened(one) as manager:
            ids: list[str] = []

            async def late() -> None:
                async with manager.begin(timeout_s=0.05) as transaction:
                    ids.append(transaction.id)
                    transaction.after_completion(lambda _: over.set())
                    (await transaction.enlist(one)).append("late")
                    await over.wait()

            with pytest.raises(TransactionTimedOut):
                await late()
            report = await manager.outcome(ids[0])
            assert report.finding is TransactionFinding.ROLLED_BACK
        assert one.durable.committed == []

    run(main)
