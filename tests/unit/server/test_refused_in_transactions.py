"""If the broker refuses a message of a transaction, the transaction can only be rolled back, even if the client ignores the outcome.

Qpid JMS sends the messages of a transaction asynchronously, and commits without checking their outcomes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bascule.amqp.errors import DETACH_FORCED, AmqpError
from bascule.amqp.events import Dispositioned, Transferred
from bascule.amqp.frames import frame_head
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import (
    ACCEPTED,
    Coordinator,
    Declare,
    Declared,
    Discharge,
    Rejected,
    Source,
    Target,
    TransactionalState,
    Transfer,
)
from bascule.amqp.transactions import encode_control
from bascule.amqp.types import Int
from bascule.broker.policy import REJECT, AddressPolicy, Policy
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission, Unauthorized
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.server.management import TYPE
from bascule.testing.broker import BrokerInMemory, message_bytes
from tests.unit.server import served as serving
from tests.unit.server.served import Served, run_async

FULL, BLOCKED, FORBIDDEN = "full", "blocked", "forbidden"
LIMIT_BYTES = 10_000
#: A delivery id far beyond those of other messages.
BEGUN = 1_000_000
GONE = AmqpError(DETACH_FORCED, "the queue was deleted")
XID: Any = {"formatId": Int(7), "gtrid": "67", "bqual": "62"}


class Denies:
    """Permissions that deny sending to one address."""

    def authorize(self, user: str, permission: Permission, address: str) -> None:
        if (permission, address) == (Permission.SEND, FORBIDDEN):
            raise Unauthorized(user, permission, address)


class Session(serving.Client):
    """A client with a transaction."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self.coordinator = self.session.attach_sender("coordinator", Source(), Coordinator())
        self.served.settle(self)
        self.id = self.declare()
        self.orders = self.producer("orders", name="orders")

    def declare(self) -> bytes:
        self.coordinator.send(encode_control(Declare()))
        self.served.settle(self)
        return bytes([each.state.txn_id for each in self.events_of(Dispositioned) if isinstance(each.state, Declared)][-1])

    def put(self, link: SenderLink, body: bytes, *, settled: bool = False, message_format: int = 0) -> None:
        link.send(body, settled=settled, state=TransactionalState(self.id), message_format=message_format)
        self.served.settle(self)

    def discharge(self, *, fail: bool = False) -> Any:
        """Return the answer of the broker."""
        self.coordinator.send(encode_control(Discharge(self.id, fail)))
        self.served.settle(self)
        return self.events_of(Dispositioned)[-1].state

    def ask(self, operation: str) -> int:
        """Return the code that the broker answers to a request about the transaction."""
        answers = self.consumer("answers", 10, name=f"answers to {operation}")
        fields = {"type": TYPE, "operation": operation, "txnId": self.id.hex(), **XID}
        request = JmsMessage(destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="message", properties=fields)
        self.producer(MANAGEMENT_ADDRESS, name=operation).send(encode_message(request))
        self.served.settle(self)
        (answer,) = [each for each in self.events_of(Transferred) if each.link is answers]
        return int(decode_message(answer.payload).properties["xaCode"])

    def waiting(self) -> int:
        return self.served.engine.queue("orders").held_messages


def served_with_limits() -> Served:
    rules = ((FULL, {"max_messages": 1, "when_full": REJECT}), (BLOCKED, {"max_messages": 1}))
    served = Served(BrokerInMemory(policy=Policy(AddressPolicy(), rules)))
    served.permissions = Denies()
    served.max_message_bytes = LIMIT_BYTES
    for address in (FULL, BLOCKED):
        served.fill(address, 1)
    return served


def to_a_full_queue(client: Session) -> None:
    client.put(client.producer(FULL), message_bytes("x"))


def to_a_full_queue_settled(client: Session) -> None:
    client.put(client.producer(FULL), message_bytes("x"), settled=True)


def relayed(address: str) -> Callable[[Session], None]:
    def send(client: Session) -> None:
        link = client.session.attach_sender(f"relay to {address}", Source(), Target())
        client.served.settle(client)
        client.put(link, encode_message(JmsMessage(destination=address, destination_kind="queue", body_kind="text", body="x")))

    return send


def too_large(client: Session) -> None:
    client.put(client.producer("large"), message_bytes("x" * (LIMIT_BYTES + 1)))


def too_large_in_frames(client: Session) -> None:
    client.put(client.producer("large"), message_bytes("x" * (1 << 20)))


def unreadable(client: Session) -> None:
    client.put(client.orders, b"\x00no message")


def of_another_format(client: Session) -> None:
    client.put(client.orders, message_bytes("x"), message_format=7)


def illegal_property(client: Session) -> None:
    client.put(client.orders, message_bytes("x", properties={"p" * 5000: "x"}))


