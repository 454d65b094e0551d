"""Transactions as a connection names and keeps them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bascule.server import client as client_module
from bascule.server.client import Client
from bascule.server.coordinator import CoordinatorLink
from bascule.testing.broker import BrokerInMemory
from tests.unit.server.served import Served


class Peer:
    """A client's coordinator link; it keeps what it is answered."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def settle(self, _: int, state: Any) -> None:
        self.answers.append(state)

    def flow(self, _: int) -> None:
        """Credit is given."""


def client_of(broker: BrokerInMemory) -> Client:
    return Served(broker).connection().client


def test_no_broker_gives_a_transaction_the_name_that_an_earlier_one_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = BrokerInMemory()
    names = set()
    for _ in range(3):
        monkeypatch.setattr(client_module, "_transaction_ids", itertools.count(1))  # of another process
        client = client_of(broker)
        names |= {client.begin().id for _ in range(3)}
        broker.start()
    assert len(names) == 9


def test_a_coordinator_forgets_transactions_that_are_handed_over_and_rolls_back_the_others() -> None:
    broker, peer = BrokerInMemory(), Peer()
    client = client_of(broker)
    link: Any = peer
    coordinator = CoordinatorLink(client, link)
    for number in range(100):
        coordinator.declare(number)
        client.transactions.pop(peer.answers[-1].txn_id)  # as management does: it is a branch from then on
    coordinator.declare(100)
    assert coordinator._declared.keys() == {peer.answers[-1].txn_id}
    coordinator.abandon()
    assert peer.answers[-1].txn_id not in broker.engine.transactions
