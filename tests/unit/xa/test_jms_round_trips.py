"""The round trips of a branch of the broker. The server answers the messages of a transaction when the test tells it to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import NOT_FOUND, RESOURCE_LIMIT_EXCEEDED, AmqpError
from bascule.amqp.events import Attached, DeclareReceived, Dispositioned, Transferred
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, RELEASED, Declared, Error, Rejected, TransactionalState
from bascule.client import Queue, pump
from bascule.client.message import Message, encode
from bascule.client.thread import HELD_BYTES_MAX
from bascule.jms.message import JmsMessage
from bascule.xa.errors import XA_OK, XA_RDONLY, BranchHeuristic, BranchRolledBack, Code, ResourceError, XaError
from bascule.xa.jms import JmsResource
from bascule.xa.resource import Vote
from bascule.xa.xid import Xid, branch, new_gtrid
from tests.support.speed import SLOWNESS
from tests.unit.client.blocking_servers import eventually
from tests.unit.client.server import server, serving
from tests.unit.client.test_connection_thread import wakes

REFUSED = Rejected(Error(NOT_FOUND, "no such queue"))
ORDERS, GO = Queue("orders"), Queue("go")
WAIT_S = 60.0 * SLOWNESS
#: Requests that the server records.
DECLARE, MESSAGE = "declare", "message"


class LateAnswers:
    """A broker that answers the messages of a transaction only when a request about the transaction arrives."""

    def __init__(
        self, outcome: Any = ACCEPTED, *, detaches: bool = False, prepare: int = XA_OK, rollback: tuple[int, str | None] = (XA_OK, None)
    ) -> None:
        """``outcome`` is the outcome of each message. If ``detaches``, the broker detaches the link of the messages instead.

        ``prepare`` is the xaCode of each prepare. ``rollback`` is the xaCode and the outcome in the answer to a rollback.
        """
        self.requests: list[str] = []
        self._says = {"prepare": (prepare, None), "rollback": rollback}
        self._outcome = outcome
        self._detaches = detaches
        self._messages: list[Transferred] = []
        self._numbers = count(1)
        self._serve = serving(self._answer)

    def __call__(self, connection: Connection, event: Any) -> None:
        match event:
            case DeclareReceived():
                self.requests.append(DECLARE)
                event.link.settle(event.delivery_id, Declared(b"%d" % next(self._numbers)))
                event.link.flow(10)
            case Transferred() if event.txn_id is not None:
                self.requests.append(MESSAGE)
                self._messages.append(event)
            case Transferred() if event.link.target.address == GO.name:
                self.requests.append(GO.name)
                event.link.settle(event.delivery_id, ACCEPTED)
                self.answer_messages()
            case _:
                self._serve(connection, event)

    def _answer(self, link: SenderLink, request: JmsMessage) -> None:
        operation = str(request.properties["operation"])
        self.requests.append(operation)
        code, outcome = self._says.get(operation, (XA_OK, None))
        properties: dict[str, Any] = {"xaCode": int(code), "statusCode": 200} | ({} if outcome is None else {"outcome": outcome})
        answer = Message(correlation_id=request.message_id, properties=properties)
        if operation == "commit" and "txnId" in request.properties:
            assert self._messages == []  # messages must be answered before a one-phase commit, which cannot be undone
        else:
            self.answer_messages()
        link.send(encode(answer), settled=True)  # as the consumer of the answers requires

    def answer_messages(self) -> None:
        """Answer all messages that have arrived."""
        for message in self._messages:
            if self._detaches:
                message.link.detach(AmqpError(NOT_FOUND, "no such queue"))
            else:
                message.link.settle(message.delivery_id, TransactionalState(message.txn_id, self._outcome))
        self._messages.clear()


class Prompt(LateAnswers):
    """A broker that answers messages at once."""

    def __call__(self, connection: Connection, event: Any) -> None:
        super().__call__(connection, event)
        self.answer_messages()


@contextmanager
def resource_of(broker: LateAnswers, **options: Any) -> Iterator[JmsResource]:
    with server(broker) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=WAIT_S, **options)) as resource:
        yield resource


def ended_branch(resource: JmsResource) -> Xid:
    """Send a message in a branch, end its work, and return its XID."""
    xid = branch(new_gtrid("shop", 0), "broker")
    resource.start(xid, timeout_s=WAIT_S).send(ORDERS, "an order")
    resource.end(xid, success=True)
    return xid


def test_prepare_is_sent_before_messages_are_answered() -> None:
    broker = LateAnswers()
    with resource_of(broker) as resource:
        assert resource.prepare(ended_branch(resource)) is Vote.YES
    assert broker.requests.index(MESSAGE) < broker.requests.index("prepare")


def test_next_transaction_is_declared_together_with_prepare() -> None:
    broker = LateAnswers()
    with resource_of(broker) as resource:
        for _ in range(3):
            resource.prepare(ended_branch(resource))
    # The next declare follows the prepare, because a user may have a limited number of transactions.
    assert broker.requests == [DECLARE, *[MESSAGE, "prepare", DECLARE] * 3]


def test_next_transaction_is_declared_together_with_one_phase_commit() -> None:
    broker = Prompt()
    with resource_of(broker) as resource:
        for _ in range(2):
            resource.commit(ended_branch(resource), one_phase=True)
    assert broker.requests == [DECLARE, *[MESSAGE, "commit", DECLARE] * 2]


def test_branch_does_not_wake_thread_of_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages wait for the prepare, and a request is written by the thread that waits for the answer."""
    broker = Prompt()
    with resource_of(broker) as resource:
        resource.prepare(ended_branch(resource))  # opens links
        assert resource._connection is not None
        woken = wakes(resource._connection, monkeypatch)
        xid = ended_branch(resource)
        assert resource.prepare(xid) is Vote.YES
        resource.commit(xid)
        assert woken == []
    assert broker.requests == [DECLARE, *[MESSAGE, "prepare", DECLARE] * 2, "commit"]


