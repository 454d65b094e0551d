"""asyncio programs in transactions over PostgreSQL, the broker and Kafka: AsyncConnection, AsyncSession, the asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
import sqlalchemy.orm

from bascule.client import IllegalState, Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.kafka.history import TopicHistory
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.aio import AsyncTransactionManager
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from bascule.xa.postgres import PostgresResource
from tests.scenarios.topics import create
from tests.support.client import SOON_S
from tests.support.postgres import items
from tests.support.speed import SLOWNESS
from tests.support.system import PYTHON_FAILOVER, System

WAIT_S = 60.0 * SLOWNESS
Main = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture
def database(postgres: EmbeddedPostgres) -> Iterator[PostgresResource]:
    resource = PostgresResource("db", postgres.conninfo)
    yield resource
    resource.close()


def managing(*resources: Any) -> AsyncTransactionManager:
    return AsyncTransactionManager(TransactionManager("aio", ModelLog(), resources))


def run(main: Main) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await main()

    asyncio.run(bounded())


def test_asyncio_transaction_commits_messages_row_and_record_together(
    system: System, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, database: PostgresResource, table: str, name: str, topic_prefix: str
) -> None:
    orders, bills, topic = Queue(f"{name}.in"), Queue(f"{name}.out"), topic_prefix
    create(kafka.bootstrap, topic)
    url = PYTHON_FAILOVER.format(system.url)
    broker, records = JmsResource("broker", url, timeout_s=SOON_S), KafkaResource("kafka", {"bootstrap.servers": kafka.bootstrap})
    with connect(url) as context:
        context.send(orders, "order")

    async def pay(manager: AsyncTransactionManager, *, fails: bool) -> None:
        async with manager.begin(timeout_s=WAIT_S) as transaction:
            jms = await transaction.enlist(broker)
            order = await (await jms.consumer(orders)).receive(SOON_S)
            assert order is not None
            connection = await transaction.enlist(database)
            await connection.execute(f"INSERT INTO {table} VALUES (%s)", (order.body,))
            await (await transaction.enlist(records)).send(topic, b"record")
            await jms.send(bills, "bill")
            if fails:
                raise LookupError
        with pytest.raises(IllegalState, match="has ended"):
            await jms.send(bills, "late")
        with pytest.raises(psycopg.OperationalError, match="closed"):
            await connection.execute("SELECT 1")

    async def main() -> None:
        async with managing(broker, database, records) as manager:
            with pytest.raises(LookupError):
                await pay(manager, fails=True)
            assert items(postgres, table) == []
            await pay(manager, fails=False)

    run(main)
    broker.close()
    records.close()
    assert items(postgres, table) == ["order"]
    assert [record.value() for record in TopicHistory({"bootstrap.servers": kafka.bootstrap}, topic, 0).records(0, 1)] == [b"record"]
    with connect(url) as context:
        assert [message.body for message in context.browse(bills)] == ["bill"]
        assert [message.body for message in context.browse(orders)] == []


def test_cancelled_receive_leaves_its_connection_usable_for_the_next_transaction(system: System, name: str) -> None:
    queue = Queue(name)
    broker = JmsResource("broker", PYTHON_FAILOVER.format(system.url), timeout_s=SOON_S)

    async def main() -> None:
        async with managing(broker) as manager:
            with suppress(TimeoutError):
                async with manager.begin() as transaction:
                    async with asyncio.timeout(0.1):
                        await (await (await transaction.enlist(broker)).consumer(queue)).receive(SOON_S)
            async with manager.begin() as transaction:
                await (await transaction.enlist(broker)).send(queue, "one")
            async with manager.begin() as transaction:
                message = await (await (await transaction.enlist(broker)).consumer(queue)).receive(SOON_S)
                assert message is not None
                assert message.body == "one"

    run(main)
    broker.close()


def test_async_handle_refuses_commit_and_rollback_and_supports_savepoints(
    postgres: EmbeddedPostgres, database: PostgresResource, table: str
) -> None:
    async def main() -> None:
        other = ModelResource("other")
        async with managing(database, other) as manager, manager.begin() as transaction:
            (await transaction.enlist(other)).append("work")
            connection = await transaction.enlist(database)
            for call in (connection.commit, connection.rollback):
                with pytest.raises(psycopg.ProgrammingError):
                    await call()
            async with connection.transaction():
                await connection.execute(f"INSERT INTO {table} VALUES ('kept')")
            with suppress(LookupError):
                async with connection.transaction():
                    await connection.execute(f"INSERT INTO {table} VALUES ('undone')")
                    raise LookupError

    run(main)
    assert items(postgres, table) == ["kept"]


def test_prepared_statements_of_the_driver_do_not_collide_on_a_reused_session(database: PostgresResource, table: str) -> None:
    async def main() -> None:
        async with managing(database) as manager:
            for round_ in range(4):
                async with manager.begin() as transaction:
                    connection = await transaction.enlist(database)
                    for number in range(8):
                        await connection.execute(f"INSERT INTO {table} VALUES (%s || %s)", (str(round_), str(number)))
                with manager.blocking.begin() as blocking:
                    for number in range(8):
                        blocking.enlist(database).execute(f"SELECT item, {round_} FROM {table} WHERE item = %s", (str(number),))

    run(main)


def test_transaction_ending_during_a_statement_of_another_task_is_rolled_back(
    postgres: EmbeddedPostgres, database: PostgresResource, table: str
) -> None:
    async def main() -> None:
        async with managing(database) as manager:
            left: list[asyncio.Task[Any]] = []

            async def work() -> None:
                async with manager.begin() as transaction:
                    connection = await transaction.enlist(database)
                    await connection.execute(f"INSERT INTO {table} VALUES ('undone')")
                    left.append(asyncio.create_task(connection.execute("SELECT pg_sleep(30)")))
                    while not connection.lock.locked():
                        await asyncio.sleep(0)

            with pytest.raises(TransactionRolledBack, match="still using"):
                await work()
            with pytest.raises(psycopg.OperationalError):
                await left[0]
            async with manager.begin() as transaction:
                await (await transaction.enlist(database)).execute(f"INSERT INTO {table} VALUES ('next')")

    run(main)
    assert items(postgres, table) == ["next"]


# -- SQLAlchemy


class Base(sa.orm.DeclarativeBase):
    """Base of the mapped classes of the tests."""


class Payment(Base):
    """A row."""

    __tablename__ = "aio_payments"
    item: sa.orm.Mapped[str] = sa.orm.mapped_column(primary_key=True)


@pytest.fixture
def alchemy(postgres: EmbeddedPostgres) -> Iterator[Any]:
    from bascule.xa.sqlalchemy import SqlAlchemyResource

    engine = sa.create_engine(postgres.url)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    yield SqlAlchemyResource("db", engine)
    engine.dispose()


@pytest.mark.parametrize("alone", [False, True], ids=["two-phase", "one-phase"])
def test_objects_of_an_async_session_are_part_of_the_transaction(postgres: EmbeddedPostgres, alchemy: Any, alone: bool) -> None:
    async def main() -> None:
        other = ModelResource("other")
        async with managing(alchemy, other) as manager:
            for item, fails in (("undone", True), ("kept", False), ("second", False)):
                with suppress(LookupError):
                    async with manager.begin() as transaction:
                        if not alone:
                            (await transaction.enlist(other)).append(item)
                        session = await transaction.enlist(alchemy)
                        session.add(Payment(item=item))
                        assert (await session.scalars(sa.select(Payment.item))).all()[-1] == item
                        if fails:
                            raise LookupError
            assert other.durable.committed == ([] if alone else ["kept", "second"])

    run(main)
    assert items(postgres, "aio_payments") == ["kept", "second"]


def test_transaction_ending_during_a_statement_of_an_async_session_is_rolled_back(postgres: EmbeddedPostgres, alchemy: Any) -> None:
    """Also if the session has changes to flush before the vote: the flush would wait for the statement."""

    async def main() -> None:
        async with managing(alchemy) as manager:
            left: list[asyncio.Task[Any]] = []

            async def work() -> None:
                async with manager.begin() as transaction:
                    session = await transaction.enlist(alchemy)
                    await session.execute(sa.select(1))
                    left.append(asyncio.create_task(session.execute(sa.text("SELECT pg_sleep(30)"))))
                    while not alchemy._work[next(iter(alchemy._work))].on_loop._shared.lock.locked():
                        await asyncio.sleep(0)
                    session.add(Payment(item="undone"))

            with pytest.raises(TransactionRolledBack, match="still using"):
                await work()
            with pytest.raises((psycopg.Error, sa.exc.SQLAlchemyError)):
                await left[0]
            async with manager.begin() as transaction:
                (await transaction.enlist(alchemy)).add(Payment(item="next"))

    run(main)
    assert items(postgres, Payment.__tablename__) == ["next"]


def test_rollback_of_an_async_session_rolls_the_transaction_back(postgres: EmbeddedPostgres, alchemy: Any) -> None:
    async def main() -> None:
        other = ModelResource("other")
        async with managing(alchemy, other) as manager:

            async def give_up() -> None:
                async with manager.begin() as transaction:
                    (await transaction.enlist(other)).append("work")
                    session = await transaction.enlist(alchemy)
                    session.add(Payment(item="given up"))
                    await session.flush()
                    await session.rollback()

            with pytest.raises(TransactionRolledBack, match="rolled back its session"):
                await give_up()
            async with manager.begin() as transaction:
                session = await transaction.enlist(alchemy)
                async with session.begin_nested():
                    session.add(Payment(item="kept"))
                await session.commit()  # only of the session: the manager commits
                assert items(postgres, "aio_payments") == []
            assert other.durable.committed == []

    run(main)
    assert items(postgres, "aio_payments") == ["kept"]
