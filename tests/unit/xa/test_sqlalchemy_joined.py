"""Sessions that join the transaction, with SQLite in place of PostgreSQL. ``scenarios/test_xa_sqlalchemy.py`` uses PostgreSQL."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

import sqlalchemy as sa
from psycopg.pq import TransactionStatus
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import Propagation, TransactionManager, TransactionRolledBack, TransactionTimedOut
from bascule.xa.errors import OutOfOrder
from bascule.xa.sqlalchemy import SqlAlchemyResource
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


class Base(DeclarativeBase):
    """The base class of the mapped classes."""


class Payment(Base):
    """A row of the table of payments."""

    __tablename__ = "payments"
    item: Mapped[str] = mapped_column(primary_key=True)


class Cursor:
    """A cursor that reports the statement that it has executed, like the cursor of psycopg."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.statusmessage: str | None = None

    def execute(self, query: str, parameters: Any = ()) -> Any:
        if "::" in query or "pg_" in query or query.startswith("SHOW"):  # the queries of the resource itself
            query, parameters = "SELECT '1', '1'", ()
        self._raw.execute(query, parameters)
        self.statusmessage = query.split()[0]
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class Connection:
    """The part of psycopg's connection that the resource uses. A copy uses the same session until it gets another ``pgconn``."""

    def __init__(self, path: Path) -> None:
        self.raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.pgconn: Any = SimpleNamespace(backend_pid=4711, alive=True)
        self.info = SimpleNamespace(transaction_status=TransactionStatus.INTRANS)
        self.lock = threading.Lock()

    def __copy__(self) -> Connection:
        second = object.__new__(Connection)
        second.__dict__ |= self.__dict__
        return second

    def xid(self, *parts: object) -> str:
        return str(parts)

    def cursor(self, **_: Any) -> Cursor:
        assert self.pgconn.alive
        return Cursor(self.raw.cursor())

    def execute(self, _statement: str, *, prepare: bool = True) -> None: ...

    def tpc_begin(self, _xid: str) -> None:
        self.raw.execute("BEGIN")

    def tpc_prepare(self) -> None: ...

    def tpc_commit(self) -> None:
        self.raw.execute("COMMIT")

    def tpc_rollback(self) -> None:
        self.raw.execute("ROLLBACK")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[sa.Engine]:
    path = tmp_path / "shop.sqlite3"
    on_disk = sa.create_engine(f"sqlite:///{path}")
    Base.metadata.create_all(on_disk)
    on_disk.dispose()
    engine = sa.create_engine("sqlite://", creator=lambda: Connection(path), poolclass=sa.QueuePool)
    engine.dialect.driver = "psycopg"
    yield engine
    engine.dispose()


@pytest.fixture
def shop(plain: sa.Engine) -> SqlAlchemyResource:
    return SqlAlchemyResource("db", plain, prepared=True)


@pytest.fixture
def broker() -> ModelResource:
    return ModelResource("broker")


@pytest.fixture
def manager(shop: SqlAlchemyResource, broker: ModelResource, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransactionManager]:
    monkeypatch.setattr(shop, "check", lambda: None)
    monkeypatch.setattr(shop, "listed", lambda _raw: [])
    with TransactionManager("shop", ModelLog(), [shop, broker]) as manager:
        yield manager


def pay(shop: SqlAlchemyResource, item: str) -> None:
    with sessionmaker(shop.engine).begin() as session:
        session.add(Payment(item=item))


def items(plain: sa.Engine) -> list[str]:
    with plain.connect() as connection:
        return list(connection.scalars(sa.select(Payment.item).order_by(Payment.item)))


def test_sqlalchemy_sessions_join_current_transaction(
    manager: TransactionManager, shop: SqlAlchemyResource, broker: ModelResource, plain: sa.Engine
) -> None:
    def work(item: str) -> None:
        with manager.begin():
            manager.enlist(broker).append(item)
            pay(shop, item)
            manager.enlist(shop).add(Payment(item=f"{item}, by the handle"))
            with shop.engine.execution_options(stream_results=False).begin() as connection:
                connection.execute(sa.insert(Payment).values(item=f"{item}, by Core"))
            with Session(shop.engine) as session:  # a session that only reads needs no commit
                assert session.get(Payment, item) is not None
            if item == "undone":
                raise LookupError

    work("kept")
    with suppress(LookupError):
        work("undone")
    assert items(plain) == ["kept", "kept, by Core", "kept, by the handle"]
    assert broker.durable.committed == ["kept"]


