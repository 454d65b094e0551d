"""Several transacted sessions of Qpid JMS on one connection that breaks: the reset for one session interrupts the others."""

from __future__ import annotations

import asyncio
import heapq
import random

import pytest

from bascule.amqp.events import ConnectionClosed, Detached, Dispositioned, Flowed
from bascule.amqp.performatives import ACCEPTED, Coordinator, Declare, Declared, Discharge, Source, Target, TransactionalState
from bascule.amqp.transactions import encode_control
from bascule.server import connection_reset
from bascule.server.connection import HANDLERS
from bascule.server.interruptions import PRODUCT, RETURN_S, ConnectionHistory
from bascule.testing.broker import Sender, message_bytes
from tests.unit.server.served import Client, Served, run_async
from tests.unit.server.test_interrupted_sessions import PREFETCH, served_with


class Member:
    """A session as the Java client keeps it over connections. ``in_doubt``: its transaction can only be rolled back."""

    def __init__(self, number: int, batch: int) -> None:
        self.number, self.batch = number, batch
        self.received = 0
        self.waits = self.in_doubt = False
        self.committed = 0

    def open(self, client: Client, served: Served) -> None:
        """Reset as the client does: a session that waited for an answer got an error and has forgotten its state."""
        self.client, self.served = client, served
        self.in_doubt = self.received > 0 and not self.waits
        self.received, self.waits = (self.received if self.in_doubt else 0), False
        self.session = client.amqp.begin()
        client.run()
        self.coordinator = self.session.attach_sender(f"coordinator-{self.number}", Source(), Coordinator())
        served.settle(client)
        self.coordinator.send(encode_control(Declare()))
        served.settle(client)
        self.consumer = self.session.attach_receiver(f"consumer-{self.number}", Source("q", capabilities=("queue",)), Target())
        served.settle(client)
        self.consumer.flow(PREFETCH)
        served.settle(client)

    def transactions(self) -> list[bytes]:
        answers = [event for event in self.client.events_of(Dispositioned) if event.session is self.session]
        return [bytes(event.state.txn_id) for event in answers if isinstance(event.state, Declared)]

    def turn(self) -> None:
        """Receive one message, or end the transaction when it has enough."""
        if self.waits:
            return
        if self.received < self.batch:
            ahead = [number for number, link in self.session.incoming.items() if link is self.consumer]
            if not ahead:
                return
            self.consumer.settle(ahead[0], TransactionalState(self.transactions()[-1], ACCEPTED))
            self.received += 1
            if self.consumer.credit <= PREFETCH // 2 and self.consumer.credit + len(ahead) - 1 <= 0.7 * PREFETCH:
                self.consumer.flow(PREFETCH - len(ahead) + 1)
            self.served.settle(self.client)
            return
        before = self.transactions()
        self.coordinator.send(encode_control(Discharge(before[-1], self.in_doubt)))
        self.coordinator.send(encode_control(Declare()))
        self.served.settle(self.client)
        self.waits = self.transactions() == before
        if not self.waits:
            self.committed += not self.in_doubt
            self.received, self.in_doubt = 0, False


class Application:
    """Members that work concurrently at the same speed. The client reconnects whenever the connection ends."""

    def __init__(self, served: Served, members: list[Member]) -> None:
        self.served, self.members = served, members
        self.connections = 0
        self.random = random.Random(1)
        self.due = [(self.random.random() * each.batch, each.number) for each in members]
        heapq.heapify(self.due)
        self.connect()

    def connect(self) -> None:
        self.connections += 1
        self.client = Client(self.served, product=PRODUCT)
        for each in self.members:
            each.open(self.client, self.served)

    def work(self, turns: int) -> None:
        for _ in range(turns):
            time, number = heapq.heappop(self.due)
            member = self.members[number]
            ends = member.received >= member.batch and not member.waits
            member.turn()
            heapq.heappush(self.due, (time + (0.001 if ends else 1 + 0.1 * self.random.random()), number))
            if self.client.events_of(ConnectionClosed):
                self.break_off()

    def break_off(self) -> None:
        self.client.run()
        self.client.connection.connection_lost(None)
        self.connect()


