"""Requests to the management node of a broker, with a server that has the reactions of each test."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import INTERNAL_ERROR, UNAUTHORIZED_ACCESS, AmqpError
from bascule.amqp.events import Attached, Dispositioned, Transferred
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import SenderSettleMode
from bascule.client import ConnectionLost, Message, Refused, connect
from bascule.client.branch import BranchSession, ended
from bascule.client.message import encode
from bascule.jms.message import JmsMessage
from tests.unit.client.server import obliging, server, serving


def answer_settled(link: SenderLink, request: JmsMessage) -> None:
    link.send(encode(Message(correlation_id=request.message_id)), settled=True)


def test_branch_request_on_connection_closed_by_broker_raises_connection_lost() -> None:
    silent = serving(lambda _link, _request: None)

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            connection.close(AmqpError(INTERNAL_ERROR, "another's frame"))
        else:
            silent(connection, event)

    with (
        server(react) as url,
        connect(url) as context,
        closing(BranchSession(context, 0)) as workplace,
        pytest.raises(ConnectionLost, match="another's frame"),
    ):
        workplace.ask(Message())


def test_connection_that_is_not_reconnected_has_ended() -> None:
    with server(obliging) as url, connect(url) as context:
        assert not ended(context)
    assert ended(context)


def test_branch_request_whose_link_is_detached_is_refused_and_the_next_one_is_answered() -> None:
    """As a broker does that refuses a settled message."""
    answer = serving(answer_settled)
    refused: list[Transferred] = []

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred) and not refused:
            refused.append(event)
            event.link.detach(AmqpError(UNAUTHORIZED_ACCESS, "no permission"))
        else:
            answer(connection, event)

    with server(react) as url, connect(url) as context, closing(BranchSession(context, 0)) as workplace:
        with pytest.raises(Refused, match="no permission"):
            workplace.ask(Message())
        workplace.check()
        assert isinstance(workplace.ask(Message()), Message)


def test_branch_request_and_its_answer_are_settled_when_they_are_sent() -> None:
    """Each is one frame: no disposition wakes the other side."""
    heard: list[Any] = []
    answer = serving(answer_settled)

    def react(connection: Connection, event: Any) -> None:
        heard.append(event)
        answer(connection, event)

    with server(react) as url, connect(url) as context, closing(BranchSession(context, 0)) as workplace:
        for _ in range(2):
            workplace.ask(Message())
    assert [event.settled for event in heard if isinstance(event, Transferred)] == [True, True]
    assert not [event for event in heard if isinstance(event, Dispositioned)]
    modes = [event.link.remote.snd_settle_mode for event in heard if isinstance(event, Attached) and isinstance(event.link, SenderLink)]
    assert modes == [SenderSettleMode.SETTLED]