def test_sqlalchemy_sessions_outside_of_transaction_commit_independently(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    pay(shop, "before")
    with manager.begin() as running:
        manager.transactional(propagation=Propagation.NOT_SUPPORTED)(pay)(shop, "suspended")
        pay(shop, "within")
        running.commit()
        pay(shop, "after")
    assert items(plain) == ["after", "before", "suspended", "within"]


@pytest.mark.parametrize("first", [False, True], ids=["alone", "after another session"])
@pytest.mark.parametrize("sent", [False, True], ids=["not sent", "sent"])
def test_session_rollback_rolls_back_the_transaction(
    manager: TransactionManager, shop: SqlAlchemyResource, broker: ModelResource, plain: sa.Engine, first: bool, sent: bool
) -> None:
    def work() -> None:
        with manager.begin():
            manager.enlist(broker).append("message")
            if first:
                pay(shop, "first")
            with suppress(LookupError), Session(shop.engine) as session, session.begin():
                session.add(Payment(item="given up"))
                if sent:
                    session.flush()
                raise LookupError

    with pytest.raises(TransactionRolledBack, match="rolled back its session" if first or sent else "marked for rollback"):
        work()
    assert items(plain) == broker.durable.committed == []


def test_session_closed_with_uncommitted_changes_rolls_back_the_transaction(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    def work() -> None:
        with manager.begin(), Session(shop.engine) as session:
            session.execute(sa.insert(Payment).values(item="one"))

    with pytest.raises(TransactionRolledBack, match="session with uncommitted changes was closed"):
        work()
    assert items(plain) == []


def test_rollback_of_session_that_outlives_its_transaction_does_not_affect_next_transaction(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    with manager.begin():
        old = Session(shop.engine)
        old.scalars(sa.select(Payment)).all()
        session = manager.enlist(shop)
    with manager.begin():
        pay(shop, "new")
        with pytest.raises(sa.exc.StatementError, match="transaction of this connection is over"):
            old.scalars(sa.select(Payment)).all()
        with pytest.raises(sa.exc.ResourceClosedError):
            session.scalars(sa.select(Payment)).all()
        old.rollback()
    assert items(plain) == ["new"]


def test_session_is_refused_after_transaction_timeout(manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine) -> None:
    def work() -> None:
        over = threading.Event()
        with manager.begin(timeout_s=0.1) as running:
            pay(shop, "one")
            running.after_completion(lambda _: over.set())
            assert over.wait(WAIT_S)
            with pytest.raises(TransactionTimedOut):
                pay(shop, "two")

    with pytest.raises(TransactionTimedOut):
        work()
    assert items(plain) == []


def begun_session(shop: SqlAlchemyResource) -> Any:
    session = Session(shop.engine)
    session.scalars(sa.select(Payment)).all()
    return session


@pytest.mark.parametrize("begin", [begun_session, lambda shop: shop.engine.connect()], ids=["session", "connection"])
def test_session_or_connection_begun_before_the_transaction_is_refused_within_it(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine, begin: Callable[[SqlAlchemyResource], Any]
) -> None:
    early = begin(shop)
    with manager.begin():
        with pytest.raises(OutOfOrder, match="takes no part in the transaction"):
            early.execute(sa.insert(Payment).values(item="one"))
        manager.transactional(propagation=Propagation.NOT_SUPPORTED)(early.execute)(sa.select(Payment))
        pay(shop, "two")
    early.execute(sa.insert(Payment).values(item="three"))
    early.commit()
    early.close()
    assert items(plain) == ["three", "two"]


def test_session_of_a_suspended_transaction_is_refused_in_another_transaction(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    with manager.begin(), Session(shop.engine) as session, session.begin():
        session.add(Payment(item="outer"))
        session.flush()
        with manager.suspended(), manager.begin(), pytest.raises(OutOfOrder, match="takes no part in the transaction"):
            session.scalars(sa.select(Payment)).all()
    assert items(plain) == ["outer"]


def test_session_of_the_branch_works_while_another_one_is_flushed_by_the_commit(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    with manager.begin() as transaction:
        handle, session = transaction.enlist(shop), begun_session(shop)

        @sa.event.listens_for(handle, "before_flush")
        def audit(*_: object) -> None:
            session.execute(sa.insert(Payment).values(item="audit"))

        handle.add(Payment(item="one"))
    session.close()
    assert items(plain) == ["audit", "one"]


def test_rollback_of_session_without_connection_counts_while_another_one_is_flushed_by_the_commit(
    manager: TransactionManager, shop: SqlAlchemyResource, plain: sa.Engine
) -> None:
    with manager.begin() as transaction:
        handle = transaction.enlist(shop)

        @sa.event.listens_for(handle, "before_flush")
        def audit(*_: object) -> None:
            with suppress(ValueError), Session(shop.engine) as session, session.begin():
                session.add(Payment(item="audit"))
                raise ValueError

        handle.add(Payment(item="one"))
        with pytest.raises(TransactionRolledBack, match="the application rolled back its session"):
            transaction.commit()
    assert items(plain) == []
    assert shop._begun == {}


def test_driver_connection_of_the_engine_is_refused_within_a_transaction(manager: TransactionManager, shop: SqlAlchemyResource) -> None:
    with manager.begin(), pytest.raises(OutOfOrder, match="takes no part in the transaction"):
        shop.engine.raw_connection()
    shop.engine.raw_connection().close()
