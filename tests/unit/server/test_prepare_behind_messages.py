"""A prepare that arrives in one write with the messages of its branch, on another session. The broker handles it after all messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import Source, Target, TransactionalState
from bascule.broker.dropping import DROPPED_AT_ONCE
from bascule.broker.policy import DROP, AddressPolicy, Policy
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.server import connection
from bascule.server.management import TYPE
from bascule.testing.broker import BrokerInMemory, message_bytes
from tests.unit.server.served import QUEUE, Served, run_async
from tests.unit.server.test_refused_in_transactions import REFUSED, XID, Session, served_with_limits

DROPPING = "dropping"
XA_OK, XA_RBROLLBACK = 0, 100
LIMIT_BYTES = 50_000


class Pipelining(Session):
    """A client that does not wait for answers to its messages."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        control = self.amqp.begin()
        self.answers = control.attach_receiver("answers", Source("answers", capabilities=QUEUE), Target())
        self.requests = control.attach_sender("requests", Source(), Target(MANAGEMENT_ADDRESS, capabilities=QUEUE))
        served.settle(self)
        self.answers.flow(10)
        served.settle(self)

    def put(self, link: SenderLink, body: bytes, *, settled: bool = False, message_format: int = 0) -> None:
        link.send(body, settled=settled, state=TransactionalState(self.id), message_format=message_format)

    def prepare(self) -> int:
        """Send a prepare in one write with the messages of ``put``. Return the code of the broker's answer."""
        self.request()
        return self.answer()

    def request(self) -> None:
        fields = {"type": TYPE, "operation": "prepare", "txnId": self.id.hex(), **XID}
        request = JmsMessage(destination=MANAGEMENT_ADDRESS, reply_to="answers", body_kind="message", properties=fields)
        self.requests.send(encode_message(request))

    def answer(self) -> int:
        self.served.settle(self)
        (answer,) = [each for each in self.events if getattr(each, "link", None) is self.answers and hasattr(each, "payload")]
        return int(decode_message(answer.payload).properties["xaCode"])

    def sent(self) -> int:
        """Return the number of messages that the prepared branch has sent."""
        (branch,) = self.served.engine.branches.prepared.values()
        return branch.sent


@pytest.mark.parametrize("send", REFUSED.values(), ids=REFUSED.keys())
@run_async
async def test_prepare_sent_together_with_refused_message_rolls_branch_back(send: Callable[[Session], None]) -> None:
    client = Pipelining(served_with_limits())
    client.put(client.orders, message_bytes("order"))
    send(client)
    assert client.prepare() == XA_RBROLLBACK
    assert client.served.engine.branches.prepared == {}
    assert client.waiting() == 0


@pytest.mark.parametrize("turn_s", [connection.TURN_S, -1.0], ids=["one turn", "a turn for each event"])
@run_async
async def test_branch_contains_all_messages_sent_together_with_prepare(monkeypatch: pytest.MonkeyPatch, turn_s: float) -> None:
    monkeypatch.setattr(connection, "TURN_S", turn_s)
    client = Pipelining(Served())
    others = client.producer("others", name="others")
    for number in range(100):
        client.put(client.orders, message_bytes("order"))
        client.put(others, message_bytes("x" * (300_000 if number % 50 == 0 else 10)))
    assert client.prepare() == XA_OK
    assert client.sent() == 200


@run_async
async def test_prepare_waits_for_earlier_message_while_full_queue_drops_messages() -> None:
    rules = ((DROPPING, {"max_bytes": LIMIT_BYTES, "when_full": DROP}),)
    client = Pipelining(Served(BrokerInMemory(policy=Policy(AddressPolicy(), rules))))
    engine = client.served.engine
    link = client.producer(DROPPING, name=DROPPING)
    for _ in range(DROPPED_AT_ONCE + 100):
        link.send(message_bytes("x", durable=False))
    link.send(message_bytes("x" * LIMIT_BYTES, durable=False))
    client.served.settle(client)
    queue = engine.queue(DROPPING)
    assert queue.full()
    engine.turns.steps = 50  # dropping them takes several turns
    engine.turns.begin_turn()
    client.put(link, message_bytes("order"))
    client.put(client.orders, message_bytes("order"))
    client.request()
    client.connection.data_received(client.amqp.data_to_send())
    assert (client.connection.behind, queue.dropping, engine.branches.prepared) == (True, True, {})
    while client.connection.behind:
        client.served.broker.settle()
        client.connection.handle_some()
    assert client.answer() == XA_OK
    assert client.sent() == 2
