"""Blocks that end in another context than they began in: generators that a framework resumes in another thread or task."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import TransactionManager
from bascule.xa.aio import AsyncTransactionManager
from bascule.xa.context_value import ContextValue
from bascule.xa.errors import NoTransaction
from bascule.xa.sqlalchemy_local import SqlAlchemyLocalResource
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


@pytest.fixture
def one() -> ModelResource:
    return ModelResource("one")


@pytest.fixture
def manager(one: ModelResource) -> Iterator[TransactionManager]:
    with TransactionManager("shop", ModelLog(), [one]) as manager:
        yield manager


def in_copy(call: Callable[[], Any]) -> Any:
    """Call in a copy of the context, as a framework does that runs each step of a generator in a thread pool."""
    return contextvars.copy_context().run(call)


def in_other_thread(call: Callable[[], Any]) -> Any:
    return in_background(call, "other").result(WAIT_S)


@pytest.mark.parametrize("run", [in_copy, in_other_thread])
def test_block_that_ends_in_other_context_commits_without_error(
    manager: TransactionManager, one: ModelResource, run: Callable[[Callable[[], Any]], Any]
) -> None:
    def dependency() -> Generator[None]:
        with manager.begin():
            manager.enlist(one).append("work")
            yield

    steps = dependency()
    run(lambda: next(steps))
    run(lambda: next(steps, None))
    assert one.durable.committed == ["work"]
    with manager.begin():
        manager.enlist(one).append("next")
    assert one.durable.committed == ["work", "next"]


@pytest.mark.parametrize("run", [in_copy, in_other_thread])
def test_error_passes_through_block_that_ends_in_other_context(
    manager: TransactionManager, one: ModelResource, run: Callable[[Callable[[], Any]], Any]
) -> None:
    def dependency() -> Generator[None]:
        with manager.begin():
            manager.enlist(one).append("work")
            yield

    steps = dependency()
    run(lambda: next(steps))
    with pytest.raises(LookupError):
        run(lambda: steps.throw(LookupError("of the request")))
    assert (one.durable.committed, manager.active) == ([], 0)


@pytest.mark.parametrize("blocking", [True, False])
def test_async_block_that_ends_in_other_task_commits_without_error(manager: TransactionManager, one: ModelResource, blocking: bool) -> None:
    shop: Any = manager if blocking else AsyncTransactionManager(manager)

    @asynccontextmanager
    async def fixture() -> AsyncIterator[None]:
        async with shop.begin():
            enlisted = shop.enlist(one)
            (enlisted if blocking else await enlisted).append("work")
            yield

    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            block = fixture()
            await asyncio.create_task(block.__aenter__())
            await asyncio.create_task(block.__aexit__(None, None, None))

    asyncio.run(main())
    assert one.durable.committed == ["work"]


def test_suspended_block_that_ends_in_other_context_raises_no_error(manager: TransactionManager) -> None:
    def steps() -> Iterator[None]:
        with manager.suspended():
            yield

    with manager.begin() as transaction:
        suspended = steps()
        in_copy(lambda: next(suspended))
        in_copy(lambda: next(suspended, None))
        assert manager.current is transaction


def test_session_of_engine_that_follows_transaction_commits_in_other_context(tmp_path: Path) -> None:
    plain = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with plain.begin() as connection:
        connection.execute(sa.text("CREATE TABLE payments (item TEXT)"))
    shop = SqlAlchemyLocalResource("shop", plain)
    with TransactionManager("shop", ModelLog(), [shop]) as manager:

        def dependency() -> Generator[None]:
            with manager.begin():
                manager.enlist(shop).execute(sa.text("INSERT INTO payments VALUES ('one')"))
                yield

        steps = dependency()
        in_copy(lambda: next(steps))
        in_copy(lambda: next(steps, None))
    with plain.connect() as connection:
        assert connection.execute(sa.text("SELECT item FROM payments")).scalars().all() == ["one"]


# -- the value itself


def test_value_is_restored_where_context_has_inherited_setting() -> None:
    value: ContextValue[str] = ContextValue("test")
    value.set("outer")
    undo = value.set("inner")

    def inherited() -> str | None:
        undo()
        return value.get()

    assert in_copy(inherited) == "outer"
    assert value.get() == "inner"
    undo()
    assert value.get() == "outer"


def test_context_without_setting_keeps_its_own_value() -> None:
    value: ContextValue[str] = ContextValue("test")
    undo = value.set(None)
    seen: list[str | None] = []

    def other() -> None:
        value.set("own")
        undo()
        seen.append(value.get())

    thread = threading.Thread(target=lambda: contextvars.Context().run(other))
    thread.start()
    thread.join(WAIT_S)
    assert seen == ["own"]


def test_ended_transaction_is_not_current_in_context_that_began_it(manager: TransactionManager) -> None:
    def dependency() -> Generator[None]:
        with manager.begin():
            yield

    steps = dependency()
    next(steps)
    in_copy(lambda: next(steps, None))
    with pytest.raises(NoTransaction):
        manager.current  # noqa: B018 - it raises
    with manager.begin():
        pass
