"""Whatever a peer sends, in whatever order: the engine answers, never raises, and stays in a state of its tables."""

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.amqp.composite import Composite, encode_composite
from bascule.amqp.connection import Connection
from bascule.amqp.events import Attached, Event, Opened, Transferred
from bascule.amqp.frames import AMQP_HEADER, frame
from bascule.amqp.limits import ConnectionLimits
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.performatives import (
    ACCEPTED,
    Attach,
    Begin,
    Close,
    Coordinator,
    Declare,
    Detach,
    Discharge,
    Disposition,
    End,
    Error,
    Flow,
    Open,
    Role,
    Source,
    Target,
    TransactionalState,
    Transfer,
)  # fmt: skip
from bascule.amqp.states import (
    CONNECTION,
    LINK,
    SESSION,
    ConnectionInput,
    ConnectionState,
    LinkInput,
    LinkState,
    SessionInput,
    SessionState,
)
from bascule.amqp.transactions import encode_control

LIMITS = ConnectionLimits(channel_max=3, handle_max=3, incoming_window_frames=8, unsettled_per_session_max=8, message_size_bytes_max=200)
HANDLES = st.integers(0, 4)
IDS = st.integers(0, 6) | st.just(0xFFFFFFFF)
STATES = st.sampled_from([None, ACCEPTED, TransactionalState(b"t", ACCEPTED)])
ERRORS = st.sampled_from([None, Error("amqp:internal-error", "x")])
FRAMES: st.SearchStrategy[Composite] = (
    st.builds(Open, st.just("peer"), max_frame_size=st.sampled_from([511, 512, 4096]))
    | st.builds(Begin, st.none() | st.integers(0, 2), IDS, IDS, IDS)
    | st.builds(
        Attach, st.sampled_from(["a", "b", "ours"]), HANDLES, st.booleans(), source=st.sampled_from([None, Source("q")]),
        target=st.sampled_from([None, Target("q"), Coordinator()]), initial_delivery_count=IDS,
    )
    | st.builds(Flow, st.none() | IDS, IDS, IDS, IDS, st.none() | HANDLES, st.none() | IDS, st.none() | IDS, drain=st.booleans(),
                echo=st.booleans())
    | st.builds(Transfer, HANDLES, st.none() | IDS, st.none() | st.just(b"t"), settled=st.none() | st.booleans(), more=st.booleans(),
                state=STATES, resume=st.booleans(), aborted=st.booleans())
    | st.builds(Disposition, st.booleans(), IDS, st.none() | IDS, st.booleans(), STATES)
    | st.builds(Detach, HANDLES, st.booleans(), ERRORS)
    | st.builds(End, ERRORS)
    | st.builds(Close, ERRORS)
)  # fmt: skip
#: Mutations of the conversation, for each of the four seeds.
MUTATIONS = 2000
PAYLOADS = st.sampled_from([b"", b"payload", b"x" * 150, encode_control(Declare()), encode_control(Discharge(b"t", True))])
STEPS = st.tuples(st.integers(0, 4), FRAMES, PAYLOADS, st.integers(0, 9))


def react(connection: Connection, event: Event, what: int) -> None:
    """An application that answers in one of many ways."""
    if isinstance(event, Opened) and what:
        connection.open()
    elif isinstance(event, Attached):
        link = event.link
        if what < 2:
            link.refuse(Error("amqp:not-found").exception())
        else:
            link.accept()
            if isinstance(link, ReceiverLink):
                link.flow(what)
    elif isinstance(event, Transferred) and what % 2:
        event.link.settle(event.delivery_id, ACCEPTED)


def act(connection: Connection, what: int) -> None:
    """An application that acts on its own."""
    for session in list(connection.sessions.values()):
        for link in list(session.links.values()):
            while isinstance(link, SenderLink) and link.credit and what > 2:
                link.send(b"x" * 700 if what > 6 else b"x", settled=what % 2 == 0)
            if what == 2:
                link.detach()
            if isinstance(link, SenderLink):
                link.drained()
        if what == 1:
            session.end()
        session.settle_outgoing(what, ACCEPTED)


def check(connection: Connection) -> None:
    assert isinstance(connection.state, ConnectionState)
    for session in connection._own_channels.values():
        assert session.state not in (SessionState.UNMAPPED, SessionState.BEGIN_RECEIVED, SessionState.END_RECEIVED, SessionState.ENDED)
        assert len(session.unsettled) <= LIMITS.unsettled_per_session_max
        assert len(session._by_remote_handle) <= LIMITS.handle_max + 1
        for link in session.links.values():
            assert link.state not in (LinkState.UNATTACHED, LinkState.DETACH_RECEIVED, LinkState.DETACHED)
            assert link.credit >= 0
    assert len(connection.sessions) <= LIMITS.channel_max + 1
    if connection.closed:
        assert connection.sessions == {}


@given(st.lists(STEPS, max_size=30), st.booleans(), st.booleans())
@settings(max_examples=200)
def test_a_server_survives_every_frame_in_every_state(steps: list[tuple[int, Composite, bytes, int]], begun: bool, ours: bool) -> None:
    connection = Connection(Role.SERVER, container_id="server", limits=LIMITS, max_frame_size=4096)
    connection.receive(AMQP_HEADER, 0.0)
    if begun:
        for performative in (
            Open("peer", max_frame_size=4096),
            Begin(None, 0, 100, 100),
            Attach("a", 0, False, initial_delivery_count=0, target=Target("q")),
            Attach("b", 1, True, source=Source("q")),
            Flow(0, 100, 0, 100, 1, 0, 50),
        ):
            for event in connection.receive(frame(0, encode_composite(performative)), 0.0):
                react(connection, event, 5)
    if begun and ours:
        session = connection.begin()
        session.attach_receiver("ours", Source("q"), Target())
        session.attach_sender("ours", Source(), Target("q"))
    for channel, performative, payload, what in steps:
        body = encode_composite(performative) + (payload if isinstance(performative, Transfer) else b"")
        for event in connection.receive(frame(channel, body), 0.0):
            react(connection, event, what)
        act(connection, what)
        connection.data_to_send()
        check(connection)


