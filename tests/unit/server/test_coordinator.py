"""Transactions as a connection names and keeps them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from bascule.server import connection as connection_module
from bascule.server.connection import ClientConnection
from bascule.server.coordinator import CoordinatorLink
from bascule.testing.broker import BrokerInMemory


class Peer:
    """A client's coordinator link; it keeps what it is answered."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def settle(self, _: int, state: Any) -> None:
        self.answers.append(state)

    def flow(self, _: int) -> None:
        """Credit is given."""


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


def test_a_coordinator_forgets_transactions_that_are_handed_over_and_rolls_back_the_others() -> None:
    broker, peer = BrokerInMemory(), Peer()
    connection = connection_to(broker)
    link: Any = peer
    coordinator = CoordinatorLink(connection, link)
    for number in range(100):
        coordinator.declare(number)
        connection.transactions.pop(peer.answers[-1].txn_id)  # as management does: it is a branch from then on
    coordinator.declare(100)
    assert coordinator._declared == {peer.answers[-1].txn_id}
    coordinator.abandon()
    assert peer.answers[-1].txn_id not in broker.engine.transactions
