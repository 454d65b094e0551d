"""The broker handles the input that a client sends at once in short turns, and serves other clients between the turns."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from bascule.amqp import hot
from bascule.amqp.codec import decode
from bascule.amqp.composite import Composite
from bascule.amqp.errors import CONNECTION_FORCED, RESOURCE_LIMIT_EXCEEDED, AmqpError
from bascule.amqp.events import AttachConfirmed, Detached, Dispositioned, Transferred
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import Accepted, Begin, Close, Detach, Disposition, End, Open, Rejected, Source, Target
from bascule.amqp.session import Session
from bascule.amqp.states import LinkState
from bascule.amqp.types import Symbol
from bascule.broker.policy import DROP, AddressPolicy, Policy
from bascule.core.permissions import AllowAll, Permission, Unauthorized
from bascule.jms.sections import VALUE, Scan, places, scan
from bascule.server import connection, pieces, transfers
from bascule.server.interruptions import PRODUCT
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.support.costs import calls_of
from tests.unit.amqp.pair import frames_of
from tests.unit.server.served import QUEUE, Client, Served, run_async

LINKS = 300
ACCEPTED, REJECTED, RELEASED = b"\x00\x53\x24\x45", b"\x00\x53\x25\x45", b"\x00\x53\x26\x45"


@run_async
async def test_many_attaches_at_once_take_many_turns_and_others_are_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    served = Served()
    busy, other = Client(served, "busy"), Client(served, "other")
    inbox = other.consumer("inbox", credit=10)
    for number in range(LINKS):
        busy.session.attach_sender(f"link-{number}", Source(), Target("q", capabilities=QUEUE))
    busy.connection.data_received(busy.amqp.data_to_send())
    assert busy.connection.behind
    assert not busy.wire.reading
    assert 0 < len(busy.connection.client.links) < LINKS
    served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    served.settle(other)
    assert other.received(inbox) == 1
    turns = 0
    while busy.connection.behind:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 3
    assert busy.wire.reading
    served.settle(busy)
    assert len(busy.events_of(AttachConfirmed)) == LINKS


@run_async
async def test_many_small_messages_are_handled_in_many_turns_before_following_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served()
    client = Client(served)
    producer = client.producer("q")
    await asyncio.sleep(0)  # work that the login left to later turns
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    for number in range(30):
        producer.send(message_bytes(number, durable=False), settled=True)
    client.amqp.close()
    client.connection.data_received(client.amqp.data_to_send())
    taken = served.engine.queue("q").held_messages
    assert 0 < taken < 30
    assert not client.wire.closing
    turns = 0
    while client.connection.behind:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 30 - taken
    assert served.engine.queue("q").held_messages == 30
    client.connection.send_output()
    assert client.wire.closing


@run_async
async def test_cost_of_session_end_does_not_grow_with_links_of_other_sessions() -> None:
    served = Served()
    client = Client(served, product=PRODUCT)
    empty = [client.amqp.begin() for _ in range(2)]
    client.run()

    def end(session: Session) -> int:
        session.end()
        data = client.amqp.data_to_send()
        return calls_of(lambda: client.connection.data_received(data))

    few = end(empty[0])
    for number in range(LINKS):
        client.session.attach_sender(f"link-{number}", Source(), Target("q", capabilities=QUEUE))
    client.run()
    assert end(empty[1]) < few + LINKS // 2


@run_async
async def test_input_of_a_lost_client_is_not_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    served = Served()
    client = Client(served)
    for number in range(LINKS):
        client.session.attach_sender(f"link-{number}", Source(), Target("q", capabilities=QUEUE))
    client.connection.data_received(client.amqp.data_to_send())
    client.connection.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(client.connection.client.links) == 0
    assert served.engine.addresses.producers == {}
    assert served.contained == []


@pytest.mark.parametrize("role", ["producer", "consumer"])
@run_async
async def test_long_fields_of_an_answered_attach_are_not_kept(role: str) -> None:
    served = Served()
    client = Client(served)
    long = {Symbol("long"): "x" * 60_000}
    if role == "producer":
        client.session.attach_sender("link", Source(), Target("q", capabilities=QUEUE), properties=long)
    else:
        client.session.attach_receiver("link", Source("q", capabilities=QUEUE, dynamic_node_properties=long), Target())
    served.settle(client)
    assert len(client.events_of(AttachConfirmed)) == 1
    (link,) = client.connection.client.links
    assert link.remote.properties is None
    assert link.remote.source is None
    assert link.local is None


@run_async
async def test_long_fields_of_a_refused_attach_are_not_kept() -> None:
    served = Served()
    client = Client(served)
    client.session.attach_sender("link", Source(), Target("", capabilities=QUEUE), properties={Symbol("long"): "x" * 60_000})
    client.say()
    (link,) = client.connection.amqp.sessions[0].links.values()
    assert link.state is LinkState.DETACH_SENT
    assert link.remote.properties is None
    assert link.local is None


@run_async
async def test_lists_of_open_and_begin_are_not_kept() -> None:
    """Each symbol of a list takes some 80 bytes of memory, and 3 bytes of a frame."""
    many = tuple(Symbol(f"{number:x}") for number in range(3000))
    long = {Symbol("long"): "x" * 1000}
    open_frame = Open("client", "host", offered_capabilities=many, properties=long, idle_time_out=30_000)
    begin_frame = Begin(None, 0, 7, 7, 5, offered_capabilities=many, desired_capabilities=many, properties=long)
    served = Served()
    client = Client(served, begins=False)
    amqp = client.connection.amqp
    amqp._on_open(open_frame, 0)
    amqp._on_begin(begin_frame, 3)
    assert (amqp.remote_open.container_id, amqp.remote_open.idle_time_out) == ("client", 30_000)
    assert (amqp.sessions[3].remote.incoming_window, amqp.sessions[3].remote.handle_max) == (7, 5)
    for kept in (amqp.remote_open, amqp.sessions[3].remote):
        assert len(pickle.dumps(kept)) < 1000


def about(first: int, last: int, state: bytes = ACCEPTED) -> bytes:
    """Return the frame of a receiver that settles a range of deliveries."""
    return hot.disposition(0, True, first, last, True, state)


@pytest.mark.parametrize("state", [ACCEPTED, REJECTED, RELEASED])
@run_async
async def test_wide_disposition_takes_many_turns_and_the_frames_behind_it_wait(monkeypatch: pytest.MonkeyPatch, state: bytes) -> None:
    served = Served()
    busy, other = Client(served, "busy"), Client(served, "other")
    served.fill("q", LINKS)
    inbox, link = other.consumer("inbox", credit=10), busy.consumer("q", credit=LINKS)
    assert busy.received(link) == LINKS
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    link.detach()
    busy.connection.data_received(about(0, LINKS - 1, state) + busy.amqp.data_to_send())
    assert busy.connection.behind
    assert not busy.wire.reading
    (consumer,) = served.engine.queue("q").consumers
    assert len(consumer.unacked) == LINKS - pieces.DELIVERIES_PER_PIECE
    served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    served.settle(other)
    assert other.received(inbox) == 1
    turns = 1
    while busy.connection.behind:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= LINKS // pieces.DELIVERIES_PER_PIECE
    assert busy.wire.reading
    served.settle(busy)
    queue = served.engine.queue("q")
    assert (len(queue.consumers), queue.held_messages) == (0, LINKS if state is RELEASED else 0)
    assert served.engine.queue("DLQ").held_messages == (LINKS if state is REJECTED else 0)


@run_async
async def test_wide_disposition_does_not_settle_messages_sent_while_it_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    client = Client(served)
    served.fill("q", LINKS)
    link = client.consumer("q", credit=2 * LINKS)
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    client.connection.data_received(about(0, 10 * LINKS))
    assert client.connection.behind
    served.fill("q", LINKS)
    client.run()
    while client.connection.behind:
        await asyncio.sleep(0)
    assert client.received(link) == 2 * LINKS
    (consumer,) = served.engine.queue("q").consumers
    assert len(consumer.unacked) == LINKS


def content(message: bytes) -> Any:
    """Return the body of a message."""
    return next(decode(message, start)[0] for section, start, _ in places(message) if section == VALUE)


MODIFIED = b"\x00\x53\x27\xc0\x02\x01\x41"  # with a failed delivery


@pytest.mark.parametrize("state", [RELEASED, MODIFIED])
@run_async
async def test_no_message_overtakes_a_range_that_is_returned_in_pieces(monkeypatch: pytest.MonkeyPatch, state: bytes) -> None:
    served = Served()
    busy, other = Client(served, "busy"), Client(served, "other")
    for number in range(LINKS + 100):
        served.fill("q", 1, number)
    held = busy.consumer("q", credit=LINKS)
    assert busy.received(held) == LINKS
    taker = other.consumer("q")
    taker.flow(LINKS + 100)
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    queue = served.engine.queue("q")
    queue.starved.clear()
    busy.connection.data_received(about(0, LINKS - 1, state))
    assert busy.connection.behind
    other.run()
    served.dispatch()
    other.run()
    assert other.received(taker) == 0
    while busy.connection.behind:
        await asyncio.sleep(0)
    served.settle(other)
    got = [event.payload for event in other.events_of(Transferred)]
    assert len(got) == LINKS + 100
    assert [content(body) for body in got] == list(range(LINKS + 100))


@run_async
async def test_queue_delivers_again_if_a_client_is_lost_while_it_returns_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    busy, other = Client(served, "busy"), Client(served, "other")
    served.fill("q", LINKS)
    busy.consumer("q", credit=LINKS)
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    busy.connection.data_received(about(0, LINKS - 1, RELEASED))
    assert busy.connection.behind
    taker = other.consumer("q", credit=LINKS)
    assert other.received(taker) == 0
    busy.connection.connection_lost(None)
    served.settle(other)
    assert other.received(taker) == LINKS


@run_async
async def test_range_accepted_in_pieces_delays_no_other_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    busy, other = Client(served, "busy"), Client(served, "other")
    served.fill("q", LINKS + 10)
    busy.consumer("q", credit=LINKS)
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    busy.connection.data_received(about(0, LINKS - 1))
    assert busy.connection.behind
    taker = other.consumer("q", credit=10)
    assert other.received(taker) == 10
    assert busy.connection.behind


class Dropping(Served):
    """A broker whose queue "q" has more non-persistent messages than its limit now allows, and drops them over several turns."""

    def __init__(self) -> None:
        super().__init__(BrokerInMemory(policy=Policy(AddressPolicy(when_full=DROP, max_messages=2_000)), turn_steps=1_000))
        for number in range(1_500):
            self.broker.send("q", message_bytes(number, durable=False), Sender(), number)
        self.broker.settle()
        self.queue = self.engine.queue("q")
        self.queue.settings = dataclasses.replace(self.queue.settings, max_messages=10)

    async def finish(self, client: Client) -> None:
        """Run turns until all input of the client is handled."""
        while client.connection.behind:
            self.engine.go_on()
            await asyncio.sleep(0)

    @property
    def newest(self) -> list[bytes]:
        return [self.engine.bodies.read(message)[-6:] for message in self.queue.waiting()][-2:]


def send_two(client: Client, producer: SenderLink, *, settled: bool = False) -> None:
    """Send two messages, and further frames of the client."""
    for body in ("number 1", "number 2"):
        producer.send(message_bytes(body, durable=False), settled=settled)
    client.connection.data_received(client.amqp.data_to_send())


@run_async
async def test_client_input_waits_while_full_queue_drops_many_messages() -> None:
    served = Dropping()
    busy, other = Client(served, "busy"), Client(served, "other")
    inbox, producer = other.consumer("inbox", credit=10), busy.producer("q")
    send_two(busy, producer)
    assert busy.connection.behind
    assert not busy.wire.reading
    served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    served.settle(other)
    assert other.received(inbox) == 1
    await served.finish(busy)
    assert busy.wire.reading
    assert served.queue.held_messages == 10
    assert served.newest == [b"mber 1", b"mber 2"]


#: How a client ends the link or session of a message, or makes the broker end it, and the broker's answering frame.
ENDS: dict[str, tuple[Callable[[Client, SenderLink], object], type[Composite]]] = {
    "detach": (lambda _, producer: producer.detach(), Detach),
    "end": (lambda client, _: client.session.end(), End),
    "close": (lambda client, _: client.amqp.close(), Close),
    "breach": (lambda client, _: client.amqp.out.append(b"\x00\x00\x00\x09\x02\x77\x00\x00\x00"), Close),
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("settled", [False, True])
@run_async
async def test_end_behind_a_waiting_message_is_handled_after_it(how: str, settled: bool) -> None:
    act, answer = ENDS[how]
    served = Dropping()
    client = Client(served)
    producer = client.producer("q")
    for body in ("number 1", "number 2"):
        producer.send(message_bytes(body, durable=False), settled=settled)
    act(client, producer)
    client.connection.data_received(client.amqp.data_to_send())
    assert client.connection.behind
    assert len(client.connection.client.links) == 1
    served.dispatch()
    assert client.wire.written == []
    assert not client.wire.closing
    await served.finish(client)
    assert served.newest == [b"mber 1", b"mber 2"]
    assert len(client.connection.client.links) == 0
    written = [type(performative) for _, performative, _ in frames_of(b"".join(client.wire.written))]
    assert written == [*([] if settled else [Disposition]), answer]
    assert client.wire.closing is (answer is Close)
    assert served.contained == []


@run_async
async def test_waiting_message_is_dropped_with_its_connection() -> None:
    served = Dropping()
    client = Client(served)
    send_two(client, client.producer("q"))
    assert client.connection.behind
    client.connection.connection_lost(None)
    await asyncio.sleep(0)
    served.broker.settle()
    assert b"mber 1" not in served.newest
    assert len(client.connection.client.links) == 0
    assert served.contained == []


@run_async
async def test_connection_that_waits_for_its_next_turn_is_closed_if_the_epoch_ends_first() -> None:
    served = Dropping()
    client = Client(served)
    send_two(client, client.producer("q"))
    assert client.connection.behind
    served.up = False
    await asyncio.sleep(0)
    assert client.connection.behind
    client.connection.end(AmqpError(CONNECTION_FORCED, "another broker serves"))
    for now_s in (0.0, served.amqp_limits.close_timeout_s):  # the client does not answer meanwhile
        client.connection.amqp.tick(now_s)
    client.connection.send_output()
    assert client.wire.closing


@run_async
async def test_waiting_message_is_dropped_with_its_link() -> None:
    served = Dropping()
    client = Client(served)
    send_two(client, client.producer("q"))
    (link,) = client.connection.client.links
    client.connection.client.end_link(link, AmqpError(RESOURCE_LIMIT_EXCEEDED, "enough"))
    await served.finish(client)
    served.settle(client)
    assert b"mber 1" not in served.newest
    (detached,) = client.events_of(Detached)
    assert detached.error is not None
    assert detached.error.condition == RESOURCE_LIMIT_EXCEEDED


class NoCreation(AllowAll):
    """Permissions under which nobody may create a queue."""

    def authorize(self, user: str, permission: Permission, address: str) -> None:
        if permission is Permission.CREATE_ADDRESS:
            raise Unauthorized(user, permission, address)


@pytest.mark.parametrize("allowed", [True, False])
@run_async
async def test_queue_deleted_while_a_message_waits_is_recreated_if_permitted(allowed: bool) -> None:
    served = Dropping()
    served.permissions = AllowAll() if allowed else NoCreation()
    client = Client(served)
    client.connection.client.user = "ann"
    send_two(client, client.producer("q"))
    assert client.connection.behind
    served.engine.delete_queue(served.queue)
    await served.finish(client)
    served.settle(client)
    states = [type(event.state) for event in client.events_of(Dispositioned)]
    assert states == [Accepted if allowed else Rejected]
    assert ("q" in served.engine.addresses.anycast) is allowed
    if allowed:
        again = served.engine.queue("q")
        assert (again.user, again.held_messages) == ("ann", 2)


@pytest.mark.interpreted
@run_async
async def test_waiting_message_is_scanned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[bytes] = []

    def counted(data: bytes, **options: bool) -> Scan:
        scanned.append(data)
        return scan(data, **options)

    monkeypatch.setattr(transfers, "scan", counted)
    served = Dropping()
    client = Client(served)
    send_two(client, client.producer("q"))
    assert client.connection.behind
    await served.finish(client)
    assert len(scanned) == 2


@run_async
async def test_rest_of_a_wide_disposition_is_dropped_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    client = Client(served)
    served.fill("q", LINKS)
    client.consumer("q", credit=LINKS)
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    client.connection.data_received(about(0, LINKS - 1))
    client.connection.connection_lost(None)
    await asyncio.sleep(0)
    served.broker.settle()
    assert served.engine.queue("q").held_messages == LINKS - pieces.DELIVERIES_PER_PIECE
    assert served.contained == []
