"""SQLAlchemy sessions on SQLite, whose commit decides the transaction. ``test_xa_mariadb.py`` has the same with MariaDB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from bascule.core.errors import InvalidInput
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.errors import OutOfOrder
from bascule.xa.log import LogState
from bascule.xa.sqlalchemy_local import SqlAlchemyLocalResource


class Base(DeclarativeBase):
    """The base class of the mapped classes."""


class LocalPayment(Base):
    """A row of the table of payments."""

    __tablename__ = "payments"
    item: Mapped[str] = mapped_column(primary_key=True)


class Killed(GeneratorExit):
    """The process has ended here."""


class SessionShop:
    """A SQLite database, and a model of a broker. ``killed_at`` is the point of the broker at which the process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.durable, self.log = DurableBranches(), ModelLog(LogState(log_id="aaaaaaaa"))
        self.killed_at = ""
        self.engine = self._engine()
        Base.metadata.create_all(self.engine)

    def process(self) -> tuple[TransactionManager, SqlAlchemyLocalResource, ModelResource]:
        database, broker = SqlAlchemyLocalResource("db", self._engine()), ModelResource("broker", self.durable, watch=self._watch)
        return TransactionManager("shop", self.log, [database, broker]), database, broker

    def items(self) -> list[str]:
        with Session(self.engine) as session:
            return list(session.scalars(sa.select(LocalPayment.item).order_by(LocalPayment.item)))

    def _engine(self) -> sa.Engine:
        return sa.create_engine(f"sqlite:///{self._path}", connect_args={"timeout": 0.2})

    def _watch(self, point: str) -> None:
        if point == self.killed_at:
            raise Killed


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[SessionShop]:
    shop = SessionShop(tmp_path / "shop.sqlite")
    yield shop
    shop.engine.dispose()


def pay(manager: TransactionManager, database: SqlAlchemyLocalResource, broker: ModelResource) -> None:
    with manager.begin() as transaction:
        transaction.enlist(broker).append("message")
        with Session(database.engine) as session, session.begin():
            session.add(LocalPayment(item="one"))


def leave_session(database: SqlAlchemyLocalResource, rolls_back: bool) -> None:
    session = Session(database.engine)
    session.execute(sa.insert(LocalPayment).values(item="one"))
    if rolls_back:
        session.rollback()
    session.close()


def test_sessions_of_application_work_in_transaction_and_manager_commits(shop: SessionShop) -> None:
    manager, database, broker = shop.process()
    new_session = sessionmaker(database.engine)
    with manager:
        with manager.begin() as transaction:
            transaction.enlist(broker).append("message")
            with new_session.begin() as session:
                session.add(LocalPayment(item="one"))
            with Session(database.engine) as session:
                assert session.get(LocalPayment, "one") is not None
                with pytest.raises(IntegrityError), session.begin_nested():
                    session.execute(sa.insert(LocalPayment).values(item="one"))
                session.add(LocalPayment(item="two"))
                session.commit()
            transaction.enlist(database).add(LocalPayment(item="three"))
            assert shop.items() == []
        assert shop.items() == ["one", "three", "two"]
        with new_session.begin() as session:  # outside of a transaction
            session.add(LocalPayment(item="zero"))
    assert (shop.items(), shop.durable.committed) == (["one", "three", "two", "zero"], ["message"])


def test_transaction_rolled_back_by_other_resource_takes_committed_session_back(shop: SessionShop) -> None:
    manager, database, broker = shop.process()
    broker.vote = "no"
    with manager, pytest.raises(TransactionRolledBack):
        pay(manager, database, broker)
    assert (shop.items(), shop.durable.committed) == ([], [])


@pytest.mark.parametrize("rolls_back", [False, True])
def test_session_rolled_back_or_left_uncommitted_prevents_commit(shop: SessionShop, rolls_back: bool) -> None:
    manager, database, _ = shop.process()
    with manager:
        transaction = manager.begin()
        with pytest.raises(TransactionRolledBack), transaction:
            leave_session(database, rolls_back)
    assert (shop.items(), shop.durable.committed) == ([], [])


@pytest.mark.parametrize(("point", "items"), [("broker.prepare.after", []), ("broker.commit.before", ["one"])])
def test_recovery_follows_decision_of_killed_process(shop: SessionShop, point: str, items: list[str]) -> None:
    manager, database, broker = shop.process()
    shop.killed_at = point
    manager.open()
    with pytest.raises(Killed):
        pay(manager, database, broker)
    shop.killed_at = ""
    for work in database._work.values():  # as the end of the process would
        work.close(reusable=False)
    manager.close()
    again, *_ = shop.process()
    with again:
        assert shop.items() == items
    assert (shop.durable.committed, shop.durable.prepared) == (["message"] if items else [], {})


def test_session_that_outlives_its_transaction_is_refused(shop: SessionShop) -> None:
    manager, database, _ = shop.process()
    with manager:
        with manager.begin():
            session = Session(database.engine)
            session.execute(sa.insert(LocalPayment).values(item="one"))
            session.commit()
            session.execute(sa.select(LocalPayment))
        with pytest.raises(StatementError, match="is over"):
            session.execute(sa.insert(LocalPayment).values(item="two"))
        session.close()
    assert shop.items() == ["one"]


def test_other_databases_are_refused() -> None:
    with pytest.raises(InvalidInput, match="is not supported"):
        SqlAlchemyLocalResource("db", sa.create_engine("postgresql+psycopg://"))


def test_session_begun_before_the_transaction_is_refused_within_it(shop: SessionShop) -> None:
    manager, database, broker = shop.process()
    with manager, Session(database.engine) as early:
        early.scalars(sa.select(LocalPayment)).all()
        with manager.begin() as transaction:
            transaction.enlist(broker).append("message")
            early.add(LocalPayment(item="one"))
            with pytest.raises(OutOfOrder, match="takes no part in the transaction"):
                early.flush()
        early.rollback()
    assert (shop.items(), shop.durable.committed) == ([], ["message"])


def test_session_of_the_branch_works_while_another_one_is_flushed_by_the_commit(shop: SessionShop) -> None:
    manager, database, _ = shop.process()
    with manager:
        with manager.begin() as transaction:
            handle, session = transaction.enlist(database), Session(database.engine)
            session.scalars(sa.select(LocalPayment)).all()

            @sa.event.listens_for(handle, "before_flush")
            def audit(*_: object) -> None:
                session.execute(sa.insert(LocalPayment).values(item="audit"))

            handle.add(LocalPayment(item="one"))
        session.close()
    assert shop.items() == ["audit", "one"]
