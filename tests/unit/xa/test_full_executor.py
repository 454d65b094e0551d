"""An event loop whose default executor has no free thread: its threads may wait for locks of the transaction that is to end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager
from bascule.xa.aio import AsyncTransactionManager
from bascule.xa.kafka import AsyncKafkaBranch, KafkaBranch
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


@contextmanager
def full_executor() -> Iterator[None]:
    """Occupy the only thread of the executor of the running loop."""
    executor, free = ThreadPoolExecutor(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(executor)
    executor.submit(free.wait, WAIT_S)
    try:
        yield
    finally:
        free.set()


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        with full_executor():
            async with asyncio.timeout(WAIT_S / 4):
                await main

    asyncio.run(bounded())


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking manager", "asyncio manager"])
def test_transaction_ends_while_executor_of_loop_is_full(blocking: bool) -> None:
    one = ModelResource("one")
    with TransactionManager("shop", ModelLog(), [one]) as manager:

        async def main() -> None:
            async with (manager if blocking else AsyncTransactionManager(manager)).begin():
                manager.enlist(one).append("work")
            with pytest.raises(LookupError):
                await fail()

        async def fail() -> None:
            async with manager.begin():
                manager.enlist(one).append("rolled back")
                raise LookupError

        run(main())
    assert one.durable.committed == ["work"]


def test_transactional_coroutine_ends_while_executor_of_loop_is_full() -> None:
    one = ModelResource("one")
    with TransactionManager("shop", ModelLog(), [one]) as manager:

        @manager.transactional()
        async def work() -> None:
            manager.enlist(one).append("work")

        run(work())
    assert one.durable.committed == ["work"]


def test_record_is_sent_to_kafka_while_executor_of_loop_is_full() -> None:
    sent: list[object] = []
    run(AsyncKafkaBranch(KafkaBranch(sent.append), nullcontext).send("orders", b"paid"))
    assert len(sent) == 1
