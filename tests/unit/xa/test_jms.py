"""The broker as a resource, against a server that does what each test says."""

from __future__ import annotations

from contextlib import closing
from itertools import count
from typing import Any

import pytest
from tests.unit.client.server import obliging, server

from bascule.amqp.connection import Connection
from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, AmqpError
from bascule.amqp.events import SessionBegun
from bascule.xa.errors import ResourceError
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid


def test_a_session_that_is_refused_costs_the_others_nothing() -> None:
    begun = count(1)

    def react(connection: Connection, event: Any) -> None:
        obliging(connection, event)
        if isinstance(event, SessionBegun) and next(begun) == 5:  # the connection has two of its own, a branch two
            event.session.end(AmqpError(RESOURCE_LIMIT_EXCEEDED, "enough"))

    with server(react) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=5)) as resource:
        first, refused, second = (branch(new_gtrid("shop", 0), "broker") for _ in range(3))
        handle = resource.start(first, timeout_s=5)
        with pytest.raises(ResourceError, match="enough"):
            resource.start(refused, timeout_s=5)
        resource.start(second, timeout_s=5)  # on the one connection that the server takes
        assert handle.connected
        for each in (first, second):
            resource.rollback(each)
