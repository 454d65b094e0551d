"""Engines and Sessions of SQLAlchemy as branches, without a database. ``scenarios/test_xa_databases.py`` tests them with PostgreSQL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from sqlalchemy import create_engine

from bascule.core.errors import InvalidInput
from bascule.xa.sqlalchemy import SqlAlchemyResource
from bascule.xa.xid import branch, new_gtrid


class Connection:
    """A connection whose server refuses to begin a branch."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.connection = SimpleNamespace(driver_connection=SimpleNamespace(xid=lambda *parts: parts, tpc_begin=self.tpc_begin))

    def tpc_begin(self, xid: Any) -> None:
        self.did.append("begin")
        raise ConnectionError("the server is gone")

    def invalidate(self) -> None:
        self.did.append("invalidate")

    def close(self) -> None:
        self.did.append("close")


def test_sqlalchemy_engine_with_unsupported_driver_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"resource shop: driver 'pysqlite' is not supported; use one of psycopg"):
        SqlAlchemyResource("shop", create_engine("sqlite://"))


def test_sqlalchemy_async_engine_with_unsupported_driver_is_refused() -> None:
    other: Any = SimpleNamespace(dialect=SimpleNamespace(driver="asyncpg"))
    with pytest.raises(InvalidInput, match=r"resource shop: driver 'asyncpg' is not supported; use one of psycopg"):
        SqlAlchemyResource("shop", create_engine("postgresql+psycopg://"), async_engine=other)


def test_connection_is_invalidated_when_branch_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, engine = Connection(), create_engine("postgresql+psycopg://")
    monkeypatch.setattr(engine, "connect", lambda: connection)
    resource = SqlAlchemyResource("shop", engine)
    with pytest.raises(ConnectionError):
        resource.opened(branch(new_gtrid("manager", 0), "shop"))
    assert connection.did == ["begin", "invalidate", "close"]
