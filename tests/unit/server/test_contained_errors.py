"""An error in one client's connection, link or request does not affect other clients."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.amqp.events import ConnectionClosed, Detached, Dispositioned, Transferred
from bascule.amqp.performatives import Accepted, Error, Rejected
from bascule.amqp.types import Symbol
from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.queue import BrokerQueue
from bascule.core.errors import BasculeError
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.jms.message import JmsMessage, encode_message
from bascule.server import links
from bascule.server.uncaught import LINES_PER_S, ErrorLog
from bascule.testing.broker import message_bytes
from tests.unit.server.served import Client, Served, run_async


class Unencodable(Rejected):
    """An outcome that cannot be encoded."""

    def __init__(self) -> None:
        super().__init__(Error(Symbol("é"), "text"))


@run_async
async def test_answer_that_cannot_be_encoded_ends_only_its_own_connection() -> None:
    served = Served()
    bad, good = Client(served, "bad"), Client(served, "good")
    sender, other = bad.producer("q"), good.producer("q")
    sender.send(message_bytes("x"))
    other.send(message_bytes("y"))
    bad.say()
    (link,) = bad.connection.client.links
    link.settle(0, Unencodable())  # written with the next output
    bad.connection.touch()
    good.say()
    served.broker.settle()
    served.send_output()
    served.settle(good)
    assert bad.wire.aborted
    assert [kind for kind, _ in served.contained] == [ErrorKind.CONNECTION]
    assert [event.state for event in good.events_of(Dispositioned)] == [Accepted()]
    bad.connection.connection_lost(None)
    assert list(served.connections) == [good.connection]


@run_async
async def test_error_in_timer_of_connection_ends_only_this_connection() -> None:
    served = Served()
    client, other = Client(served, "one"), Client(served, "other")
    amqp = client.connection.amqp
    amqp.remote_open.idle_time_out, amqp._deadlines._heartbeat_due_s = "never", 0.0  # type: ignore[assignment]
    client.connection._ticking()
    assert client.wire.aborted
    assert [kind for kind, _ in served.contained] == [ErrorKind.CONNECTION]
    other.producer("q").send(message_bytes("y"))
    served.settle(other)
    assert [event.state for event in other.events_of(Dispositioned)] == [Accepted()]


@run_async
async def test_fault_in_the_release_of_one_link_does_not_affect_other_links() -> None:
    served = Served()
    served.fill("q", 2)
    served.fill("p", 2)
    client = Client(served)
    for name in ("q", "p"):
        client.consumer(name, 2, name=name)
    (first, _) = client.connection.client.links
    first.context.consumer.unacked["no position"] = None
    client.connection.connection_lost(None)
    assert [kind for kind, _ in served.contained] == [ErrorKind.LINK]
    assert served.engine.queue("p").waiting_count == 2


@pytest.mark.interpreted
@run_async
async def test_fault_in_a_later_turn_of_a_browser_ends_only_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BROWSED_STEPS", 1)  # one message in each piece of work
    found = iter([BrokerQueue.after])  # for the first piece only
    monkeypatch.setattr(BrokerQueue, "after", lambda queue, place, count: next(found)(queue, place, count))
    served = Served()
    served.fill("q", 5)
    served.engine.journaling.errors = served.errors  # as in a broker process
    client, other = Client(served, "one"), Client(served, "other")
    browser = client.consumer("q", 5, distribution_mode="copy")
    served.settle(client)
    consumer = other.consumer("q", 5)
    served.settle(client, other)
    assert [kind for kind, _ in served.contained] == [ErrorKind.LINK]
    (detached,) = client.events_of(Detached)
    assert detached.link is browser
    assert "failed to browse 'q'" in str(detached.error)
    assert not client.events_of(ConnectionClosed)
    assert len([event for event in client.events_of(Transferred) if event.link is browser]) == 1
    assert len([event for event in other.events_of(Transferred) if event.link is consumer]) == 5


@run_async
async def test_fault_of_a_management_request_refuses_only_the_request() -> None:
    class Faulty:
        def authorize(self, user: str, permission: Permission, address: str) -> None:
            if address == "answers":
                raise ZeroDivisionError("a fault of ours")

    served = Served()
    client = Client(served)
    link = client.producer(MANAGEMENT_ADDRESS)
    client.connection.client.permissions = Faulty()
    link.send(encode_message(JmsMessage(reply_to="answers", reply_to_kind="queue", body_kind="message")))
    served.settle(client)
    (event,) = client.events_of(Dispositioned)
    state: Any = event.state
    assert state.error.condition == BasculeError.condition
    assert client.events_of(ConnectionClosed) == []
    assert [kind for kind, _ in served.contained] == [ErrorKind.REQUEST]


def test_contained_errors_are_logged_with_rate_limit_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    errors = ErrorContainment(ErrorLog().write)
    for number in range(3 * LINES_PER_S):
        errors.contain(ErrorKind.MOVE, ValueError(number), queue="q")
    assert errors.counts == {ErrorKind.MOVE: 3 * LINES_PER_S}
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "error contained kind=move error=ValueError(0) queue=q"
    assert LINES_PER_S <= len(lines) <= 2 * LINES_PER_S + 1