@pytest.mark.parametrize("sessions", [1, 2, 3, 10])
@pytest.mark.parametrize("batch", [1, 3])
@run_async
async def test_all_sessions_work_again_after_one_reset(sessions: int, batch: int) -> None:
    served = served_with(3000)
    application = Application(served, [Member(number, batch) for number in range(sessions)])
    application.work(9 * sessions)
    application.break_off()  # the only interruption
    application.work(20 * sessions * (batch + 1))
    assert application.connections <= 3
    assert served.engine.counters.dead_lettered == 0
    for each in application.members:
        each.committed = 0
    application.work(20 * sessions * (batch + 1))
    assert application.connections <= 3
    assert all(each.committed >= 10 for each in application.members)


@run_async
async def test_commits_are_held_until_no_session_is_in_the_middle_of_a_transaction() -> None:
    served = served_with(3000, lost=("client",))
    doubtful, busy, slow = members = [Member(number, 2) for number in range(3)]
    application = Application(served, members)
    doubtful.in_doubt = True
    for each in (doubtful, doubtful, busy, busy, slow):
        each.turn()
    doubtful.turn()
    assert doubtful.waits
    busy.turn()
    assert busy.waits
    assert not application.client.events_of(ConnectionClosed)
    slow.turn()
    slow.turn()
    assert application.client.events_of(ConnectionClosed)
    assert (busy.committed, slow.committed) == (0, 0)
    assert served.engine.queue("q").held_messages == 3000


def held_up(served: Served) -> tuple[Application, Member, Member]:
    """Return a session that waits for a reset, and another one that has received and does not commit."""
    doubtful, slow = members = [Member(number, 2) for number in range(2)]
    application = Application(served, members)
    doubtful.in_doubt = True
    for each in (slow, doubtful, doubtful, doubtful):
        each.turn()
    assert doubtful.waits
    assert not application.client.events_of(ConnectionClosed)
    return application, doubtful, slow


def held_up_too_long(served: Served, monkeypatch: pytest.MonkeyPatch) -> Application:
    """Return the same after the time limit, which is noticed in the loop's next turn."""
    monkeypatch.setattr(connection_reset, "LOOK_S", 0.0)
    application, _, _ = held_up(served)
    reset = application.client.connection.client.reset
    assert reset is not None
    reset._until_s = 0.0
    return application


async def wait_told(client: Client) -> None:
    while not client.events_of(ConnectionClosed):
        await asyncio.sleep(0)
        client.served.settle(client)


class SendsFirst(Member):
    """A member whose application begins with a send while the client is not connected: the client accepts it, so it is in doubt again."""

    def open(self, client: Client, served: Served) -> None:
        again = hasattr(self, "client")
        super().open(client, served)
        self.in_doubt = again


@run_async
async def test_a_session_in_doubt_after_every_reset_loses_its_consumer_but_no_message() -> None:
    served = served_with(3000)
    member = SendsFirst(0, 3)
    application = Application(served, [member])
    application.work(40)
    application.break_off()
    application.work(400)
    assert application.connections == 2 + connection_reset.RESETS_MAX
    (ended,) = application.client.events_of(Detached)
    assert "close and recreate the consumer" in str(ended.error)
    assert served.engine.queue("q").held_messages == 3000 - 3 * member.committed
    assert served.engine.counters.dead_lettered == 0


@pytest.mark.parametrize(("resets", "limit_s"), [(0, 5), (3, 40)])
@run_async
async def test_wait_limit_of_connection_reset_doubles_with_each_reset(resets: int, limit_s: float) -> None:
    served = served_with(3000)
    served.interruptions.lost("anonymous", "client", ConnectionHistory(2 * RETURN_S, resets=resets - 1), frozenset() if resets else None)
    application, _, _ = held_up(served)
    reset = application.client.connection.client.reset
    assert reset is not None
    assert reset._until_s - asyncio.get_running_loop().time() == pytest.approx(limit_s, abs=1)


@run_async
async def test_a_reset_does_not_wait_for_an_ended_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_reset, "LOOK_S", 0.0)
    application, _, slow = held_up(served_with(3000, lost=("client",)))
    slow.session.end()
    await wait_told(application.client)


