"""One branch with the transactions of several sessions of a connection: each is complete in the branch, or all are rolled back."""

from __future__ import annotations

import pytest

from bascule.amqp.events import Dispositioned, Transferred
from bascule.amqp.performatives import ACCEPTED, Discharge, Rejected
from bascule.amqp.transactions import encode_control
from bascule.broker import branches
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.core.xid import Xid
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.journal.branches import Ending
from bascule.server.management import TYPE
from bascule.testing.broker import message_bytes
from tests.unit.server.served import Served, run_async
from tests.unit.server.test_refused_in_transactions import FULL, XID, Session, served_with_limits, to_a_full_queue

XA_OK, XA_RBROLLBACK, XA_RBCOMMFAIL, XAER_INVAL = 0, 100, 101, -5


class Joining(Session):
    """A client with two transactions, each of which has sent a message."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self.first = self.id
        self.put(self.orders, message_bytes("first"))
        self.second = self.id = self.declare()
        self.put(self.orders, message_bytes("second"))

    def request(self, operation: str, joined: str) -> int:
        """Return the code that the broker answers to a request about the first transaction, with ``joined``."""
        answers = self.consumer("answers", 10, name=f"answers to {operation}")
        fields = {"type": TYPE, "operation": operation, "txnId": self.first.hex(), "joined": joined, **XID}
        request = JmsMessage(destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="message", properties=fields)
        self.producer(MANAGEMENT_ADDRESS, name=operation).send(encode_message(request))
        self.served.settle(self)
        (answer,) = [each for each in self.events_of(Transferred) if each.link is answers]
        return int(decode_message(answer.payload).properties["xaCode"])

    def discharged(self, *, fail: bool) -> bool:
        """Return whether the broker accepts a discharge of both transactions, as Qpid JMS sends it behind the answer."""
        outcomes = []
        for transaction in (self.first, self.second):
            self.coordinator.send(encode_control(Discharge(transaction, fail)))
            self.served.settle(self)
            outcomes.append(self.events_of(Dispositioned)[-1].state)
        return outcomes == [ACCEPTED, ACCEPTED]


@run_async
async def test_prepared_branch_has_the_work_of_joined_transactions() -> None:
    client = Joining(Served())
    engine = client.served.engine
    assert client.request("prepare", client.second.hex()) == XA_OK
    (branch,) = engine.branches.prepared.values()
    assert (branch.sent, engine.transactions, client.waiting()) == (2, {}, 0)
    assert client.discharged(fail=False)
    branches.end(engine, Xid(int(XID["formatId"]), b"g", b"b"), Ending.COMMITTED, lambda: None)
    client.served.settle(client)
    assert client.waiting() == 2
    assert engine.memory.transactions_bytes == 0


@run_async
async def test_joined_transactions_commit_in_one_phase() -> None:
    client = Joining(Served())
    assert client.request("commit", client.second.hex()) == XA_OK
    assert (client.waiting(), client.served.engine.transactions) == (2, {})
    assert client.discharged(fail=False)


@run_async
async def test_branch_is_rolled_back_if_a_message_of_a_joined_transaction_was_refused() -> None:
    client = Joining(served_with_limits())
    to_a_full_queue(client)
    assert client.request("prepare", client.second.hex()) == XA_RBROLLBACK
    assert (client.waiting(), client.served.engine.queue(FULL).held_messages) == (0, 1)
    assert client.discharged(fail=True)


@pytest.mark.parametrize("operation", ["prepare", "commit"])
@run_async
async def test_branch_is_rolled_back_if_a_joined_transaction_does_not_exist(operation: str) -> None:
    client = Joining(Served())
    assert client.request(operation, f"{client.second.hex()},abcd") == XA_RBCOMMFAIL
    assert (client.waiting(), client.served.engine.branches.prepared, client.served.engine.transactions) == (0, {}, {})


@pytest.mark.parametrize("operation", ["prepare", "commit"])
@run_async
async def test_joined_transactions_are_rolled_back_if_the_transaction_of_the_request_does_not_exist(operation: str) -> None:
    client = Joining(Served())
    client.coordinator.send(encode_control(Discharge(client.first, True)))
    client.served.settle(client)
    assert client.request(operation, client.second.hex()) == XA_RBCOMMFAIL
    engine = client.served.engine
    assert (engine.transactions, engine.branches.prepared, engine.memory.transactions_bytes) == ({}, {}, 0)
    client.id = client.second
    assert isinstance(client.discharge(), Rejected)
    assert client.waiting() == 0


@run_async
async def test_request_with_malformed_ids_of_joined_transactions_changes_nothing() -> None:
    client = Joining(Served())
    assert client.request("prepare", "no digits") == XAER_INVAL
    assert len(client.served.engine.transactions) == 2
