"""A long commit runs in short turns. The broker serves other clients between the turns, and later frames of the client wait."""

from __future__ import annotations

import asyncio

import pytest

from bascule.amqp.codec import decode
from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, AmqpError
from bascule.amqp.events import Dispositioned
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, Coordinator, Declare, Declared, Discharge, Rejected, Source, TransactionalState
from bascule.amqp.transactions import encode_control
from bascule.amqp.types import Int
from bascule.broker.message import BrokerMessage
from bascule.core.destination import Routing
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.jms.message import JmsMessage, encode_message
from bascule.jms.sections import VALUE, places
from bascule.server.coordinator import CoordinatorLink
from bascule.server.management import TYPE
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.unit.server.served import TOPIC, Client, Served, run_async

MANY = 100
SUBSCRIPTIONS = 50


class Committing:
    """A client that has sent many messages in a transaction, to a topic whose subscriptions have selectors."""

    def __init__(self) -> None:
        self.served = Served(BrokerInMemory(turn_steps=1_000))
        self.engine = self.served.engine
        self.queues = [
            self.engine.create_queue(f"s{number}", "topic", Routing.MULTICAST, selector=f"number = {number}")
            for number in range(SUBSCRIPTIONS)
        ]
        self.client = Client(self.served, "busy")
        self.coordinator = self.client.session.attach_sender("coordinator", Source(), Coordinator())
        self.served.settle(self.client)
        self.producer = self.client.producer("topic", capabilities=TOPIC)
        self.transaction = self.begin(self.producer)

    def begin(self, producer: SenderLink) -> bytes:
        self.coordinator.send(encode_control(Declare()))
        self.served.settle(self.client)
        transaction = bytes(next(event.state.txn_id for event in self.client.events_of(Dispositioned) if isinstance(event.state, Declared)))
        for number in range(MANY):
            body = message_bytes(number, properties={"number": number % SUBSCRIPTIONS})
            producer.send(body, state=TransactionalState(transaction), settled=True)
        self.served.settle(self.client)
        return transaction

    def discharge(self, *, fail: bool = False) -> None:
        self.coordinator.send(encode_control(Discharge(self.transaction, fail)))

    async def handled(self) -> int:
        """Wait until all input of the client is handled. Return the number of turns."""
        turns = 0
        while self.client.connection.behind:
            self.engine.go_on()
            await asyncio.sleep(0)
            turns += 1
        self.served.settle(self.client)
        return turns

    def content(self, message: BrokerMessage) -> object:
        body = self.engine.bodies.read(message)
        return next(decode(body, start)[0] for section, start, _ in places(body) if section == VALUE)

    @property
    def held(self) -> list[int]:
        return [queue.held_messages for queue in self.queues]


