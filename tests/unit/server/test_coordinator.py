"""Transactions as a connection names and keeps them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from bascule.amqp.errors import NOT_ALLOWED, TRANSACTION_UNKNOWN_ID
from bascule.amqp.events import Detached, Dispositioned
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, Coordinator, Declare, Declared, Discharge, Rejected, Source, TransactionalState
from bascule.amqp.transactions import encode_control
from bascule.amqp.types import Int
from bascule.broker.errors import ResourceLimit
from bascule.broker.transactions import LocalTransaction
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.jms.message import JmsMessage, encode_message
from bascule.server import client as client_module
from bascule.server.client import Client
from bascule.server.coordinator import KEPT_MIN, CoordinatorLink
from bascule.server.links import PRODUCER_CREDIT, PRODUCER_CREDIT_LOW
from bascule.server.management import TYPE
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.unit.server import served
from tests.unit.server.served import Served, run_async


class Peer:
    """A client's coordinator link that records its answers."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.credit = 1000

    def settle(self, _: int, state: Any) -> None:
        self.answers.append(state)

    def flow(self, _: int) -> None:
        """Ignore that credit is granted."""


def client_of(broker: BrokerInMemory) -> Client:
    return Served(broker).connection().client


def test_transaction_ids_are_unique_across_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = BrokerInMemory()
    names = set()
    for _ in range(3):
        monkeypatch.setattr(client_module, "_transaction_ids", itertools.count(1))  # of another process
        client = client_of(broker)
        names |= {client.begin().id for _ in range(3)}
        broker.start()
    assert len(names) == 9


@pytest.mark.interpreted
def test_coordinator_forgets_transactions_that_became_branches_and_rolls_back_others() -> None:
    broker, peer = BrokerInMemory(), Peer()
    client = client_of(broker)
    link: Any = peer
    coordinator = CoordinatorLink(client, link)
    for number in range(100):
        coordinator.declare(number)
        client.transactions.pop(peer.answers[-1].txn_id)  # as management does: the transaction is a branch from then on
        assert len(coordinator._declared) <= KEPT_MIN
    coordinator.declare(100)
    coordinator.abandon()
    assert peer.answers[-1].txn_id not in broker.engine.transactions