def test_completion_of_asynchronous_send_in_branch_is_reported_before_its_end() -> None:
    with resource_of(Prompt()) as resource:
        producer = resource.start(branch(new_gtrid("shop", 0), "broker"), timeout_s=WAIT_S).producer(ORDERS)
        assert [producer.send_async(body).result(WAIT_S).body for body in "ab"] == ["a", "b"]


def test_large_message_of_branch_is_sent_before_its_end() -> None:
    broker = Prompt()  # else the end of the connection would wait for the answer
    with resource_of(broker) as resource:
        resource.start(branch(new_gtrid("shop", 0), "broker"), timeout_s=WAIT_S).send(ORDERS, "x" * (HELD_BYTES_MAX + 1))
        eventually(lambda: MESSAGE in broker.requests)


def test_read_only_branch_returns_prefetched_messages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "TICK_S_MAX", 10 * WAIT_S)  # no heartbeat writes them instead
    released: list[Any] = []

    class Delivering(LateAnswers):
        def __call__(self, connection: Connection, event: Any) -> None:
            if isinstance(event, Dispositioned):
                released.append(event.state)
            if isinstance(event, Attached) and event.link.source.address == ORDERS.name:
                event.link.accept()
                event.link.context = iter([encode(Message("prefetched"))])
            else:
                super().__call__(connection, event)

    with resource_of(Delivering()) as resource:
        xid = branch(new_gtrid("shop", 0), "broker")
        consumer = resource.start(xid, timeout_s=WAIT_S).consumer(ORDERS, prefetch=1)
        eventually(lambda: len(consumer.state.buffer) == 1)
        resource.end(xid, success=True)
        assert resource.prepare(xid) is Vote.READ_ONLY
        eventually(lambda: released == [RELEASED])


@pytest.mark.parametrize("detaches", [False, True])
def test_prepared_branch_with_refused_message_is_rolled_back(*, detaches: bool) -> None:
    """A broker refuses a message if it detaches the link while the message is on its way."""
    broker = LateAnswers(REFUSED, detaches=detaches)
    with resource_of(broker) as resource:
        xid = ended_branch(resource)
        with pytest.raises(BranchRolledBack, match="no such queue"):
            resource.prepare(xid)
        assert resource._work == {}
    assert broker.requests[-1] == "rollback"


def test_one_phase_commit_waits_for_answers_to_messages() -> None:
    broker = LateAnswers()
    with resource_of(broker) as resource, ThreadPoolExecutor(1) as threads:
        xid = ended_branch(resource)
        committing = threads.submit(resource.commit, xid, one_phase=True)
        with resource.context() as other:
            other.send(GO, "answer the messages")
        committing.result(WAIT_S)
    assert broker.requests == [DECLARE, MESSAGE, "go", "commit", DECLARE]


def test_resource_without_idle_sessions_declares_no_transaction_in_advance() -> None:
    broker = LateAnswers()
    with resource_of(broker, idle_max=0) as resource:
        resource.prepare(ended_branch(resource))
    assert broker.requests == [DECLARE, MESSAGE, "prepare"]


def test_transaction_refused_in_advance_is_declared_again_when_needed() -> None:
    """The user had reached its limit of transactions when the resource declared one in advance."""

    class Limited(LateAnswers):
        def __call__(self, connection: Connection, event: Any) -> None:
            if isinstance(event, DeclareReceived) and self.requests.count(DECLARE) == 1:
                self.requests.append(DECLARE)
                event.link.settle(event.delivery_id, Rejected(Error(RESOURCE_LIMIT_EXCEEDED, "too many")))
            else:
                super().__call__(connection, event)

    broker = Limited()
    with resource_of(broker) as resource:
        for _ in range(2):
            assert resource.prepare(ended_branch(resource)) is Vote.YES
    assert broker.requests == [DECLARE, MESSAGE, "prepare", DECLARE, DECLARE, MESSAGE, "prepare", DECLARE]


@pytest.mark.parametrize("outcome", [None, "rolled-back"])
def test_branch_with_refused_message_already_rolled_back_by_other_process_is_reported_rolled_back(outcome: str | None) -> None:
    broker = LateAnswers(REFUSED, rollback=(Code.XAER_NOTA, outcome))
    with resource_of(broker) as resource, pytest.raises(BranchRolledBack, match="no such queue"):
        resource.prepare(ended_branch(resource))
    assert broker.requests[-1] == "rollback"


def test_branch_with_refused_message_already_committed_by_other_process_is_heuristic() -> None:
    broker = LateAnswers(REFUSED, rollback=(Code.XAER_NOTA, "committed"))
    with resource_of(broker) as resource, pytest.raises(BranchHeuristic) as caught:
        resource.prepare(ended_branch(resource))
    assert caught.value.xa_code is Code.XA_HEURCOM


@pytest.mark.parametrize(
    ("code", "error"), [(XA_RDONLY, BranchRolledBack), (Code.XA_RBROLLBACK, BranchRolledBack), (Code.XAER_RMERR, ResourceError)]
)
def test_branch_with_refused_message_is_reported_rolled_back_when_broker_has_not_prepared_it(code: int, error: type[XaError]) -> None:
    """If the answer leaves the state of the branch open, the resource raises the error, and the manager rolls the branch back."""
    broker = LateAnswers(REFUSED, prepare=code)
    with resource_of(broker) as resource, pytest.raises(XaError) as caught:
        resource.prepare(ended_branch(resource))
    assert type(caught.value) is error
    assert "rollback" not in broker.requests
