"""Hostile requests to `$management` of a broker in memory.

Each is answered correctly, costs little, affects no other client and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from bascule.amqp.events import Transferred
from bascule.amqp.performatives import ACCEPTED, TransactionalState
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.jms.sections import scan
from bascule.server.management import TYPE
from bascule.testing.broker import message_bytes
from tests.property.test_hostile_peers import complaints
from tests.support.costs import COST_S_MAX, LEFT_BYTES_MAX, left_bytes, quiet
from tests.support.hostile_management import HostileManagement
from tests.unit.server.served import Client, Served

SEEDS_OF_ONE_TEST = 250
STATUSES = {200, 400, 404, 409, 500, 503}
CODES = {0, 3, 4, 6, 7, *range(100, 108), -3, -4, -5, -8}


class Conversation:
    """A hostile client of a broker, and one with valid requests."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.hostile = Client(served, "hostile")
        self.answers = self.hostile.consumer("answers", 1 << 20, name="answers")
        self.management = self.hostile.producer(MANAGEMENT_ADDRESS, name="management")
        self.work = self.hostile.producer("work", name="work")
        served.settle(self.hostile)
        self.proper = Client(served, "proper")
        self.heard = self.proper.consumer("proper", 1 << 20, name="heard")
        self.asking = self.proper.producer(MANAGEMENT_ADDRESS, name="asking")

    def begin(self) -> bytes:
        """Return the id of a transaction with a message in it."""
        transaction = self.hostile.connection.client.begin()
        self.work.send(message_bytes("x"), settled=True, state=TransactionalState(transaction.id))
        self.served.settle(self.hostile)
        return transaction.id

    def ask(self, body: bytes) -> None:
        """Send a request, and check its cost and its answer. Repeat it when the machine is quiet if it has cost much."""
        spent_s = self.cost_s(body)
        for _ in range(3):
            if spent_s < COST_S_MAX:
                return
            with quiet():
                spent_s = self.cost_s(body)
        pytest.fail(f"{spent_s:.3f} s for {body[:300].hex()}")

    def cost_s(self, body: bytes) -> float:
        """Return the broker's processor time for a request."""
        self.management.send(body)
        data = self.hostile.amqp.data_to_send()
        began_s = time.process_time()
        self.hostile.connection.data_received(data)
        while self.hostile.connection.behind:
            self.hostile.connection.handle_some()
        self.served.broker.settle()
        self.served.send_output()
        spent_s = time.process_time() - began_s
        for body in heard(self.served, self.hostile):
            check_answer(body)
        assert self.served.contained == []
        assert self.served.epoch_errors == []
        return spent_s

    def ask_properly(self) -> None:
        """Check that other clients are still answered."""
        request = JmsMessage(
            destination=MANAGEMENT_ADDRESS, reply_to="proper", body_kind="message", properties={"type": TYPE, "operation": "recover"}
        )
        self.asking.send(encode_message(request))
        assert [decode_message(body).properties["statusCode"] for body in heard(self.served, self.proper)] == [200]

    def close(self) -> None:
        """Close both clients."""
        for client in (self.hostile, self.proper):
            client.connection.connection_lost(None)
        self.served.broker.settle()


def heard(served: Served, client: Client) -> list[bytes]:
    """Receive and settle the messages of a client."""
    served.settle(client)
    events = client.events_of(Transferred)
    client.events.clear()
    for event in events:
        event.link.settle(event.delivery_id, ACCEPTED)
    served.settle(client)
    return [bytes(event.payload) for event in events]


def check_answer(body: bytes) -> None:
    """Check that an answer is a valid message with the documented properties."""
    scan(body)
    properties = decode_message(body).properties
    assert properties["statusCode"] in STATUSES - {500}
    assert properties["xaCode"] in CODES
    properties["statusDescription"].encode()


def talk(conversation: Conversation, first: int, count: int) -> None:
    """Run some seeds of the generator, each in one conversation."""
    for seed in range(first, first + count):
        hostile = HostileManagement(seed)
        conversation.ask(hostile.request(conversation.begin()))
    conversation.ask_properly()


def work(first: int, count: int) -> None:
    async def run() -> None:
        with complaints() as found:
            conversation = Conversation(Served())
            talk(conversation, first, count)
            conversation.close()
            served = Served(conversation.served.broker)
            served.broker.start()  # what the requests have left in the journal can be read
            Conversation(served).ask_properly()
        assert found == []

    asyncio.run(run())


@pytest.mark.parametrize("first", range(0, 2 * SEEDS_OF_ONE_TEST, SEEDS_OF_ONE_TEST))
def test_hostile_management_request_is_answered_cheaply_and_others_succeed(first: int) -> None:
    work(first, SEEDS_OF_ONE_TEST)


def test_hostile_management_requests_leave_no_memory_behind() -> None:
    served = Served()

    async def ask_all() -> None:
        conversation = Conversation(served)
        talk(conversation, 0, 50)
        conversation.close()

    async def run() -> None:
        assert await left_bytes(ask_all, served.broker.log) < LEFT_BYTES_MAX

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_hostile_management_requests_are_answered_cheaply() -> None:
    """BASCULE_HOSTILE_SEEDS is the number of seeds, BASCULE_HOSTILE_FIRST the first of them."""
    work(int(os.environ.get("BASCULE_HOSTILE_FIRST", "10000")), int(os.environ.get("BASCULE_HOSTILE_SEEDS", "5000")))
