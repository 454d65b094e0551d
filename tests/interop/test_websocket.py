"""AMQP over WebSocket with the Java client."""

from __future__ import annotations

import pytest

from tests.interop.conftest import Connect
from tests.interop.exchanges import exchanged
from tests.support.qpid import JmsError
from tests.support.system import System


def test_java_client_sends_and_receives_over_websocket(connect: Connect, system: System, websocket_port: int) -> None:
    url = f"amqpws://127.0.0.1:{websocket_port}"
    session = connect(url, user="ann", password="hush").session("TRANSACTED")
    bodies = ["small", "x" * 2_000_000, b"\x00\xff" * 70_000]
    assert exchanged(session, "queue:websocket", bodies) == bodies
    assert connect(system.url).session().consumer("queue:websocket").receive(0.1) is None


def test_login_over_websocket_is_checked(connect: Connect, websocket_port: int) -> None:
    with pytest.raises(JmsError, match="authenticate"):
        connect(f"amqpws://127.0.0.1:{websocket_port}", user="ann", password="wrong")
