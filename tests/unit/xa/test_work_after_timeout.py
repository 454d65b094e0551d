"""A transaction that times out while its block still runs: work inside the block must not commit alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import Propagation, Transaction, TransactionManager, TransactionTimedOut, retries
from bascule.xa import reaper as reaping
from bascule.xa.aio import AsyncTransactionManager
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS
TIMES_OUT_S = 0.05
OUTSIDE = (Propagation.REQUIRES_NEW, Propagation.NOT_SUPPORTED)


@pytest.fixture
def one() -> ModelResource:
    return ModelResource("one")


@pytest.fixture
def manager(one: ModelResource, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransactionManager]:
    monkeypatch.setattr(reaping, "GRACE_S", 0.0)
    with TransactionManager("shop", ModelLog(), [one]) as manager:
        yield manager


def timed_out(transaction: Transaction) -> None:
    over = threading.Event()
    transaction.after_completion(lambda _: over.set())
    assert over.wait(WAIT_S)


@pytest.mark.parametrize("propagation", [each for each in Propagation if each not in OUTSIDE])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["function", "coroutine"])
def test_transactional_function_is_refused_within_timed_out_transaction(
    manager: TransactionManager, one: ModelResource, propagation: Propagation, asynchronous: bool
) -> None:
    ran: list[str] = []

    @manager.transactional(propagation=propagation)
    def inner() -> None:
        ran.append("function")

    @manager.transactional(propagation=propagation)
    async def inner_async() -> None:
        ran.append("coroutine")

    def call() -> None:
        if asynchronous:
            asyncio.run(inner_async())
        else:
            inner()

    def outer() -> None:
        with manager.begin(TIMES_OUT_S) as transaction:
            transaction.enlist(one).append("outer")
            timed_out(transaction)
            with pytest.raises(TransactionTimedOut, match=transaction.id):
                call()

    with pytest.raises(TransactionTimedOut):
        outer()
    assert (ran, one.durable.committed, manager.active) == ([], [], 0)


@pytest.mark.parametrize("propagation", OUTSIDE)
def test_function_with_own_transaction_runs_within_timed_out_transaction(
    manager: TransactionManager, one: ModelResource, propagation: Propagation
) -> None:
    @manager.transactional(propagation=propagation)
    def inner() -> None:
        if propagation is Propagation.REQUIRES_NEW:
            manager.enlist(one).append("inner")

    def outer() -> None:
        with manager.begin(TIMES_OUT_S) as transaction:
            timed_out(transaction)
            inner()

    with pytest.raises(TransactionTimedOut):
        outer()
    assert one.durable.committed == (["inner"] if propagation is Propagation.REQUIRES_NEW else [])


def test_nested_block_and_current_transaction_are_refused_within_timed_out_transaction(
    manager: TransactionManager, one: ModelResource
) -> None:
    def nested() -> None:
        with manager.begin():
            manager.enlist(one).append("nested")

    def outer() -> None:
        with manager.begin(TIMES_OUT_S) as transaction:
            timed_out(transaction)
            for call in (nested, lambda: manager.current, lambda: manager.enlist(one), lambda: manager.suspended().__enter__()):
                with pytest.raises(TransactionTimedOut, match=transaction.id):
                    call()

    with pytest.raises(TransactionTimedOut):
        outer()
    assert (one.durable.committed, manager.active) == ([], 0)
    nested()
    assert one.durable.committed == ["nested"]


def test_async_work_and_child_task_are_refused_within_timed_out_transaction(manager: TransactionManager, one: ModelResource) -> None:
    shop = AsyncTransactionManager(manager)

    @shop.transactional()
    async def inner() -> None:
        (await shop.enlist(one)).append("inner")

    async def nested() -> None:
        async with shop.begin():
            (await shop.enlist(one)).append("nested")

    async def main() -> None:
        over, left = asyncio.Event(), asyncio.Event()

        async def child() -> None:
            await over.wait()
            with pytest.raises(TransactionTimedOut):
                await inner()
            await left.wait()
            await inner()  # the application knows about the timeout

        async with asyncio.timeout(WAIT_S):
            with suppress(TransactionTimedOut):
                async with shop.begin(TIMES_OUT_S) as transaction:
                    task = asyncio.create_task(child())
                    transaction.after_completion(lambda _: over.set())
                    await over.wait()
                    for call in (inner, nested):
                        with pytest.raises(TransactionTimedOut):
                            await call()
                    await asyncio.sleep(0)
            left.set()
            await task

    asyncio.run(main())
    assert one.durable.committed == ["inner"]


def test_outer_function_is_retried_as_a_whole_after_its_timeout(
    manager: TransactionManager, one: ModelResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_PAUSE_S", 0.0)
    attempts: list[Callable[[Transaction], None]] = [lambda _: None, timed_out]

    @manager.transactional()
    def inner() -> None:
        manager.enlist(one).append("inner")

    @manager.transactional(attempts=2, timeout_s=10 * TIMES_OUT_S)
    def outer() -> None:
        manager.enlist(one).append("outer")
        attempts.pop()(manager.current)
        inner()

    outer()
    assert one.durable.committed == ["outer", "inner"]
