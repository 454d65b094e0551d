"""The number of function calls for each message, a measure of the processor time of the broker that is the same on every machine."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Final

import pytest

from bascule.amqp import hot
from bascule.amqp.frames import frame_head, performative_frame
from bascule.amqp.performatives import ACCEPTED, Coordinator, Declare, Discharge, Disposition, Source, TransactionalState, Transfer
from bascule.amqp.transactions import encode_control
from bascule.amqp.types import Byte, Symbol, Timestamp
from bascule.jms.sections import MESSAGE_ANNOTATIONS, PROPERTIES, VALUE, header_bytes, section_bytes
from bascule.server import connection
from tests.unit.server.served import QUEUE, TOPIC, Client, Served

#: Python functions called for one message from its transfer to its acknowledgement, in the broker and in BrokerInMemory: the count of
#: today and some slack. If a count is higher, the test prints the functions that are called most. Compare them with the list that the test
#: prints before the change (set the bound to 0), and call a new function for each turn, frame or record instead of each message, or not at
#: all. If a feature needs the call, raise the bound. If a count is much lower, lower the bound.
CALLS_MAX: Final = {
    "asynchronous": 52, "synchronous": 135, "transactions": 68, "transactions of one message": 435, "topic": 86, "non-persistent": 47,
}  # fmt: skip
#: Modes with one message in a turn, and therefore in a record.
ALONE: Final = ("synchronous", "transactions of one message")
#: Functions in the message of a failure.
LISTED: Final = 150
TURNS: Final = 10
IN_TURN: Final = 40
#: More than all messages of a run, so that no credit is renewed.
PREFETCH: Final = 1000


class Calls:
    """Counts calls of Python functions while ``during`` runs something."""

    def __init__(self) -> None:
        self._codes: Counter[CodeType] = Counter()

    def _look(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self._codes[frame.f_code] += 1

    def during(self, work: Callable[[], None]) -> None:
        sys.setprofile(self._look)
        try:
            work()
        finally:
            sys.setprofile(None)

    @property
    def count(self) -> int:
        return self._codes.total()

    def table(self, messages: int) -> str:
        """Return the functions called most, with their calls for each message."""
        most = self._codes.most_common(LISTED)
        return "\n".join(f"{count / messages:6.2f} {code.co_filename}:{code.co_firstlineno} {code.co_qualname}" for code, count in most)


class Consumer:
    """A client that acknowledges each message with its own frame, as Qpid JMS does."""

    def __init__(self, served: Served, name: str, capabilities: tuple[Symbol, ...], *, transacted: bool) -> None:
        self.client = Client(served, name)
        self.client.consumer("dest", PREFETCH, capabilities=capabilities)
        self.control = Control(served, self.client) if transacted else None
        self._settled = 0

    def acknowledgements(self) -> bytes:
        """Return the frames that acknowledge all messages sent so far."""
        (session,) = self.client.connection.amqp.sessions.values()
        channel, first, end = self.client.session.channel, self._settled, session.newest_delivery_id + 1 & 0xFFFF_FFFF
        self._settled = end
        if self.control is None:
            frames = [hot.disposition(channel, True, number, number, True, hot.state_bytes(ACCEPTED)) for number in range(first, end)]
        else:
            state = TransactionalState(self.control.transaction(), ACCEPTED)
            frames = [performative_frame(channel, Disposition(True, number, number, True, state)) for number in range(first, end)]
        return b"".join(frames)


class Control:
    """Declares and discharges the transactions of one client."""

    def __init__(self, served: Served, client: Client) -> None:
        self._client = client
        self._link = client.session.attach_sender("control", Source(), Coordinator())
        served.settle(client)

    def transaction(self) -> bytes:
        """Return the id of the open transaction."""
        return next(reversed(self._client.connection.client.transactions.held))

    def frame(self, delivery_id: int, control: Declare | Discharge) -> bytes:
        body = encode_control(control)
        return _transfer(self._client.session.channel, self._link.handle, delivery_id, body, None)


class Traffic:
    """A producer and consumers whose frames are made before the calls are counted."""

    def __init__(self, mode: str) -> None:
        self.served = Served()
        self.calls = Calls()
        self._durable = mode != "non-persistent"
        transacted = mode.startswith("transactions")
        capabilities = TOPIC if mode == "topic" else QUEUE
        names = ["first", "second", "third"] if mode == "topic" else ["only"]
        self._consumers = [Consumer(self.served, name, capabilities, transacted=transacted) for name in names]
        self._producer = Client(self.served, "producer")
        self._link = self._producer.producer("dest", capabilities=capabilities)
        self._control = Control(self.served, self._producer) if transacted else None
        self._controlled = Counter[Client]()
        self._sent = self._deliveries = 0

    def turn(self, messages: int) -> None:
        """Send messages, and acknowledge those of the turn before."""
        for control, client in self._controls():
            self._say(client, control.frame(self._next_delivery(client), Declare()))
        self._say(self._producer, b"".join(self._message() for _ in range(messages)))
        for consumer in self._consumers:
            self._say(consumer.client, consumer.acknowledgements())
        for control, client in self._controls():
            self._say(client, control.frame(self._next_delivery(client), Discharge(control.transaction(), False)))
        self.calls.during(self._store)

    def _controls(self) -> list[tuple[Control, Client]]:
        found = [(each.control, each.client) for each in self._consumers if each.control is not None]
        return found if self._control is None else [(self._control, self._producer), *found]

    def _say(self, client: Client, data: bytes) -> None:
        """Let the broker handle frames of a client, and forget its answers."""

        def receive() -> None:
            client.connection.data_received(data)
            while client.connection.behind:
                client.connection.handle_some()

        self.calls.during(receive)
        client.wire.written.clear()

    def _store(self) -> None:
        broker = self.served.broker
        broker.engine.journaling.flush()
        while broker.in_flight:
            broker.confirm(len(broker.in_flight))
            self.served.send_output()

    def _next_delivery(self, client: Client) -> int:
        if client is self._producer:
            self._deliveries += 1
            return self._deliveries - 1
        self._controlled[client] += 1
        return self._controlled[client] - 1

    def _message(self) -> bytes:
        self._sent += 1
        properties = [f"ID:3f1c-{self._sent}:1:1-{self._sent}", None, "dest", *[None] * 6, Timestamp(1_764_000_000_000 + self._sent)]
        body = b"".join((
            header_bytes(self._durable),
            section_bytes(MESSAGE_ANNOTATIONS, {Symbol("x-opt-jms-msg-type"): Byte(5), Symbol("x-opt-jms-dest"): Byte(0)}),
            section_bytes(PROPERTIES, properties),
            section_bytes(VALUE, "x" * 1024),
        ))  # fmt: skip
        state = None if self._control is None else TransactionalState(self._control.transaction())
        return _transfer(self._producer.session.channel, self._link.handle, self._next_delivery(self._producer), body, state)


def _transfer(channel: int, handle: int, delivery_id: int, body: bytes, state: TransactionalState | None) -> bytes:
    transfer = Transfer(handle, delivery_id, delivery_id.to_bytes(4, "big"), 0, False, state=state)
    return frame_head(channel, transfer, len(body)) + body


async def _run(mode: str) -> tuple[Calls, int, Served]:
    """Return the calls of some turns of traffic behind the first ones, and the number of messages in these turns."""
    traffic = Traffic(mode)
    turns, in_turn = (10 * TURNS, 1) if mode in ALONE else (TURNS, IN_TURN)
    for turn in range(turns + turns // 2):
        if turn == turns // 2:
            traffic.calls = Calls()
        traffic.turn(in_turn)
        await asyncio.sleep(0)
    return traffic.calls, turns * in_turn, traffic.served


@pytest.mark.parametrize("mode", CALLS_MAX)
def test_number_of_function_calls_for_each_message_is_bounded(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_S", math.inf)
    calls, messages, served = asyncio.run(_run(mode))
    counters = served.engine.counters
    receivers = 3 if mode == "topic" else 1
    assert counters.messages_out == receivers * counters.messages_in
    assert counters.acknowledged >= receivers * messages
    for_each = calls.count / messages
    assert for_each <= CALLS_MAX[mode], f"{for_each:.1f} calls for each message, {mode}:\n{calls.table(messages)}"
