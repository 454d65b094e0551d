"""One branch with several transactions of a connection: each is complete in the branch, or all are rolled back.

The transactions are those of several sessions, or of one session that has suspended the branch meanwhile.
"""

from __future__ import annotations

import pytest

from bascule.amqp.events import Dispositioned, Transferred
from bascule.amqp.performatives import ACCEPTED, Discharge, Rejected
from bascule.amqp.transactions import encode_control
from bascule.broker import branches
from bascule.broker.branch_requests import Answer, BranchRequest, carry_out
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.core.xid import Xid
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.journal.branches import Ending
from bascule.server.management import TYPE
from bascule.testing.broker import message_bytes
from tests.unit.server.served import Served, run_async
from tests.unit.server.test_refused_in_transactions import FULL, XID, Session, served_with_limits, to_a_full_queue

XA_OK, XA_RBROLLBACK, XA_RBCOMMFAIL, XAER_INVAL, XAER_NOTA = 0, 100, 101, -5, -4


class Joining(Session):
    """A client with two transactions, each of which has sent a message."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self.asked = 0
        self.first = self.id
        self.put(self.orders, message_bytes("first"))
        self.second = self.id = self.declare()
        self.put(self.orders, message_bytes("second"))

    def request(self, operation: str, joined: str = "") -> int:
        """Return the code that the broker answers to a request about the first transaction, with ``joined``."""
        return self.request_of(operation, txnId=self.first.hex(), joined=joined)

    def request_of(self, operation: str, **properties: str) -> int:
        """Return the code that the broker answers to a request with these properties."""
        self.asked += 1
        answers = self.consumer("answers", 1, name=f"answers to request {self.asked}")
        fields = {"type": TYPE, "operation": operation, **properties, **XID}
        request = JmsMessage(destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="message", properties=fields)
        self.producer(MANAGEMENT_ADDRESS, name=f"request {self.asked}").send(encode_message(request))
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


@pytest.mark.parametrize(("operation", "waiting"), [("prepare", 0), ("commit", 2), ("rollback", 0)])
@run_async
async def test_list_of_transaction_ids_ends_all_of_them_as_one_branch(operation: str, waiting: int) -> None:
    client = Joining(Served())
    assert client.request_of(operation, txnId=f"{client.first.hex()},{client.second.hex()}") == XA_OK
    engine = client.served.engine
    assert (client.waiting(), engine.transactions, len(engine.branches.prepared)) == (waiting, {}, operation == "prepare")
    assert client.discharged(fail=operation == "rollback")


@pytest.mark.parametrize("txn_id", ["", "no digits", "61,"])
@run_async
async def test_suspension_and_rollback_name_a_transaction_of_the_connection(txn_id: str) -> None:
    client = Joining(Served())
    for operation in ("suspend", "rollback"):
        assert client.request_of(operation, txnId=txn_id) in (XAER_INVAL, XAER_NOTA)
    assert client.request_of("suspend") == XAER_NOTA
    assert len(client.served.engine.transactions) == 2


@pytest.mark.parametrize(("operation", "waiting"), [("prepare", 0), ("commit", 1), ("rollback", 0)])
@run_async
async def test_suspended_transaction_stays_with_its_connection_until_a_request_ends_it(operation: str, waiting: int) -> None:
    client = Joining(Served())
    engine = client.served.engine
    assert client.request("suspend") == XA_OK
    client.id = client.first
    assert client.discharge() == ACCEPTED
    assert (client.waiting(), list(engine.transactions)) == (0, [client.first, client.second])
    assert isinstance(client.discharge(), Rejected)  # the session has left it
    assert client.request(operation) == XA_OK
    assert (client.waiting(), list(engine.transactions), len(engine.branches.prepared)) == (
        waiting,
        [client.second],
        operation == "prepare",
    )
    assert client.request("prepare") == (XA_OK if operation == "prepare" else XA_RBCOMMFAIL)


@run_async
async def test_suspended_transaction_is_rolled_back_with_its_link_or_its_connection() -> None:
    client = Joining(Served())
    engine = client.served.engine
    assert client.request("suspend") == XA_OK
    assert client.request_of("suspend", txnId=client.second.hex()) == XA_OK
    client.id = client.second
    assert client.discharge(fail=True) == ACCEPTED
    assert list(engine.transactions) == [client.first]
    client.coordinator.detach()
    client.served.settle(client)
    assert engine.transactions == {}
    other = Joining(client.served)
    assert other.request("suspend") == XA_OK
    other.id = other.first
    assert other.discharge() == ACCEPTED
    other.connection.connection_lost(None)
    client.served.settle(client)
    assert (engine.transactions, client.waiting()) == ({}, 0)


@pytest.mark.parametrize("operation", ["rollback", "commit", "forget"])
@run_async
async def test_request_that_names_an_own_transaction_does_not_end_the_branch_of_another_user(operation: str) -> None:
    client = Joining(Served())
    engine = client.served.engine
    assert client.request("prepare") == XA_OK
    (branch,) = engine.branches.prepared.values()
    branch.user = "ann"
    if operation == "forget":
        branches.end(engine, branch.xid, Ending.FORCED_ROLLBACK, lambda: None)
        client.served.settle(client)
    own = {client.second: engine.transactions[client.second]}
    answers: list[Answer] = []
    request = BranchRequest(operation, branch.xid, "bob", own, client.second, user="bob", may_end=lambda owner: owner == "bob")
    carry_out(engine, request, answers.append)
    client.served.settle(client)
    assert len(answers) == 1
    assert (branch.xid in engine.branches.prepared, branch.xid in engine.branches.forced) == (operation != "forget", operation == "forget")
