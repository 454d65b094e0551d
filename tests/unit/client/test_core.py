"""A connection without a socket: what is said is carried to a server's engine by hand, when a test says so."""

from __future__ import annotations

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.events import Event, Opened, SessionBegun, SessionEnded
from bascule.amqp.performatives import Role
from bascule.amqp.sasl import AnonymousServer, SaslServer
from bascule.client import TimedOut
from bascule.client.core import Core, Settings
from bascule.client.session import SessionState
from bascule.client.session_links import Acknowledge
from bascule.client.url import Endpoint


class Wired:
    """A connection that reconnects, and the broker's end of it."""

    def __init__(self) -> None:
        self.core = Core(Settings(reconnects=True), lambda: 0.0)
        self.broker = Connection(Role.SERVER, container_id="server", sasl=SaslServer({"ANONYMOUS": AnonymousServer}))

    def connect(self) -> None:
        self.broker = Connection(Role.SERVER, container_id="server", sasl=SaslServer({"ANONYMOUS": AnonymousServer}))
        self.core.begin(Endpoint("host", 5672, False))
        while not self.core.up:
            self.to_broker()
            self.core.receive(self.broker.data_to_send(), 0.0)

    def to_broker(self) -> list[type[Event]]:
        events = list(self.broker.receive(self.core.data_to_send(), 0.0))
        if any(isinstance(each, Opened) for each in events):
            self.broker.open()
        return [type(each) for each in events]

    def open_session(self) -> SessionState:
        opening = self.core.open_session(Acknowledge.AUTO, 0.0)
        wait = next(opening)
        try:
            while True:
                wait = opening.send(wait.condition())
        except StopIteration as stop:
            session: SessionState = stop.value
            return session


def test_a_session_that_timed_out_while_the_broker_was_away_is_not_begun_when_it_is_back() -> None:
    wired = Wired()
    first = SessionState(wired.core, Acknowledge.AUTO)
    wired.core.sessions.append(first)
    for _ in range(1100):  # more than a broker takes
        with pytest.raises(TimedOut):
            wired.open_session()
    assert wired.core.sessions == [first]
    wired.connect()
    assert first.begun


def test_a_session_that_timed_out_before_its_begin_was_answered_is_ended() -> None:
    wired = Wired()
    wired.core.sessions.append(SessionState(wired.core, Acknowledge.AUTO))
    wired.connect()
    with pytest.raises(TimedOut):
        wired.open_session()
    assert wired.to_broker() == [SessionBegun, SessionEnded]
    wired.core.receive(wired.broker.data_to_send(), 0.0)
    assert wired.core.up


def test_a_context_that_is_closed_before_its_begin_was_answered_again_is_ended() -> None:
    wired = Wired()
    first, second = (SessionState(wired.core, Acknowledge.AUTO) for _ in range(2))
    wired.core.sessions += [first, second]
    wired.core.begin(Endpoint("host", 5672, False))
    while not wired.core.opened:
        wired.to_broker()
        wired.core.receive(wired.broker.data_to_send(), 0.0)
    assert list(second.close(0.0)) == []
    assert wired.to_broker().count(SessionEnded) == 1


def test_the_connection_goes_with_a_session_that_could_not_be_begun_when_it_was_the_last() -> None:
    wired = Wired()
    with pytest.raises(TimedOut):
        wired.open_session()
    assert wired.core.closing
