"""A client and a server engine connected without a network, and a peer that sends exactly the frames that a test gives it."""

from __future__ import annotations

from typing import Any, TypeVar

from bascule.amqp.composite import Composite, decode_composite, encode_composite
from bascule.amqp.connection import Connection
from bascule.amqp.events import Attached, Event, Opened
from bascule.amqp.frames import AMQP_FRAME, AMQP_HEADER, FRAME_HEADER, PROTOCOL_HEADER_SIZE, frame
from bascule.amqp.limits import ConnectionLimits
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.performatives import Attach, Begin, Open, Role, Source, Target
from bascule.amqp.session import Session

E = TypeVar("E", bound=Event)
C = TypeVar("C", bound=Composite)


def events_of(kind: type[E], events: list[Event]) -> list[E]:
    return [event for event in events if type(event) is kind]


class Pair:
    """A client and a server engine. ``at_client`` and ``at_server`` have the events of the last ``run``."""

    def __init__(self, *, credit: int = 100, limits: ConnectionLimits | None = None, frame_size: int = 64 * 1024, **server: Any) -> None:
        self.client = Connection(Role.CLIENT, container_id="client", max_frame_size=frame_size, sasl=server.pop("client_sasl", None))
        self.server = Connection(Role.SERVER, container_id="server", limits=limits, max_frame_size=frame_size, **server)
        self.credit = credit
        self.now_s = 0.0
        self.client.open()
        self.at_server: list[Event] = []
        self.at_client: list[Event] = []

    def run(self) -> Pair:
        """Carry bytes until neither engine has more to send. The server accepts every link and gives producers credit."""
        self.at_server, self.at_client = [], []
        while True:
            up, down = self.client.data_to_send(), self.server.data_to_send()
            if not up and not down:
                return self
            events = self.server.receive(up, self.now_s)
            if self.server.login_check is not None:
                events += self.server.login_checked(self.server.login_check())
            for event in events:
                if isinstance(event, Opened):
                    self.server.open()
                elif isinstance(event, Attached):
                    event.link.accept()
                    if isinstance(event.link, ReceiverLink) and self.credit:
                        event.link.flow(self.credit)
            self.at_server += events
            self.at_client += self.client.receive(down, self.now_s)

    def session(self) -> Session:
        session = self.client.begin()
        self.run()
        return session

    def producer(self, session: Session | None = None, target: Any = None) -> tuple[SenderLink, ReceiverLink]:
        """Attach a producer; return the link at the client and the link at the server."""
        link = (session or self.session()).attach_sender("producer", Source(), target or Target("queue"))
        self.run()
        other = events_of(Attached, self.at_server)[0].link
        assert isinstance(other, ReceiverLink)
        return link, other

    def consumer(self, session: Session | None = None, credit: int = 0) -> tuple[ReceiverLink, SenderLink]:
        """Attach a consumer; return the link at the client and the link at the server."""
        link = (session or self.session()).attach_receiver("consumer", Source("queue"), Target())
        self.run()
        other = events_of(Attached, self.at_server)[0].link
        assert isinstance(other, SenderLink)
        if credit:
            link.flow(credit)
            self.run()
        return link, other


def frames_of(data: bytes) -> list[tuple[int, Composite, bytes]]:
    """Return (channel, performative, payload) of each AMQP frame, without protocol headers."""
    frames, position = [], 0
    while position < len(data):
        if data[position : position + 4] == b"AMQP":
            position += PROTOCOL_HEADER_SIZE
            continue
        size, offset, kind, channel = FRAME_HEADER.unpack_from(data, position)
        body = data[position + 4 * offset : position + size]
        position += size
        if kind == AMQP_FRAME and body:
            performative, payload = decode_composite(body)
            frames.append((channel, performative, body[payload:]))
    return frames


class Script:
    """A peer that sends a server the frames that a test gives it, legal or not."""

    def __init__(self, *, limits: ConnectionLimits | None = None, **options: Any) -> None:
        self.server = Connection(Role.SERVER, container_id="server", limits=limits, **options)
        self.answers: list[Composite] = []

    def say(self, performative: Composite, payload: bytes = b"", channel: int = 0) -> list[Event]:
        return self.say_bytes(frame(channel, encode_composite(performative) + payload))

    def say_bytes(self, data: bytes) -> list[Event]:
        """Return the server's events for ``data``; ``answers`` has the frames with which the server answers."""
        events = self.server.receive(data, 0.0)
        for event in events:
            if isinstance(event, Opened):
                self.server.open()
            elif isinstance(event, Attached):
                event.link.accept()
                if isinstance(event.link, ReceiverLink):
                    event.link.flow(10)
        self.answers = [performative for _, performative, _ in frames_of(self.server.data_to_send())]
        return events

    def answer(self, kind: type[C]) -> C:
        """Return the only answer of this kind."""
        found = [performative for performative in self.answers if isinstance(performative, kind)]
        assert len(found) == 1, self.answers
        return found[0]

    def opened(self) -> Script:
        self.say_bytes(AMQP_HEADER)
        self.say(Open("script"))
        return self

    def begun(self) -> Script:
        self.opened().say(Begin(None, 0, 100, 100))
        return self

    def attached(self, *, sender: bool = True, handle: int = 0) -> Script:
        """Open a connection, a session, and a link on which the script sends (or receives)."""
        self.begun().say(attach(handle, sender=sender))
        return self


def attach(handle: int = 0, *, sender: bool = True) -> Attach:
    return Attach(
        f"link-{handle}", handle, not sender, source=Source("queue"), target=Target("queue"), initial_delivery_count=0 if sender else None
    )
