"""Requests to the management node of a broker, with a server that has the reactions of each test."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import INTERNAL_ERROR, AmqpError
from bascule.amqp.events import Transferred
from bascule.amqp.performatives import Error, Rejected
from bascule.client import ConnectionLost, Message, MessageRefused, connect
from bascule.client.branch import BranchSession, ended
from tests.unit.client.server import obliging, server


def test_branch_request_on_connection_closed_by_broker_raises_connection_lost() -> None:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            connection.close(AmqpError(INTERNAL_ERROR, "another's frame"))
        else:
            obliging(connection, event)

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


def test_refused_branch_request_is_not_carried_out() -> None:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            event.link.settle(event.delivery_id, Rejected(Error(INTERNAL_ERROR, "no")))
        else:
            obliging(connection, event)

    with server(react) as url, connect(url) as context, closing(BranchSession(context, 0)) as workplace:
        with pytest.raises(MessageRefused):
            workplace.ask(Message())
        workplace.check()