def to_management(client: Session) -> None:
    client.put(client.producer(MANAGEMENT_ADDRESS), message_bytes("x"))


def end_link(client: Session, link: SenderLink) -> None:
    """End the link from the broker's side, without telling the client yet."""
    server = client.connection.client
    server.end_link(next(each for each in server.links if each.name == link.name), GONE)


def begin_message(client: Session, link: SenderLink) -> None:
    """Send only the first frame of a message."""
    link.credit -= 1
    link.delivery_count += 1
    client.session._next_outgoing_id += 1
    begun = Transfer(link.handle, BEGUN, b"begun", more=True, state=TransactionalState(client.id))
    client.amqp.out.append(frame_head(client.session.channel, begun, 1) + b"x")
    client.say()


def on_a_link_that_the_broker_has_ended(client: Session) -> None:
    link = client.producer("deleted")
    end_link(client, link)
    client.put(link, message_bytes("x"))


def on_a_link_that_the_broker_ends_in_the_middle_of_it(client: Session) -> None:
    link = client.producer("deleted")
    begin_message(client, link)
    end_link(client, link)
    client.served.settle(client)


def without_credit(client: Session) -> None:
    link = client.producer(BLOCKED)
    assert not link.credit
    link.credit = 1
    client.put(link, message_bytes("x"))


REFUSED: dict[str, Callable[[Session], None]] = {
    "queue full": to_a_full_queue,
    "queue full, sent settled": to_a_full_queue_settled,
    "queue full, named by the message": relayed(FULL),
    "not authorised": relayed(FORBIDDEN),
    "too large": too_large,
    "too large, in several frames": too_large_in_frames,
    "unreadable": unreadable,
    "another format": of_another_format,
    "illegal property": illegal_property,
    "request to the management node": to_management,
    "link ended by the broker": on_a_link_that_the_broker_has_ended,
    "link ended by the broker in the middle of it": on_a_link_that_the_broker_ends_in_the_middle_of_it,
    "without credit": without_credit,
}


@pytest.mark.parametrize("send", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("before", [True, False], ids=["last", "first"])
@run_async
async def test_commit_of_a_transaction_with_a_refused_message_is_rolled_back(send: Callable[[Session], None], before: bool) -> None:
    client = Session(served_with_limits())
    if before:
        client.put(client.orders, message_bytes("order"))
    send(client)
    if not before:
        client.put(client.producer("orders", name="again"), message_bytes("order"))
    records = len(client.served.broker.log.records)
    answer = client.discharge()
    assert isinstance(answer, Rejected)
    assert "a message of the transaction was refused" in (answer.error.description or "")
    assert client.waiting() == 0
    assert len(client.served.broker.log.records) == records
    assert client.served.engine.memory.transactions_bytes == 0
    client.id = client.declare()
    client.put(client.producer("orders", name="next"), message_bytes("next order"))
    assert client.discharge() == ACCEPTED
    assert client.waiting() == 1


@pytest.mark.parametrize("operation", ["prepare", "commit"])
@run_async
async def test_prepare_of_branch_with_refused_message_votes_rollback(operation: str) -> None:
    client = Session(served_with_limits())
    client.put(client.orders, message_bytes("order"))
    to_a_full_queue(client)
    assert client.ask(operation) == 100  # XA_RBROLLBACK
    assert client.waiting() == 0
    assert client.served.engine.branches.prepared == {}
    assert client.discharge(fail=True) == ACCEPTED


@run_async
async def test_successful_repetition_of_a_refused_message_does_not_save_its_transaction() -> None:
    client = Session(served_with_limits())
    to_a_full_queue(client)
    client.consumer(FULL, 1)
    (delivery,) = client.events_of(Transferred)
    delivery.link.settle(delivery.delivery_id, ACCEPTED)
    client.served.settle(client)
    client.put(client.producer(FULL, name="again"), message_bytes("x"))
    assert client.events_of(Dispositioned)[-1].state == ACCEPTED
    assert isinstance(client.discharge(), Rejected)
    assert client.served.engine.queue(FULL).held_messages == 0


@run_async
async def test_aborted_message_does_not_doom_its_transaction() -> None:
    client = Session(served_with_limits())
    client.put(client.orders, message_bytes("order"))
    begin_message(client, client.orders)
    client.session._next_outgoing_id += 1
    client.amqp.out.append(frame_head(client.session.channel, Transfer(client.orders.handle, aborted=True), 0))
    assert client.discharge() == ACCEPTED
    assert client.waiting() == 1


@run_async
async def test_refusal_concerns_only_its_own_transaction() -> None:
    client = Session(served_with_limits())
    client.put(client.orders, message_bytes("order"))
    first, client.id = client.id, client.declare()
    to_a_full_queue(client)
    assert isinstance(client.discharge(), Rejected)
    client.id = first
    assert client.discharge() == ACCEPTED
    assert client.waiting() == 1
