"""The broker sends a large message in many turns of the event loop, and serves other clients between the turns."""

from __future__ import annotations

import asyncio
import struct
from itertools import pairwise

import pytest

from bascule.amqp.errors import CONNECTION_FORCED, DECODE_ERROR, AmqpError
from bascule.amqp.events import Dispositioned, Transferred
from bascule.amqp.limits import FRAME_SIZE_BYTES_MIN
from bascule.amqp.performatives import Rejected, Source, Target
from bascule.jms.large_texts import TEXT_PIECE_BYTES
from bascule.server import pieces
from bascule.server.client_turns import ClientTurns
from bascule.testing.broker import Sender, message_bytes
from tests.unit.server.served import QUEUE, Client, Served, run_async

PIECE_BYTES = pieces.FRAMES_PER_PIECE_BYTES
BODY = "x" * (8 * PIECE_BYTES)


async def with_large_message(served: Served, count: int = 1) -> Client:
    """Return a client with small frames and a consumer that is being sent the first of ``count`` large messages."""
    client = Client(served)
    client.connection.amqp.remote_max_frame_size = client.connection.amqp.outgoing.frame_bytes_max = FRAME_SIZE_BYTES_MIN
    served.fill("q", count, BODY)
    link = client.session.attach_receiver("large", Source("q", capabilities=QUEUE), Target())
    client.say()
    served.broker.settle()
    served.send_output()
    client.listen()
    link.flow(10)
    client.connection.data_received(client.amqp.data_to_send())
    served.broker.settle()  # stores the reservation of the queue
    served.dispatch()
    return client


async def turns(client: Client, count: int = 1) -> list[int]:
    """Return the output of each of ``turns`` turns."""
    written = []
    for _ in range(count):
        client.listen()
        await asyncio.sleep(0)
        written.append(sum(map(len, client.wire.written)))
    return written


@run_async
async def test_large_message_is_written_in_pieces_while_other_clients_are_served() -> None:
    served = Served()
    other = Client(served, "other")
    inbox = other.consumer("inbox", credit=10)
    client = await with_large_message(served, count=2)
    assert sum(map(len, client.wire.written)) < 2 * PIECE_BYTES
    served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    served.broker.settle()
    served.dispatch()
    other.listen()
    assert other.received(inbox) == 1
    assert client.events_of(Transferred) == []
    pieces = []
    for _ in range(40):
        client.say()  # the client reports that its window is open
        pieces += await turns(client)
    assert max(pieces) < 2 * PIECE_BYTES
    assert sum(piece > 0 for piece in pieces) > 12
    client.listen()
    assert [len(event.payload) > len(BODY) for event in client.events_of(Transferred)] == [True, True]
    assert served.contained == []


@run_async
async def test_no_more_frames_are_encoded_while_the_client_does_not_read() -> None:
    served = Served()
    client = await with_large_message(served)
    client.connection.pause_writing()
    client.connection.touch()
    served.send_output()
    await turns(client)
    assert await turns(client, 5) == [0] * 5
    assert client.connection.amqp.outgoing.sessions
    client.connection.resume_writing()
    assert sum(await turns(client, 20)) > 4 * PIECE_BYTES
    client.listen()
    assert len(client.events_of(Transferred)) == 1


@pytest.mark.parametrize("how", ["lost", "closed"])
@run_async
async def test_rest_of_a_message_is_dropped_with_its_connection(how: str) -> None:
    served = Served()
    client = await with_large_message(served)
    if how == "lost":
        client.connection.connection_lost(None)
    else:
        client.connection.end(AmqpError(CONNECTION_FORCED, "enough"))
    client.wire.written.clear()
    assert await turns(client, 5) == [0] * 5
    assert client.connection.amqp.outgoing.kept_bytes == 0
    assert served.engine.queue("q").held_messages == 1
    assert served.contained == []


@run_async
async def test_clients_share_the_time_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    clients = [Client(served, f"client-{number}") for number in range(5)]
    producers = [client.producer(f"q{number}") for number, client in enumerate(clients)]
    served.client_turns = ClientTurns(turn_s=0.0)
    await asyncio.sleep(0)
    for client, producer in zip(clients, producers, strict=True):
        producer.send(message_bytes("x", durable=False))
        client.connection.data_received(client.amqp.data_to_send())
    assert served.client_turns.over

    def held() -> int:
        return sum(served.engine.queue(f"q{number}").held_messages for number in range(5))

    taken = [held()]
    for _ in range(5):
        await asyncio.sleep(0)
        taken.append(held())
    assert taken[0] < 5
    assert taken[-1] == 5
    assert all(later - before <= 1 for before, later in pairwise(taken))
    assert all(client.wire.reading for client in clients)


@pytest.mark.parametrize("broken", [False, True])
@run_async
async def test_text_of_a_large_message_is_checked_in_turns_while_other_clients_are_served(broken: bool) -> None:
    served = Served()
    client, other = Client(served, "client"), Client(served, "other")
    producer, inbox = client.producer("q"), other.consumer("inbox", credit=10)
    text = ("é" * (3 * TEXT_PIECE_BYTES // 2) + "x").encode()  # a character is divided between two pieces
    whole = b"\x00\x53\x77\xb1" + struct.pack(">I", len(text)) + text
    producer.send(whole[:-1] + b"\xc3" if broken else whole)
    sent = []
    while client.amqp.outgoing.sessions or client.amqp.has_output:
        sent.append(client.amqp.data_to_send())
        client.amqp.send_more()
    client.connection.data_received(b"".join(sent))
    served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    served.settle(other)
    assert other.received(inbox) == 1
    turns = 0
    while client.connection.behind:
        assert "q" not in served.engine.addresses.anycast or not served.engine.queue("q").held_messages
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 3
    served.settle(client)
    (answer,) = client.events_of(Dispositioned)
    if broken:
        assert isinstance(answer.state, Rejected)
        assert answer.state.error is not None
        assert answer.state.error.condition == DECODE_ERROR
    assert served.engine.queue("q").held_messages == (0 if broken else 1)
