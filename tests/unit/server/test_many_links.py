"""The broker does work on all links of a client in short slices, and serves other clients between the slices."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from bascule.amqp.errors import CONNECTION_FORCED, AmqpError
from bascule.amqp.events import AttachConfirmed, ConnectionClosed, Detached, Transferred
from bascule.amqp.frames import performative_frame
from bascule.amqp.performatives import Close, Error, Source, Target
from bascule.broker import node
from bascule.client import Queue
from bascule.client.blocking import Context
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.core.user_limits import LimitRules, UserResource
from bascule.server.client_turns import ClientTurns
from bascule.server.usage import UsageLimits
from bascule.testing.broker import Sender, message_bytes
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import SOON_S, called, kafka, serving
from tests.unit.server.served import QUEUE, TOPIC, Client, Served, run_async

__all__ = ["kafka"]
LINKS = 40


class Sliced(Served):
    """A broker that does one piece of work over all links of a client in each turn, after the test has called ``slice``."""

    def slice(self, turn_s: float = math.inf) -> None:
        self.client_turns = ClientTurns(turn_s=turn_s, slice_s=0.0)


class Returning(Client):
    """A client that waits in the event loop until the broker continues with it."""

    def say(self) -> bool:
        data = self.amqp.data_to_send()
        if data:
            self.connection.data_received(data)
        return bool(data)


async def turns_until(done: Callable[[], bool]) -> int:
    """Run the event loop until a condition is true. Return the number of turns."""
    turns = 0
    while not done():
        await asyncio.sleep(0)
        turns += 1
        assert turns < 20 * LINKS
    return turns


@run_async
async def test_connection_with_many_links_is_released_in_many_turns_and_others_are_served_meanwhile() -> None:
    served = Sliced()
    busy, other = Client(served, "busy"), Client(served, "other")
    inbox = other.consumer("inbox", credit=10)
    for number in range(LINKS):
        busy.consumer(f"q{number}", name=f"link-{number}")
    served.slice()
    busy.connection.connection_lost(None)
    assert len(busy.connection.client.links) >= LINKS - 1
    served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    served.settle(other)
    assert other.received(inbox) == 1
    assert await turns_until(lambda: not busy.connection.client.leaving) >= LINKS
    assert len(busy.connection.client.links) == 0
    assert not any(queue.consumers for queue in served.engine.addresses.queues.values() if queue.name != "inbox")
    assert served.contained == []


@run_async
async def test_messages_of_lost_client_return_in_order_over_many_turns() -> None:
    served = Sliced()
    busy, other = Client(served, "busy"), Client(served, "other")
    for number in range(LINKS):
        busy.consumer("q", credit=1, name=f"link-{number}")
    for number in range(LINKS):
        served.broker.send("q", message_bytes(number), Sender(), number)
    served.settle(busy)
    taker = other.consumer("q", credit=LINKS)
    contexts = list(busy.connection.client.links)
    busy.connection.client.links.held = dict.fromkeys(reversed(contexts))  # the newest message is returned first
    served.slice()
    busy.connection.connection_lost(None)
    await turns_until(lambda: not busy.connection.client.leaving)
    served.settle(other)
    got = [event.payload for event in other.events_of(Transferred) if event.link is taker]
    assert len(got) == LINKS
    assert [payload[-1] for payload in got] == list(range(LINKS))  # numbers of one byte


@run_async
async def test_client_that_is_being_released_receives_no_messages() -> None:
    served = Sliced()
    busy = Client(served, "busy")
    for number in range(LINKS):
        busy.consumer("q", credit=10, name=f"link-{number}")
    served.slice()
    busy.connection.connection_lost(None)
    served.fill("q", LINKS)
    served.dispatch()
    assert served.engine.memory.unsettled == 0
    await turns_until(lambda: not busy.connection.client.leaving)
    assert served.engine.queue("q").waiting_count == LINKS
    assert served.engine.counters.messages_out == 0


@run_async
async def test_close_is_answered_when_all_links_are_released() -> None:
    served = Sliced()
    client = Client(served)
    for number in range(LINKS):
        client.consumer(f"q{number}", name=f"link-{number}")
    served.slice()
    client.amqp.close()
    client.connection.data_received(client.amqp.data_to_send())
    assert client.connection.client.leaving
    client.connection.send_output()
    assert client.wire.written == []
    assert not client.wire.closing
    await turns_until(lambda: client.wire.closing)
    assert len(client.connection.client.links) == 0
    client.listen()
    assert len(client.events_of(ConnectionClosed)) == 1


@pytest.mark.parametrize("how", ["lost", "closed"])
@run_async
async def test_reconnected_client_waits_for_release_of_old_connection_and_gets_its_durable_subscription(how: str) -> None:
    served = Sliced()
    before = Client(served, "client")
    for number in range(LINKS):
        before.consumer(f"q{number}", name=f"link-{number}")
    before.consumer("t", name="sub", capabilities=TOPIC, durable=2, expiry_policy="never")
    served.slice()
    if how == "lost":
        before.connection.connection_lost(None)
    else:
        before.amqp.close()
        before.connection.data_received(before.amqp.data_to_send())
    assert before.connection.client.leaving
    again = Returning(served, "client", begins=False)
    assert again.connection.behind
    await turns_until(lambda: not again.connection.behind)
    again.session = again.amqp.begin()
    again.consumer("t", name="sub", capabilities=TOPIC, durable=2, expiry_policy="never")
    assert not before.connection.client.leaving

    def confirmed() -> bool:
        served.settle(again)  # on a busy machine the broker handles the attach, and stores the subscription, in a later turn
        return bool(again.events_of(AttachConfirmed))

    await turns_until(confirmed)
    assert len(again.events_of(AttachConfirmed)) == 1
    assert again.events_of(Detached) == []


@run_async
async def test_links_are_woken_over_many_turns_when_client_resumes_reading() -> None:
    served = Sliced()
    client = Client(served)
    links = [client.consumer(f"q{number}", credit=1, name=f"link-{number}") for number in range(LINKS)]
    client.connection.pause_writing()
    for number in range(LINKS):
        served.broker.send(f"q{number}", message_bytes("x", durable=False), Sender(), number)
    served.dispatch()
    served.slice()
    client.connection.resume_writing()
    first = served.engine.memory.unsettled
    assert first <= 1
    turns = await turns_until(lambda: served.engine.memory.unsettled == LINKS)
    assert turns >= LINKS - 1
    served.settle(client)
    assert [client.received(link) for link in links] == [1] * LINKS


@run_async
async def test_links_are_woken_again_when_client_resumes_reading_during_wake() -> None:
    served = Sliced()
    client = Client(served)
    for number in range(LINKS):
        client.consumer(f"q{number}", credit=1, name=f"link-{number}")
    served.slice()
    client.connection.client.wake_all()
    for _ in range(LINKS // 2):
        await asyncio.sleep(0)
    client.connection.pause_writing()
    served.broker.send("q0", message_bytes("x", durable=False), Sender(), 1)  # whose consumer was woken before
    served.dispatch()
    assert served.engine.memory.unsettled == 0
    client.connection.resume_writing()
    await turns_until(lambda: served.engine.memory.unsettled == 1)


@run_async
async def test_simultaneously_lost_clients_share_turn_time() -> None:
    served = Sliced()
    clients = [Client(served, f"client {number}") for number in range(3)]
    for client in clients:
        client.producer("q")
    served.slice(turn_s=0.0)  # no turn has time left
    for client in clients:
        client.connection.connection_lost(None)
    assert [len(client.connection.client.links) for client in clients] == [1, 1, 1]
    await turns_until(lambda: not any(client.connection.client.leaving for client in clients))
    assert served.engine.addresses.producers == {}


@run_async
async def test_remains_of_lost_client_count_towards_no_limit_of_its_user() -> None:
    """The application may reconnect with another client id before all links are released."""
    served = Sliced(
        usage=UsageLimits(of_users=LimitRules({UserResource.SESSIONS: 2, UserResource.LINKS: LINKS + 1, UserResource.TRANSACTIONS: 1}))
    )
    busy, other = Client(served, "busy"), Client(served, "other", begins=False)
    for number in range(LINKS):
        busy.consumer(f"q{number}", name=f"link-{number}")
    busy.connection.client.begin()
    usage = served.usage.users["anonymous"]
    served.slice()
    busy.connection.connection_lost(None)
    assert busy.connection.client.leaving
    assert (usage.sessions.count, usage.links.count, usage.transactions.count) == (0, 0, 0)
    again = Client(served, "again")
    for number in range(2):
        again.consumer(f"q{number}", name=f"again-{number}")
    assert again.events_of(Detached) == []
    await turns_until(lambda: not busy.connection.client.leaving)
    assert (usage.sessions.count, usage.links.count, usage.transactions.count) == (1, 2, 0)
    assert other.events_of(ConnectionClosed) == []


@run_async
async def test_queue_from_which_a_lost_client_holds_no_message_delivers_while_its_links_are_released() -> None:
    served = Sliced()
    busy, other = Client(served, "busy"), Client(served, "other")
    for number in range(LINKS):
        busy.consumer("inbox", credit=1, name=f"link-{number}")
    inbox = other.consumer("inbox", credit=1)
    served.slice()
    busy.connection.connection_lost(None)
    served.fill("inbox", 1)
    served.dispatch()
    other.run()
    assert busy.connection.client.leaving
    assert other.received(inbox) == 1


@run_async
async def test_links_of_a_lost_client_are_released_in_each_turn_however_many_clients_are_busy() -> None:
    served = Sliced()
    busy = Client(served, "busy")
    for number in range(LINKS):
        busy.consumer(f"q{number}", name=f"link-{number}")
    served.slice(turn_s=0.0)  # each turn has time for one client
    turns = served.client_turns
    served_clients = [0] * 10

    def act(client: int) -> None:
        served_clients[client] += 1
        turns.later(partial(act, client))

    for client in range(10):
        turns.later(partial(act, client))
    busy.connection.connection_lost(None)
    assert await turns_until(lambda: not busy.connection.client.leaving) <= 2 * LINKS
    assert min(served_clients) >= LINKS // 10


@run_async
async def test_nothing_follows_the_close_of_the_broker_though_answers_fall_due_while_links_are_released() -> None:
    served = Sliced()
    client = Client(served)
    for number in range(LINKS):
        client.consumer(f"q{number}", name=f"link-{number}")
    sender = client.producer("q0")
    client.session.attach_receiver("late", Source("new", capabilities=QUEUE), Target())
    sender.send(message_bytes("x"))
    client.say()
    served.slice()
    error = AmqpError(CONNECTION_FORCED, "closed by the administrator")
    client.connection.close(error)
    assert client.connection.client.leaving
    served.broker.settle()  # the queue of the late consumer, and the message, are stored
    await turns_until(lambda: bool(client.wire.written))
    assert b"".join(client.wire.written).endswith(performative_frame(0, Close(Error.of(error))))
    assert served.contained == []


class SlowTurns(ClientTurns):
    """One link a turn, and few turns, as with thousands of links on a busy machine."""

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_later(0.02, self._turn)


@pytest.mark.interpreted
@run_async
async def test_stopping_broker_notifies_client_with_many_links_before_it_ends(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "CLIENTS_LEAVE_S", SOON_S)

    def consume(context: Context) -> None:
        for number in range(LINKS):
            context.consumer(Queue(f"q{number}"))

    async with serving(kafka, tmp_path) as broker:
        context = await called(broker.connect)
        await called(consume, context)
        (connection,) = broker.node.connections
        broker.node.client_turns = SlowTurns(slice_s=0.0)
        await broker.stop()
        assert not connection.client.leaving
        assert not any(queue.consumers for queue in connection.client.engine.addresses.queues.values())
        with pytest.raises(BasculeError, match="shutting down"):
            await called(context.send, Queue("q0"), "x")


@run_async
async def test_output_of_many_clients_is_written_in_many_turns_in_order() -> None:
    served = Served()
    clients = [Client(served, f"client-{number}") for number in range(LINKS)]
    links = [client.consumer("news", credit=10, capabilities=TOPIC) for client in clients]
    served.output._turn_s = 0.0
    first, second = (message_bytes(number, durable=False) for number in (1, 2))
    served.broker.send("news", first, Sender(), 1, routing=Routing.MULTICAST)
    served.dispatch()
    served.broker.send("news", second, Sender(), 2, routing=Routing.MULTICAST)
    served.dispatch()  # writes nothing more in this turn
    assert sum(bool(client.wire.written) for client in clients) == 1
    for written in range(2, LINKS + 1):
        await asyncio.sleep(0)
        assert sum(bool(client.wire.written) for client in clients) == written
    for client, link in zip(clients, links, strict=True):
        client.listen()
        received = [event.payload for event in client.events_of(Transferred) if event.link is link]
        assert received in ([first], [first, second])
    assert served.contained == []


@run_async
async def test_ended_connection_that_waits_for_its_output_is_dropped() -> None:
    served = Served()
    lost, other = Client(served, "lost"), Client(served, "other")
    served.output._turn_s = 0.0
    for client in (other, lost, other):
        client.connection.touch()
    lost.connection.connection_lost(None)
    await asyncio.sleep(0)
    served.output.write()
    assert lost.wire.written == []
    assert lost.connection not in served.connections


@run_async
async def test_timers_of_many_clients_that_are_due_at_once_take_many_turns() -> None:
    served = Served()
    clients = [Client(served, f"client-{number}") for number in range(LINKS)]
    served.client_turns = ClientTurns(turn_s=0.0, slice_s=0.0)
    for client in clients:
        client.connection._ticking()
        client.wire.written.clear()
        client.connection.amqp._deadlines._heartbeat_due_s = 0.0  # the broker owes the client a sign of life
        client.connection.amqp._deadlines.sent = False
        assert client.connection._tick is not None
        client.connection._tick._run()
    clients[0].connection.connection_lost(None)
    beats = []
    for _ in range(LINKS):
        await asyncio.sleep(0)
        beats.append(sum(bool(client.wire.written) for client in clients))
    assert max(after - before for before, after in pairwise(beats)) == 1
    assert beats[-1] == LINKS - 1
    assert served.contained == []
