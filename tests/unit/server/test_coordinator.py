"""Transactions as a connection names and keeps them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from bascule.server import connection as connection_module
from bascule.server.connection import ClientConnection
from bascule.testing.broker import BrokerInMemory


def connection_to(broker: BrokerInMemory) -> ClientConnection:
    server: Any = SimpleNamespace(engine=broker.engine, touched={})
    return ClientConnection(server)


def test_no_broker_gives_a_transaction_the_name_that_an_earlier_one_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = BrokerInMemory()
    names = set()
    for _ in range(3):
        monkeypatch.setattr(connection_module, "_transaction_ids", itertools.count(1))  # of another process
        connection = connection_to(broker)
        names |= {connection.begin().id for _ in range(3)}
        broker.start()
    assert len(names) == 9
