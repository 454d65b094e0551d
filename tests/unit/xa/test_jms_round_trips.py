"""What a branch of the broker waits for, against a server that answers the messages of a transaction when the test says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import NOT_FOUND, AmqpError
from bascule.amqp.events import DeclareReceived, Transferred
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, Declared, Error, Rejected, TransactionalState
from bascule.client import Queue
from bascule.client.message import Message, encode
from bascule.jms.message import JmsMessage
from bascule.xa.errors import XA_OK, BranchRolledBack
from bascule.xa.jms import JmsResource
from bascule.xa.resource import Vote
from bascule.xa.xid import Xid, branch, new_gtrid
from tests.unit.client.server import server, serving

ORDERS, GO = Queue("orders"), Queue("go")
WAIT_S = 60.0
#: What the server hears.
DECLARE, MESSAGE = "declare", "message"


class Late:
    """A broker that answers the messages of a transaction no earlier than a request about it."""

    def __init__(self, outcome: Any = ACCEPTED, *, detaches: bool = False) -> None:
        """``outcome`` is that of each message; ``detaches``: the link of the messages ends instead, as one does that is not allowed."""
        self.heard: list[str] = []
        self._outcome = outcome
        self._detaches = detaches
        self._messages: list[Transferred] = []
        self._numbers = count(1)
        self._serve = serving(self._answer)

    def __call__(self, connection: Connection, event: Any) -> None:
        match event:
            case DeclareReceived():
                self.heard.append(DECLARE)
                event.link.settle(event.delivery_id, Declared(b"%d" % next(self._numbers)))
                event.link.flow(10)
            case Transferred() if event.txn_id is not None:
                self.heard.append(MESSAGE)
                self._messages.append(event)
            case Transferred() if event.link.target.address == GO.name:
                self.heard.append(GO.name)
                event.link.settle(event.delivery_id, ACCEPTED)
                self.answer_messages()
            case _:
                self._serve(connection, event)

    def _answer(self, link: SenderLink, request: JmsMessage) -> None:
        operation = str(request.properties["operation"])
        self.heard.append(operation)
        answer = Message(correlation_id=request.message_id, properties={"xaCode": XA_OK, "statusCode": 200})
        if operation == "commit" and "txnId" in request.properties:
            assert self._messages == []  # a commit in one phase cannot be undone
        else:
            self.answer_messages()
        link.send(encode(answer))

    def answer_messages(self) -> None:
        """Answer all messages so far."""
        for message in self._messages:
            if self._detaches:
                message.link.detach(AmqpError(NOT_FOUND, "no such queue"))
            else:
                message.link.settle(message.delivery_id, TransactionalState(message.txn_id, self._outcome))
        self._messages.clear()


@contextmanager
def resource_of(broker: Late) -> Iterator[JmsResource]:
    with server(broker) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=WAIT_S)) as resource:
        yield resource


def ended_branch(resource: JmsResource) -> Xid:
    """A branch that has sent a message."""
    xid = branch(new_gtrid("shop", 0), "broker")
    resource.start(xid, timeout_s=WAIT_S).send(ORDERS, "an order")
    resource.end(xid, success=True)
    return xid


def test_prepare_is_asked_for_without_waiting_for_the_answers_to_the_messages() -> None:
    broker = Late()
    with resource_of(broker) as resource:
        assert resource.prepare(ended_branch(resource)) is Vote.YES
    assert broker.heard.index(MESSAGE) < broker.heard.index("prepare")


def test_next_transaction_is_declared_with_the_prepare_of_the_one_before() -> None:
    broker = Late()
    with resource_of(broker) as resource:
        for _ in range(3):
            resource.prepare(ended_branch(resource))
    assert broker.heard == [DECLARE, *[MESSAGE, DECLARE, "prepare"] * 3]


def test_next_transaction_is_declared_with_a_commit_in_one_phase() -> None:
    class Prompt(Late):
        def __call__(self, connection: Connection, event: Any) -> None:
            super().__call__(connection, event)
            self.answer_messages()

    broker = Prompt()
    with resource_of(broker) as resource:
        for _ in range(2):
            resource.commit(ended_branch(resource), one_phase=True)
    assert broker.heard == [DECLARE, *[MESSAGE, DECLARE, "commit"] * 2]


@pytest.mark.parametrize("detaches", [False, True])
def test_branch_is_rolled_back_if_a_message_is_refused_and_the_broker_has_prepared_it(*, detaches: bool) -> None:
    """As a broker does that has ended the link of the message while the message was on its way."""
    broker = Late(Rejected(Error(NOT_FOUND, "no such queue")), detaches=detaches)
    with resource_of(broker) as resource:
        xid = ended_branch(resource)
        with pytest.raises(BranchRolledBack, match="no such queue"):
            resource.prepare(xid)
        assert resource._work == {}
    assert broker.heard[-1] == "rollback"


def test_commit_in_one_phase_waits_until_the_broker_has_taken_the_messages() -> None:
    broker = Late()
    with resource_of(broker) as resource, ThreadPoolExecutor(1) as threads:
        xid = ended_branch(resource)
        committing = threads.submit(resource.commit, xid, one_phase=True)
        with resource.context() as other:
            other.send(GO, "answer the messages")
        committing.result(WAIT_S)
    assert broker.heard == [DECLARE, MESSAGE, "go", DECLARE, "commit"]