@run_async
async def test_close_by_client_during_pending_reset_leaves_no_interruption_history() -> None:
    served = served_with(3000, lost=("client",))
    application, _, _ = held_up(served)
    reset = application.client.connection.client.reset
    application.client.amqp.close()
    application.client.run()
    assert reset is not None
    assert reset._next.cancelled()
    assert served.interruptions.opened("anonymous", "client", {"product": PRODUCT}) == ConnectionHistory()


@run_async
async def test_history_of_a_reset_client_outlives_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    served = served_with(3000, lost=("client",))
    application = held_up_too_long(served, monkeypatch)
    while not application.client.connection.client.ended:
        await asyncio.sleep(0)
        served.broker.settle()
    application.client.connection.connection_lost(None)  # before the client has answered
    history = served.interruptions.opened("anonymous", "client", {"product": PRODUCT})
    assert history is not None
    assert history.resets == 1


@run_async
async def test_messages_of_a_reset_connection_are_delivered_to_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served = served_with(20, lost=("client",))
    application = held_up_too_long(served, monkeypatch)
    other = Client(served, "other")
    consumer = other.consumer("q", 100)
    before = other.received(consumer)
    while not application.client.connection.client.ended:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    other.listen()
    assert other.received(consumer) > before


@run_async
async def test_connection_closed_by_broker_error_counts_as_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    served = served_with(5)
    client = Client(served, product=PRODUCT)
    monkeypatch.setitem(HANDLERS, Flowed, lambda *_: 1 / 0)
    client.consumer("q", 1)
    assert client.events_of(ConnectionClosed)
    assert served.interruptions.opened("anonymous", "client", {"product": PRODUCT}) != ConnectionHistory()


@run_async
async def test_a_reset_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    served = served_with(3000, lost=("client",))
    application = held_up_too_long(served, monkeypatch)
    await wait_told(application.client)
    history = served.interruptions._lost["anonymous", "client"]
    assert history.resets == 1
    assert history.waited == {"coordinator-0"}


@run_async
async def test_requests_before_a_reset_are_stored_and_answered_first() -> None:
    served = served_with(3000, lost=("client",))
    doubtful, other = members = [Member(number, 1) for number in range(2)]
    application = Application(served, members)
    doubtful.in_doubt = True
    doubtful.turn()
    other.turn()
    txn_id = other.transactions()[-1]
    other.coordinator.send(encode_control(Discharge(txn_id, False)))
    doubtful.coordinator.send(encode_control(Discharge(doubtful.transactions()[-1], True)))
    doubtful.coordinator.send(encode_control(Declare()))
    application.client.run()  # nothing is stored yet
    assert not application.client.events_of(ConnectionClosed)
    served.settle(application.client)
    answers = [event for event in application.client.events if isinstance(event, Dispositioned | ConnectionClosed)]
    assert isinstance(answers[-1], ConnectionClosed)
    assert [event.state for event in answers[:-1] if event.session is other.session][-1] == ACCEPTED


@run_async
async def test_frames_behind_the_end_of_a_connection_in_the_same_read_are_ignored() -> None:
    served = served_with(0, lost=("client",))
    for number in range(50):
        served.broker.send("q", message_bytes(number, durable=False), Sender(), number)  # these need not be stored first
    served.broker.settle()
    member = Member(0, 1)
    application = Application(served, [member])
    member.in_doubt = True
    member.turn()
    member.coordinator.send(encode_control(Discharge(member.transactions()[-1], True)))
    member.coordinator.send(encode_control(Declare()))
    late = application.client.session.attach_receiver("late", Source("q", capabilities=("queue",)), Target())
    late.flow(PREFETCH)
    application.client.say()
    assert application.client.connection.client.ended
    assert not served.engine.queue("q").consumers


@run_async
async def test_interruption_is_remembered_after_refused_connection() -> None:
    served = served_with(5, lost=("client",))
    served.reason = "Kafka does not answer"
    Client(served, product=PRODUCT)
    served.reason = ""
    client = Client(served, product=PRODUCT)
    assert client.connection.client.history is not None
    assert client.connection.client.history.interrupted_s is not None
    client.connection.connection_lost(None)
    assert served.interruptions.opened("anonymous", "client", {"product": PRODUCT}) != ConnectionHistory()