@pytest.mark.interpreted
def test_cost_of_a_declare_does_not_grow_with_the_open_transactions_of_its_link() -> None:
    client = client_of(BrokerInMemory())
    link: Any = Peer()
    coordinator = CoordinatorLink(client, link)
    looked = 0

    class Looked(dict[bytes, LocalTransaction]):
        def __contains__(self, key: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(key)

        def __iter__(self) -> Iterator[bytes]:
            nonlocal looked
            looked += len(self)
            return super().__iter__()

    client.transactions.held = Looked()
    for number in range(1000):
        coordinator.declare(number)
    assert len(client.transactions) == 1000
    assert looked < 4 * 1000


@pytest.mark.parametrize("operation", ["prepare", "commit"])
@pytest.mark.parametrize("taken", [True, False], ids=["branch", "rolled back"])
@pytest.mark.parametrize("fail", [True, False], ids=["rollback", "commit"])
@run_async
async def test_discharge_after_a_request_is_accepted_if_the_outcome_matches(operation: str, taken: bool, fail: bool) -> None:
    broker = Served()
    client = served.Client(broker)
    coordinator = client.session.attach_sender("coordinator", Source(), Coordinator())
    broker.settle(client)
    coordinator.send(encode_control(Declare()))
    broker.settle(client)
    (transaction,) = (bytes(event.state.txn_id) for event in client.events_of(Dispositioned) if isinstance(event.state, Declared))
    if not taken:
        broker.engine.transactions[transaction].doomed = ResourceLimit("a message was refused")
    fields = {"type": TYPE, "operation": operation, "formatId": Int(7), "gtrid": "67", "bqual": "62", "txnId": transaction.hex()}
    request = JmsMessage(destination=MANAGEMENT_ADDRESS, body_kind="message", properties=fields)
    client.producer(MANAGEMENT_ADDRESS).send(encode_message(request), settled=True)
    broker.settle(client)
    coordinator.send(encode_control(Discharge(transaction, fail)))
    broker.settle(client)
    answer = client.events_of(Dispositioned)[-1].state
    assert answer == ACCEPTED if taken is not fail else isinstance(answer, Rejected)


@pytest.mark.interpreted
def test_declare_behind_a_commit_is_answered_with_the_commit() -> None:
    broker, peer = BrokerInMemory(), Peer()
    client = client_of(broker)
    link: Any = peer
    coordinator = CoordinatorLink(client, link)
    coordinator.declare(0)
    (transaction,) = client.transactions.values()
    broker.send("queue", message_bytes("x"), Sender(), 0, transaction=transaction)
    coordinator.discharge(1, transaction.id, fail=False)
    coordinator.declare(2)
    coordinator.discharge(3, b"unknown", fail=False)
    assert [type(answer) for answer in peer.answers] == [Declared, Rejected]
    broker.settle()
    assert peer.answers[2] is ACCEPTED
    assert client.transactions.keys() == {peer.answers[3].txn_id}
    coordinator.declare(4)
    assert len(peer.answers) == 5


@pytest.mark.interpreted
def test_declare_does_not_wait_for_commits_behind_it() -> None:
    broker, peer = BrokerInMemory(), Peer()
    client = client_of(broker)
    link: Any = peer
    coordinator = CoordinatorLink(client, link)
    coordinator.declare(0)
    coordinator.declare(1)
    first, later = client.transactions.values()
    for transaction in (first, later):
        broker.send("queue", message_bytes("x"), Sender(), 0, transaction=transaction)
    coordinator.discharge(2, first.id, fail=False)
    coordinator.declare(3)
    broker.flush()
    coordinator.discharge(4, later.id, fail=False)
    broker.flush()
    assert len(peer.answers) == 2
    broker.confirm(1)
    broker.flush()
    assert [type(answer) for answer in peer.answers[3:]] == [Declared]
    assert peer.answers[2] is ACCEPTED
    broker.settle()
    assert peer.answers[4:] == [ACCEPTED]


@pytest.mark.interpreted
def test_declare_behind_a_refused_commit_is_answered() -> None:
    broker, peer = BrokerInMemory(), Peer()
    client = client_of(broker)
    link: Any = peer
    coordinator = CoordinatorLink(client, link)
    coordinator.declare(0)
    (transaction,) = client.transactions.values()
    transaction.doomed = ResourceLimit("a message was refused")
    coordinator.discharge(1, transaction.id, fail=False)
    coordinator.declare(2)
    assert [type(answer) for answer in peer.answers] == [Declared, Rejected, Declared]


@run_async
async def test_coordinator_grants_credit_when_half_is_used() -> None:
    broker = Served()
    client = served.Client(broker)
    coordinator = client.session.attach_sender("coordinator", Source(), Coordinator())
    broker.settle(client)
    lowest = coordinator.credit
    for _ in range(2 * PRODUCER_CREDIT):
        coordinator.send(encode_control(Declare()))
        broker.settle(client)
        lowest = min(lowest, coordinator.credit)
    assert PRODUCER_CREDIT_LOW - 1 <= lowest <= PRODUCER_CREDIT_LOW


@run_async
async def test_discharges_of_many_open_transactions_have_credit() -> None:
    broker = Served()
    client = served.Client(broker)
    coordinator = client.session.attach_sender("coordinator", Source(), Coordinator())
    broker.settle(client)

    def control(what: Declare | Discharge) -> None:
        assert coordinator.credit > 0
        coordinator.send(encode_control(what))
        broker.settle(client)

    for _ in range(PRODUCER_CREDIT - 100):
        control(Declare())
    for transaction in list(broker.engine.transactions):
        control(Discharge(transaction, fail=False))
    assert broker.engine.transactions == {}


@pytest.mark.interpreted
def test_discharge_of_an_ended_transaction_is_answered_and_ends_no_other_one() -> None:
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
    assert f"no transaction {over.hex()} on this link" in peer.answers[3].error.description
    assert set(client.transactions) == {open_}


class Controller(served.Client):
    """A client with two sessions, each with a coordinator link."""

    def __init__(self, broker: Served, *, second_session: bool = True) -> None:
        super().__init__(broker)
        other = self.amqp.begin() if second_session else self.session
        self.run()
        self.own, self.foreign = (
            session.attach_sender(name, Source(), Coordinator()) for session, name in ((self.session, "own"), (other, "foreign"))
        )
        broker.settle(self)
        self.orders = self.producer("orders")

    def control(self, link: SenderLink, what: Declare | Discharge, *, settled: bool = False) -> Any:
        """Return the answer of the broker."""
        link.send(encode_control(what), settled=settled)
        self.served.settle(self)
        return self.events_of(Dispositioned)[-1].state

    def begin(self) -> bytes:
        """Begin a transaction with a message in it."""
        txn_id = bytes(self.control(self.own, Declare()).txn_id)
        self.orders.send(message_bytes("order"), state=TransactionalState(txn_id))
        self.served.settle(self)
        return txn_id

    @property
    def waiting(self) -> int:
        return self.served.engine.queue("orders").held_messages


@pytest.mark.parametrize("second_session", [True, False], ids=["another session", "the same session"])
@pytest.mark.parametrize("fail", [True, False], ids=["rollback", "commit"])
@run_async
async def test_discharge_on_other_link_than_declare_is_refused_and_transaction_stays_open(second_session: bool, fail: bool) -> None:
    client = Controller(Served(), second_session=second_session)
    txn_id = client.begin()
    answer = client.control(client.foreign, Discharge(txn_id, fail))
    assert isinstance(answer, Rejected)
    assert answer.error.condition == TRANSACTION_UNKNOWN_ID
    assert client.waiting == 0
    assert set(client.connection.client.transactions) == {txn_id}
    assert client.control(client.own, Discharge(txn_id, False)) == ACCEPTED
    assert client.waiting == 1


@run_async
async def test_discharge_of_transaction_of_other_connection_is_refused() -> None:
    broker = Served()
    client, other = Controller(broker), Controller(broker)
    txn_id = client.begin()
    answer = other.control(other.own, Discharge(txn_id, False))
    assert answer.error.condition == TRANSACTION_UNKNOWN_ID
    assert client.waiting == 0
    assert client.control(client.own, Discharge(txn_id, False)) == ACCEPTED


@run_async
async def test_detach_of_other_coordinator_link_keeps_transaction_open() -> None:
    client = Controller(Served())
    txn_id = client.begin()
    client.control(client.foreign, Discharge(txn_id, False))
    client.foreign.detach()
    client.served.settle(client)
    assert client.control(client.own, Discharge(txn_id, False)) == ACCEPTED
    assert client.waiting == 1


@pytest.mark.parametrize("what", ["declare", "discharge"])
@run_async
async def test_settled_declare_or_discharge_ends_the_link_and_its_transactions(what: str) -> None:
    """Nobody would get its outcome (AMQP 1.0 part 4, sections 4.2 and 4.3)."""
    client = Controller(Served())
    txn_id = client.begin()
    client.control(client.own, Declare() if what == "declare" else Discharge(txn_id, False), settled=True)
    (detached,) = client.events_of(Detached)
    assert detached.error is not None
    assert detached.error.condition == NOT_ALLOWED
    assert client.waiting == 0
    assert not client.connection.client.transactions
    client.own = client.foreign
    assert client.control(client.own, Discharge(client.begin(), False)) == ACCEPTED
    assert client.waiting == 1


@pytest.mark.parametrize("lost_by", ["return", "end of the link"])
@run_async
async def test_commit_is_refused_if_an_acknowledged_message_was_no_longer_held(lost_by: str) -> None:
    """AMQP 1.0 part 4, section 4.4.2: a commit applies the outcome; one that cannot be applied must not count as applied."""
    client = Controller(Served())
    engine = client.served.engine
    client.served.fill("work", 1)
    consumer = client.consumer("work", credit=1)
    (delivery,) = client.session.incoming_unsettled.by_id
    txn_id = client.begin()
    (held,) = engine.queue("work").consumers
    if lost_by == "return":
        engine.give_back(held, next(iter(held.unacked.values())), failed=False)
    else:
        engine.delete_queue(engine.queue("work"))  # the client has not heard of it yet
    consumer.settle(delivery, TransactionalState(txn_id, ACCEPTED))
    client.say()
    answer = client.control(client.own, Discharge(txn_id, False))
    assert isinstance(answer, Rejected)
    assert answer.error.condition == "amqp:transaction:rollback"
    assert "no longer holds" in answer.error.description
    assert client.waiting == 0


@run_async
async def test_repeated_acknowledgement_in_a_transaction_counts_once() -> None:
    client = Controller(Served())
    client.served.fill("work", 1)
    client.consumer("work", credit=1)
    (delivery,) = client.session.incoming_unsettled.by_id
    txn_id = client.begin()
    (held,) = client.served.engine.queue("work").consumers
    (message,) = held.unacked.values()
    transaction = client.served.engine.transactions[txn_id]
    for _ in range(2):
        client.served.engine.acknowledge_in(transaction, held, message)
    assert client.control(client.own, Discharge(txn_id, False)) == ACCEPTED
    assert client.served.engine.queue("work").held_messages == 0
    assert delivery in client.session.incoming_unsettled.by_id


@pytest.mark.interpreted
def test_end_of_a_coordinator_link_rolls_many_transactions_back_over_several_turns() -> None:
    broker, peer = BrokerInMemory(turn_steps=100), Peer()
    client = client_of(broker)
    link: Any = peer
    coordinator = CoordinatorLink(client, link)
    for number in range(100):
        coordinator.declare(number)
    broker.engine.turns.begin_turn()
    coordinator.abandon()
    assert len(client.transactions) == 0
    assert 0 < len(broker.engine.transactions) < 100
    broker.settle()
    assert broker.engine.transactions == {}
    assert broker.engine.counters.rolled_back == 100
