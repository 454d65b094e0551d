"""SQLAlchemy sessions that join the transaction: an application's own ``session.begin()`` within it, over PostgreSQL."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from bascule.embedded.postgres import EmbeddedPostgres
from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import Propagation, TransactionManager, TransactionRolledBack, TransactionTimedOut
from bascule.xa.aio import AsyncTransactionManager
from bascule.xa.errors import OutOfOrder
from bascule.xa.sqlalchemy import SqlAlchemyResource

WAIT_S = 20.0


class Base(sa.orm.DeclarativeBase):
    """Base of the mapped classes of the tests."""


class Payment(Base):
    """A row."""

    __tablename__ = "joined_payments"
    item: sa.orm.Mapped[str] = sa.orm.mapped_column(primary_key=True)


@pytest.fixture
def plain(postgres: EmbeddedPostgres) -> Iterator[sa.Engine]:
    engine = sa.create_engine(postgres.url)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture(params=[True, False], ids=["two-phase", "deciding"])
def shop(request: pytest.FixtureRequest, plain: sa.Engine) -> SqlAlchemyResource:
    return SqlAlchemyResource("db", plain, prepared=request.param)


@pytest.fixture(params=[True, False], ids=["with another", "alone"])
def broker(request: pytest.FixtureRequest) -> ModelResource | None:
    return ModelResource("broker") if request.param else None


@pytest.fixture
def manager(shop: SqlAlchemyResource, broker: ModelResource | None) -> Iterator[TransactionManager]:
    with TransactionManager("joined", ModelLog(), [shop, *([broker] if broker else [])]) as manager:
        yield manager


def items(plain: sa.Engine) -> list[str]:
    with Session(plain) as session:
        return list(session.scalars(sa.select(Payment.item).order_by(Payment.item)))


def enlist(manager: TransactionManager, broker: ModelResource | None) -> None:
    if broker is not None:
        manager.enlist(broker).append("message")


def test_rollback_of_the_handle_rolls_the_transaction_back(
    manager: TransactionManager, shop: SqlAlchemyResource, broker: ModelResource | None, plain: sa.Engine
) -> None:
    def work() -> None:
        with manager.begin():
            enlist(manager, broker)
            session = manager.enlist(shop)
            session.add(Payment(item="one"))
            session.flush()
            session.rollback()
            session.add(Payment(item="two"))

    with pytest.raises(TransactionRolledBack, match="the application rolled back its session"):
        work()
    assert items(plain) == []
    with manager.begin():
        with manager.enlist(shop) as session:
            session.add(Payment(item="kept"))
            session.commit()  # only of the session: the manager commits
            session.add(Payment(item="second"))
            session.flush()
        assert items(plain) == []
    assert items(plain) == ["kept", "second"]


# -- sessions of the application's own


def test_sessions_opened_in_a_transaction_join_the_transaction(
    manager: TransactionManager, shop: SqlAlchemyResource, broker: ModelResource | None, plain: sa.Engine
) -> None:
    sessions = sessionmaker(shop.engine)

    @manager.transactional()
    def work(suffix: str, *, fails: bool = False) -> None:
        enlist(manager, broker)
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(item=f"begin {suffix}"))
        with sessions.begin() as session:
            session.add(Payment(item=f"maker {suffix}"))
            with session.begin_nested() as nested:
                session.add(Payment(item="undone"))
                session.flush()
                nested.rollback()
        with sessions() as session:
            session.add(Payment(item=f"commit {suffix}"))
            session.commit()
        with shop.engine.begin() as connection:
            connection.execute(sa.insert(Payment).values(item=f"core {suffix}"))
        with shop.engine.execution_options(logging_token="here").connect() as connection:
            connection.execute(sa.insert(Payment).values(item=f"core, committed {suffix}"))
            connection.commit()
        with sessions() as session:  # a session that only reads needs no commit
            assert len(session.scalars(sa.select(Payment).where(Payment.item.endswith(suffix))).all()) == 5
        assert [item for item in items(plain) if item.endswith(suffix)] == []
        if fails:
            raise LookupError

    work("one")
    with pytest.raises(LookupError):
        work("two", fails=True)
    assert items(plain) == ["begin one", "commit one", "core one", "core, committed one", "maker one"]
    if broker is not None:
        assert broker.durable.committed == ["message"]


def test_session_outside_of_a_transaction_commits_independently(
    manager: TransactionManager, shop: SqlAlchemyResource, broker: ModelResource | None, plain: sa.Engine
) -> None:
    def alone(item: str) -> None:
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(item=item))

    alone("before")
    with suppress(LookupError), manager.begin():
        alone("undone")
        manager.transactional(propagation=Propagation.NOT_SUPPORTED)(alone)("suspended")
        manager.transactional(propagation=Propagation.REQUIRES_NEW)(alone)("new")
        raise LookupError
    with manager.begin() as running:
        alone("within")
        context = contextvars.copy_context()
        running.commit()
        alone("after the commit")
    context.run(alone, "of a task that outlives it")
    assert items(plain) == ["after the commit", "before", "new", "of a task that outlives it", "suspended", "within"]


def give_up(session: Session) -> None:
    session.add(Payment(item="one"))
    raise LookupError


def write_and_give_up(session: Session) -> None:
    session.add(Payment(item="one"))
    session.flush()
    raise LookupError


@pytest.mark.parametrize("fails", [give_up, write_and_give_up])
def test_rollback_of_a_joined_postgresql_session_rolls_the_transaction_back(
    manager: TransactionManager, shop: SqlAlchemyResource, broker: ModelResource | None, plain: sa.Engine, fails: Any
) -> None:
    def work() -> None:
        with manager.begin():
            enlist(manager, broker)
            with Session(shop.engine) as session, session.begin():
                session.add(Payment(item="kept"))
            with suppress(LookupError), Session(shop.engine) as session, session.begin():
                fails(session)

    with pytest.raises(TransactionRolledBack, match="the application rolled back its session"):
        work()
    assert items(plain) == []
    assert broker is None or broker.durable.committed == []


@pytest.mark.parametrize("core", [False, True])
def test_postgresql_session_closed_with_uncommitted_changes_rolls_the_transaction_back(
    manager: TransactionManager, shop: SqlAlchemyResource, broker: ModelResource | None, plain: sa.Engine, core: bool
) -> None:
    def work() -> None:
        with manager.begin(), shop.engine.connect() if core else Session(shop.engine) as session:
            enlist(manager, broker)
            session.execute(sa.text("WITH written AS (SELECT 1) INSERT INTO joined_payments VALUES ('one')"))

    with pytest.raises(TransactionRolledBack, match="session with uncommitted changes was closed"):
        work()
    assert items(plain) == []


def test_session_that_outlives_its_transaction_writes_nothing_into_the_next_transaction(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    with manager.begin():
        old = Session(shop.engine)
        old.add(Payment(item="old"))
        old.flush()
        old.commit()
        old.scalars(sa.select(Payment)).all()
    with manager.begin():
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(item="new"))
        old.add(Payment(item="late"))
        with pytest.raises(sa.exc.SQLAlchemyError):
            old.flush()
        old.rollback()
    old.close()
    assert items(plain) == ["new", "old"]


def test_postgresql_session_is_refused_after_the_transaction_timeout(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    def work() -> None:
        over = Event()
        with manager.begin(timeout_s=0.3) as running:
            with Session(shop.engine) as session, session.begin():
                session.add(Payment(item="one"))
            running.after_completion(lambda _: over.set())
            assert over.wait(WAIT_S)
            with pytest.raises(TransactionTimedOut), Session(shop.engine) as session, session.begin():
                session.add(Payment(item="two"))

    with pytest.raises(TransactionTimedOut):
        work()
    assert items(plain) == []


def test_session_of_a_thread_with_the_transaction_context_joins_the_transaction(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    def add(item: str) -> None:
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(item=item))

    with suppress(LookupError), manager.begin():
        context = contextvars.copy_context()
        in_background(lambda: context.run(add, "within"), "test-within").result(WAIT_S)
        in_background(lambda: add("outside"), "test-outside").result(WAIT_S)
        raise LookupError
    assert items(plain) == ["outside"]


# -- asyncio


def test_async_sessions_opened_in_a_transaction_join_the_transaction(
    manager: TransactionManager, shop: SqlAlchemyResource, broker: ModelResource | None, plain: sa.Engine
) -> None:
    shop_async = AsyncTransactionManager(manager)

    async def add(item: str, *, fails: bool = False) -> None:
        async with AsyncSession(shop.async_engine) as session, session.begin():
            session.add(Payment(item=item))
            if fails:
                raise LookupError

    async def rolled_back() -> None:
        async with shop_async.begin():
            await add("kept")
            with suppress(LookupError):
                await add("given up", fails=True)

    async def mixed() -> None:
        async with shop_async.begin():
            await add("one")
            with Session(shop.engine) as session, session.begin():
                session.add(Payment(item="two"))

    async def main() -> None:
        await add("before")
        async with shop_async.begin() as transaction:
            if broker is not None:
                (await transaction.enlist(broker)).append("message")
            await add("within")
            (await transaction.enlist(shop)).add(Payment(item="handle"))
            async with AsyncSession(shop.async_engine) as session:
                assert len((await session.scalars(sa.select(Payment))).all()) >= 2
        with suppress(LookupError):
            async with shop_async.begin():
                await add("undone")
                raise LookupError
        with pytest.raises(TransactionRolledBack, match="rolled back its session"):
            await rolled_back()
        with pytest.raises(OutOfOrder, match="both by an event loop and by threads"):
            await mixed()

    asyncio.run(main())
    assert items(plain) == ["before", "handle", "within"]
    if broker is not None:
        assert broker.durable.committed == ["message"]


def test_async_session_begun_before_the_transaction_is_refused_within_it(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    async def main() -> None:
        async with AsyncSession(shop.async_engine) as early:
            await early.scalars(sa.select(Payment))
            async with AsyncTransactionManager(manager).begin():
                with pytest.raises(OutOfOrder, match="takes no part in the transaction"):
                    await early.execute(sa.insert(Payment).values(item="one"))
                async with AsyncSession(shop.async_engine) as session, session.begin():
                    session.add(Payment(item="two"))
            await early.execute(sa.insert(Payment).values(item="three"))
            await early.commit()

    asyncio.run(main())
    assert items(plain) == ["three", "two"]
