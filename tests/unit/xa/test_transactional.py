"""Transactional functions whose call returns before their work runs. The work would run after the end of the transaction."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from bascule.core.errors import InvalidInput
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import Propagation, TransactionManager
from bascule.xa.aio import AsyncTransactionManager


@pytest.fixture
def one() -> ModelResource:
    return ModelResource("one")


@pytest.fixture
def manager(one: ModelResource) -> Iterator[TransactionManager]:
    with TransactionManager("shop", ModelLog(), [one]) as manager:
        yield manager


class Service:
    """A class whose instances are called like coroutine functions."""

    def __init__(self, manager: TransactionManager, resource: ModelResource) -> None:
        self.manager, self.resource = manager, resource

    async def __call__(self, what: str) -> str:
        self.manager.enlist(self.resource).append(what)
        await asyncio.sleep(0)
        assert self.resource.durable.committed == []
        return what


@pytest.mark.parametrize("wrap", [lambda service: service, lambda service: functools.partial(service, "work")], ids=["object", "partial"])
def test_callable_object_with_async_call_runs_in_transaction(
    manager: TransactionManager, one: ModelResource, wrap: Callable[[Any], Any]
) -> None:
    call = manager.transactional()(wrap(Service(manager, one)))
    assert asyncio.run(call() if isinstance(call.__wrapped__, functools.partial) else call("work")) == "work"
    assert one.durable.committed == ["work"]


@pytest.mark.parametrize("caller", [False, True], ids=["new", "joined"])
@pytest.mark.parametrize("propagation", [Propagation.REQUIRED, Propagation.NOT_SUPPORTED])
def test_function_that_returns_coroutine_is_refused_and_rolled_back(
    manager: TransactionManager, one: ModelResource, caller: bool, propagation: Propagation
) -> None:
    """For example, the wrapper of a decorator that does not support coroutines."""
    ran: list[str] = []

    async def work() -> None:
        ran.append("too late")

    @manager.transactional(propagation=propagation, attempts=3)
    def wrapper() -> Any:
        if propagation is Propagation.REQUIRED:
            manager.enlist(one).append("work")
        return work()

    def call() -> None:
        if caller:
            with manager.begin():
                wrapper()
        else:
            wrapper()

    with pytest.raises(InvalidInput, match=r"wrapper returned a coroutine.*async def"):
        call()
    assert (ran, one.durable.committed, manager.active) == ([], [], 0)


def test_function_that_returns_future_or_async_iterator_is_refused(manager: TransactionManager) -> None:
    async def rows() -> AsyncIterator[int]:
        yield 1

    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        for returns in (lambda: future, rows):
            with pytest.raises(InvalidInput, match="returned a"):
                manager.transactional()(lambda returns=returns: returns())()

    asyncio.run(main())
    assert manager.active == 0


def test_generator_function_is_refused_at_decoration(manager: TransactionManager) -> None:
    def rows() -> Iterator[int]:
        yield 1

    async def asynchronous_rows() -> AsyncIterator[int]:
        yield 1

    for decorate in (manager.transactional(), AsyncTransactionManager(manager).transactional()):
        for function in (rows, asynchronous_rows):
            with pytest.raises(InvalidInput, match=r"rows is a generator function"):
                decorate(function)  # type: ignore[arg-type]
