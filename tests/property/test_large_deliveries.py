"""Messages in many frames: whatever else a connection does meanwhile, each link's messages arrive whole, once and in order."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.amqp.connection import Connection
from bascule.amqp.events import Attached, Event, Flowed, Opened, Transferred
from bascule.amqp.limits import FRAME_SIZE_BYTES_MIN, ConnectionLimits
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.performatives import Role, Source, Target
from bascule.amqp.session import Session
from bascule.amqp.states import LinkState, SessionState

SESSIONS, LINKS = 2, 2
PIECE_BYTES = 2 * FRAME_SIZE_BYTES_MIN


class World:
    """A server that sends to a client with small frames, piece by piece, and what each link has sent and received."""

    def __init__(self, window_frames: int, piece_bytes: int = PIECE_BYTES) -> None:
        limits = ConnectionLimits(incoming_window_frames=window_frames)
        self.client = Connection(Role.CLIENT, container_id="client", max_frame_size=FRAME_SIZE_BYTES_MIN, limits=limits)
        self.server = Connection(Role.SERVER, container_id="server", limits=ConnectionLimits(frames_per_piece_bytes=piece_bytes))
        self.client.open()
        self.senders: list[SenderLink] = []
        self.sessions: list[Session] = []
        self.receivers: list[ReceiverLink] = []
        self.sent: dict[str, list[bytes]] = {}
        self.received: dict[str, list[bytes]] = {}
        self.drained: set[str] = set()  # links that have answered a drain, and have got no credit since
        self.settle()
        for number in range(SESSIONS):
            session = self.client.begin()
            self.sessions.append(session)
            self.settle()
            for place in range(LINKS):
                self.receivers.append(session.attach_receiver(f"{number}.{place}", Source("q"), Target()))
        self.settle()

    def write(self) -> bool:
        """Write what is due at the server, and pass it to the client. Return whether that was anything."""
        data = self.server.data_to_send()
        for event in self.client.receive(data, 0.0):
            if isinstance(event, Transferred):
                assert event.link.name not in self.drained
                self.received[event.link.name].append(event.payload)
            elif isinstance(event, Flowed) and isinstance(event.link, ReceiverLink) and not event.link.credit:
                self.drained.add(event.link.name)
        return bool(data)

    def read(self) -> bool:
        """Pass what the client has to send to the server. Return whether that was anything."""
        data = self.client.data_to_send()
        self.heard(self.server.receive(data, 0.0) if data else [])
        return bool(data)

    def more(self) -> bool:
        """Let the server produce the next piece. Return whether there was one."""
        sending = bool(self.server.outgoing.sessions)
        self.heard(self.server.send_more())
        return sending

    def heard(self, events: list[Event] | list[Flowed]) -> None:
        for event in events:
            if isinstance(event, Opened):
                self.server.open()
            elif isinstance(event, Attached):
                event.link.accept()
                assert isinstance(event.link, SenderLink)
                self.senders.append(event.link)
                self.sent[event.link.name], self.received[event.link.name] = [], []
            elif isinstance(event, Flowed) and isinstance(event.link, SenderLink) and event.link.drain and not event.link.withheld:
                event.link.drained()

    def settle(self) -> None:
        while self.write() | self.read() | self.more():
            pass

    def send(self, link: SenderLink, size: int) -> None:
        if link.credit > 0 and link.session.state is SessionState.MAPPED:
            body = random.Random(size).randbytes(size)
            link.send(body, settled=size % 2 == 0)
            self.sent[link.name].append(body)


STEPS = st.tuples(
    st.sampled_from(["send", "send", "send", "credit", "drain", "write", "read", "more", "detach", "leave", "end", "finish"]),
    st.integers(0, SESSIONS * LINKS - 1),
    st.integers(0, 6_000),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4 * PIECE_BYTES), st.lists(STEPS, max_size=60))
def test_large_messages_arrive_complete_and_in_order_on_every_link(
    window: int, piece_bytes: int, steps: list[tuple[str, int, int]]
) -> None:
    world = World(window, piece_bytes)
    gone: set[str] = set()
    for what, place, size in steps:
        sender, receiver = world.senders[place], world.receivers[place]
        if what == "send":
            world.send(sender, size)
        elif what in ("credit", "drain") and receiver.state is LinkState.ATTACHED and receiver.session.state is SessionState.MAPPED:
            receiver.flow(1 + size % 5, drain=what == "drain")
            world.drained.discard(receiver.name)
        elif what == "write":
            world.write()
        elif what == "read":
            world.read()
        elif what == "more":
            world.more()
        elif what == "finish":
            world.settle()
        elif what == "detach" and sender.session.state is SessionState.MAPPED:
            sender.detach()
            gone.add(sender.name)
        elif what == "leave" and receiver.session.state is SessionState.MAPPED:
            receiver.detach()
            gone.add(sender.name)
        elif what == "end":
            if size % 2:
                sender.session.end()
            else:
                receiver.session.end()
            gone.update(each.name for each in world.senders if each.session is sender.session)
    world.settle()
    assert world.client.error is None, world.client.error
    assert world.server.error is None, world.server.error
    for session in world.server.sessions.values():
        if session.withholding:
            assert session._outgoing_window <= 0
    for sender in world.senders:
        sent, received = world.sent[sender.name], world.received[sender.name]
        if sender.name in gone:
            assert received == sent[: len(received)]
        else:
            assert received == sent
            assert not sender.sending
    assert (world.server.outgoing.kept_bytes, world.server.outgoing.unwritten_bytes, world.server.outgoing.sessions) == (0, 0, {})