@run_async
async def test_commit_to_subscriptions_with_selectors_takes_many_turns_and_others_are_served_meanwhile() -> None:
    run = Committing()
    other = Client(run.served, "other")
    inbox = other.consumer("inbox", credit=10)
    run.discharge()
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert run.client.connection.behind
    assert not run.client.wire.reading
    assert run.transaction in run.engine.transactions
    run.served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    run.served.settle(other)
    assert other.received(inbox) == 1
    assert run.held == [0] * SUBSCRIPTIONS
    await run.handled()
    assert run.client.events_of(Dispositioned)[-1].state == ACCEPTED
    assert run.held == [MANY // SUBSCRIPTIONS] * SUBSCRIPTIONS


@run_async
async def test_frames_behind_a_commit_wait_for_it() -> None:
    run = Committing()
    run.discharge()
    run.producer.send(message_bytes("behind", properties={"number": 0}), settled=True)
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert run.engine.counters.messages_in == MANY
    await run.handled()
    contents = [run.content(message) for message in run.queues[0].ready]
    assert contents == [*range(0, MANY, SUBSCRIPTIONS), "behind"]


@run_async
async def test_transaction_is_rolled_back_when_client_is_lost_during_commit_planning() -> None:
    run = Committing()
    run.discharge()
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert run.engine.memory.plans_bytes > 0
    run.client.connection.connection_lost(None)
    run.served.settle()
    assert run.engine.counters.rolled_back == 1
    assert run.held == [0] * SUBSCRIPTIONS
    assert (run.engine.memory.plans_bytes, run.engine.memory.transactions_bytes) == (0, 0)


@run_async
async def test_rollback_takes_one_turn() -> None:
    run = Committing()
    run.discharge(fail=True)
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert not run.client.connection.behind
    assert run.engine.counters.rolled_back == 1


def request(operation: str, **properties: object) -> bytes:
    fields = {"type": TYPE, "operation": operation, "formatId": Int(7), "gtrid": "67", "bqual": "62", **properties}
    return encode_message(JmsMessage(destination=MANAGEMENT_ADDRESS, body_kind="message", properties=fields))


@pytest.mark.parametrize("operation", ["prepare", "commit"])
@run_async
async def test_request_that_turns_large_transaction_into_branch_takes_several_turns(operation: str) -> None:
    run = Committing()
    requests = run.client.producer(MANAGEMENT_ADDRESS)
    requests.send(request(operation, txnId=run.transaction.hex()), settled=True)
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert run.client.connection.behind
    assert run.transaction in run.engine.transactions
    assert await run.handled() >= 1
    assert run.transaction not in run.engine.transactions
    assert len(run.engine.branches.prepared) == (operation == "prepare")
    assert run.held == [0 if operation == "prepare" else MANY // SUBSCRIPTIONS] * SUBSCRIPTIONS
    assert run.engine.memory.plans_bytes == 0


@run_async
async def test_commit_of_prepared_branch_takes_many_turns() -> None:
    run = Committing()
    requests = run.client.producer(MANAGEMENT_ADDRESS)
    requests.send(request("prepare", txnId=run.transaction.hex()), settled=True)
    run.client.connection.data_received(run.client.amqp.data_to_send())
    await run.handled()
    requests.send(request("commit"), settled=True)
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert run.client.connection.behind
    assert await run.handled() > 3
    assert run.engine.branches.prepared == {}
    assert run.held == [MANY // SUBSCRIPTIONS] * SUBSCRIPTIONS


@run_async
async def test_branch_stays_prepared_when_client_is_lost_during_commit_planning() -> None:
    run = Committing()
    requests = run.client.producer(MANAGEMENT_ADDRESS)
    requests.send(request("prepare", txnId=run.transaction.hex()), settled=True)
    run.client.connection.data_received(run.client.amqp.data_to_send())
    await run.handled()
    requests.send(request("commit"), settled=True)
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert run.engine.memory.plans_bytes > 0
    run.client.connection.connection_lost(None)
    run.served.settle()
    assert len(run.engine.branches.prepared) == 1
    assert run.engine.memory.plans_bytes == 0
    assert run.held == [0] * SUBSCRIPTIONS


@run_async
async def test_discharge_by_another_link_does_not_plan_the_transaction() -> None:
    run = Committing()
    other = run.client.session.attach_sender("other coordinator", Source(), Coordinator())
    run.served.settle(run.client)
    other.send(encode_control(Discharge(run.transaction, fail=False)))
    run.served.settle(run.client)
    assert isinstance(run.client.events_of(Dispositioned)[-1].state, Rejected)
    assert run.engine.memory.plans_bytes == 0
    body = message_bytes("more", properties={"number": 0})
    run.producer.send(body, state=TransactionalState(run.transaction), settled=True)
    run.discharge()
    run.client.connection.data_received(run.client.amqp.data_to_send())
    await run.handled()
    assert run.held == [MANY // SUBSCRIPTIONS + 1, *[MANY // SUBSCRIPTIONS] * (SUBSCRIPTIONS - 1)]


@run_async
async def test_request_is_dropped_if_its_link_ends_while_it_is_planned_and_its_transaction_continues() -> None:
    run = Committing()
    requests = run.client.producer(MANAGEMENT_ADDRESS)
    before = set(run.client.connection.client.links)
    requests.send(request("prepare", txnId=run.transaction.hex()), settled=True)
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert run.engine.memory.plans_bytes > 0
    (link,) = [link for link in before if getattr(link.context, "address", None) == MANAGEMENT_ADDRESS]
    run.client.connection.client.end_link(link, AmqpError(RESOURCE_LIMIT_EXCEEDED, "enough"))
    await run.handled()
    assert run.engine.memory.plans_bytes == 0
    assert run.engine.branches.prepared == {}
    run.discharge()
    run.client.connection.data_received(run.client.amqp.data_to_send())
    await run.handled()
    assert run.held == [MANY // SUBSCRIPTIONS] * SUBSCRIPTIONS


@run_async
async def test_transaction_is_rolled_back_if_its_coordinator_link_ends_while_its_commit_is_planned() -> None:
    run = Committing()
    run.discharge()
    run.client.connection.data_received(run.client.amqp.data_to_send())
    (link,) = [link for link in run.client.connection.client.links if isinstance(link.context, CoordinatorLink)]
    run.client.connection.client.end_link(link, AmqpError(RESOURCE_LIMIT_EXCEEDED, "enough"))
    await run.handled()
    assert run.engine.counters.rolled_back == 1
    assert (run.engine.memory.plans_bytes, run.engine.memory.transactions_bytes) == (0, 0)
    assert run.held == [0] * SUBSCRIPTIONS


@pytest.mark.parametrize("end", ["detach", "end", "close"])
@run_async
async def test_detach_end_or_close_sent_after_commit_is_handled_after_commit(end: str) -> None:
    run = Committing()
    run.discharge()
    {"detach": run.coordinator.detach, "end": run.client.session.end, "close": run.client.amqp.close}[end]()
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert run.transaction in run.engine.transactions
    await run.handled()
    assert (run.engine.counters.committed, run.engine.counters.rolled_back) == (1, 0)
    assert run.held == [MANY // SUBSCRIPTIONS] * SUBSCRIPTIONS


@run_async
async def test_epoch_end_during_commit_planning_discards_commit() -> None:
    run = Committing()
    run.discharge()
    run.client.connection.data_received(run.client.amqp.data_to_send())
    assert run.engine.memory.plans_bytes > 0
    appended = run.engine.journaling.sequence
    run.served.up = False
    await asyncio.sleep(0)
    run.client.connection.connection_lost(None)
    run.engine.go_on()
    assert (run.engine.memory.plans_bytes, run.engine.memory.transactions_bytes) == (0, 0)
    assert (run.engine.journaling.sequence, run.engine.counters.committed) == (appended, 0)
