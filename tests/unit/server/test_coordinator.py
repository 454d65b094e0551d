"""Transactions as a connection names and keeps them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bascule.amqp.events import Dispositioned
from bascule.amqp.performatives import ACCEPTED, Coordinator, Declare, Declared, Discharge, Rejected, Source
from bascule.amqp.transactions import encode_control
from bascule.amqp.types import Int
from bascule.broker.errors import ResourceLimit
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.jms.message import JmsMessage, encode_message
from bascule.server import client as client_module
from bascule.server.client import Client
from bascule.server.coordinator import CoordinatorLink
from bascule.server.management import TYPE
from bascule.testing.broker import BrokerInMemory
from tests.unit.server import served
from tests.unit.server.served import Served, run_async


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


@pytest.mark.parametrize("operation", ["prepare", "commit"])
@pytest.mark.parametrize("taken", [True, False], ids=["branch", "rolled back"])
@pytest.mark.parametrize("fail", [True, False], ids=["rollback", "commit"])
@run_async
async def test_discharge_after_a_request_is_accepted_if_it_agrees_with_the_answer(operation: str, taken: bool, fail: bool) -> None:
    broker = Served()
    client = served.Client(broker)
    coordinator = client.session.attach_sender("coordinator", Source(), Coordinator())
    broker.settle(client)
    coordinator.send(encode_control(Declare()))
    broker.settle(client)
    (transaction,) = (bytes(event.state.txn_id) for event in client.told(Dispositioned) if isinstance(event.state, Declared))
    if not taken:
        broker.engine.transactions[transaction].doomed = ResourceLimit("a message was refused")
    fields = {"type": TYPE, "operation": operation, "formatId": Int(7), "gtrid": "67", "bqual": "62", "txnId": transaction.hex()}
    request = JmsMessage(destination=MANAGEMENT_ADDRESS, body_kind="message", properties=fields)
    client.producer(MANAGEMENT_ADDRESS).send(encode_message(request), settled=True)
    broker.settle(client)
    coordinator.send(encode_control(Discharge(transaction, fail)))
    broker.settle(client)
    answer = client.told(Dispositioned)[-1].state
    assert answer == ACCEPTED if taken is not fail else isinstance(answer, Rejected)


def test_discharge_of_a_transaction_that_is_over_is_answered_and_ends_no_other() -> None:
    broker, peer = BrokerInMemory(), Peer()
    client = client_of(broker)
    link: Any = peer
    coordinator = CoordinatorLink(client, link)
    coordinator.declare(1)
    coordinator.declare(2)
    over, open_ = (answer.txn_id for answer in peer.answers)
    for number in (3, 4):
        coordinator.discharge(number, over, fail=True)
    assert peer.answers[2] is ACCEPTED
    assert peer.answers[3].error.condition == "amqp:transaction:unknown-id"
    assert f"no transaction {over.hex()} on this connection" in peer.answers[3].error.description
    assert set(client.transactions) == {open_}
