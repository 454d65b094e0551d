"""Engines and Sessions of SQLAlchemy as branches, without a database; ``scenarios/test_xa_databases.py`` has PostgreSQL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("sqlalchemy")

from sqlalchemy import create_engine

from bascule.core.errors import InvalidInput
from bascule.xa.sqlalchemy import SqlAlchemyResource
from bascule.xa.xid import branch, new_gtrid


class Connection:
    """One whose server refuses to begin a branch."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.connection = SimpleNamespace(driver_connection=SimpleNamespace(xid=lambda *parts: parts))

    def begin_twophase(self, xid: Any) -> None:
        self.did.append("begin")
        raise ConnectionError("the server is gone")

    def invalidate(self) -> None:
        self.did.append("invalidate")

    def close(self) -> None:
        self.did.append("close")


def test_engine_of_a_driver_whose_branches_nobody_has_tried_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"resource shop: driver 'pysqlite' is not one of psycopg"):
        SqlAlchemyResource("shop", create_engine("sqlite://"))


def test_connection_on_which_no_branch_could_begin_does_not_go_back_to_the_pool() -> None:
    connection = Connection()
    engine = SimpleNamespace(dialect=SimpleNamespace(driver="psycopg"), connect=lambda: connection)
    resource = SqlAlchemyResource("shop", cast("Any", engine))
    with pytest.raises(ConnectionError):
        resource.opened(branch(new_gtrid("manager", 0), "shop"))
    assert connection.did == ["begin", "invalidate", "close"]