@given(st.lists(STEPS, max_size=30))
@settings(max_examples=100)
def test_a_client_survives_every_frame_in_every_state(steps: list[tuple[int, Composite, bytes, int]]) -> None:
    connection = Connection(Role.CLIENT, container_id="client", limits=LIMITS)
    connection.open()
    session = connection.begin()
    session.attach_sender("ours", Source(), Target("q"))
    session.attach_receiver("a", Source("q"), Target())
    connection.receive(AMQP_HEADER, 0.0)
    connection.receive(frame(0, encode_composite(Open("peer"))), 0.0)
    for channel, performative, payload, what in steps:
        body = encode_composite(performative) + (payload if isinstance(performative, Transfer) else b"")
        for event in connection.receive(frame(channel, body), 0.0):
            if not isinstance(event, Opened):
                react(connection, event, what)
        act(connection, what)
        connection.data_to_send()
        check(connection)


def recorded() -> tuple[bytes, bytes]:
    """Return a whole conversation of a client: what it sends until it waits for credit, and the rest."""
    frames: list[tuple[Composite, bytes]] = [
        (Open("peer", properties={"product": "x"}), b""),
        (Begin(None, 0, 2048, 2048), b""),
        (Attach("producer", 0, False, source=Source(), target=Target("q", capabilities=("queue",)), initial_delivery_count=0), b""),
        (Attach("consumer", 1, True, source=Source("q", filter={"f": ACCEPTED}), target=Target()), b""),
        (Attach("coordinator", 2, False, source=Source(), target=Coordinator(("amqp:local-transactions",)), initial_delivery_count=0), b""),
        (Flow(0, 2048, 0, 2048, 1, 0, 10), b""),
        (Transfer(2, 0, b"0", 0), encode_control(Declare())),
        *((Transfer(0, number, b"%d" % number, 0, False), b"message %d" % number) for number in range(1, 5)),
        (Transfer(0, 5, b"5", 0, False, True, state=TransactionalState(b"t")), b"part"),
        (Transfer(0, more=False, state=TransactionalState(b"t")), b"rest"),
        (Disposition(True, 0, 3, True, ACCEPTED), b""),
        (Detach(1, True), b""),
        (End(), b""),
        (Close(), b""),
    ]
    encoded = [frame(0, encode_composite(performative) + payload) for performative, payload in frames]
    return AMQP_HEADER + b"".join(encoded[:6]), b"".join(encoded[6:])


def feed(streams: Iterable[bytes], cuts: random.Random) -> tuple[Connection, list[Event]]:
    connection = Connection(Role.SERVER, container_id="server", limits=LIMITS)
    events = []
    for stream in streams:
        position = 0
        while position < len(stream):
            size = cuts.randrange(1, 400)
            for event in connection.receive(stream[position : position + size], 0.0):
                events.append(event)
                react(connection, event, 9)
            act(connection, 3)
            connection.data_to_send()
            position += size
    return connection, events


def mutated(good: bytes, rng: random.Random) -> bytes:
    stream = bytearray(good)
    for _ in range(rng.randrange(5)):
        place = rng.randrange(len(stream))
        match rng.randrange(4):
            case 0:
                stream[place] = rng.randrange(256)
            case 1:
                stream[place] ^= 1 << rng.randrange(8)
            case 2:
                del stream[place : place + rng.randrange(1, 9)]
            case _:
                stream[place:place] = rng.randbytes(rng.randrange(1, 9))
    return bytes(stream)


def test_recorded_conversation_is_valid() -> None:
    connection, events = feed(recorded(), random.Random(1))
    assert connection.closed
    assert connection.error is None
    assert len([event for event in events if isinstance(event, Transferred)]) == 5


@pytest.mark.parametrize("seed", range(4))
def test_hostile_bytes_never_raise(seed: int) -> None:
    rng = random.Random(seed)
    setup, traffic = recorded()
    heard = 0
    for _ in range(MUTATIONS):
        connection, events = feed((mutated(setup, rng) if rng.random() < 0.3 else setup, mutated(traffic, rng)), rng)
        heard += len(events)
        check(connection)
    assert heard > 6 * MUTATIONS  # most of the streams get past the start


def pairs(table: dict[tuple[Any, Any], Any]) -> set[Any]:
    return {state for state, _ in table} | set(table.values())


def test_state_tables_reach_every_state_and_use_every_input() -> None:
    for table, states, inputs in (
        (CONNECTION, ConnectionState, ConnectionInput),
        (SESSION, SessionState, SessionInput),
        (LINK, LinkState, LinkInput),
    ):
        assert pairs(table) == set(states)  # type: ignore[arg-type]
        assert {step for _, step in table} == set(inputs)  # type: ignore[call-overload]
        reached = {next(iter(states))}  # type: ignore[call-overload]
        for _ in states:  # type: ignore[attr-defined]
            reached |= {after for (before, _), after in table.items() if before in reached}  # type: ignore[attr-defined]
        assert reached == set(states)  # type: ignore[arg-type]
