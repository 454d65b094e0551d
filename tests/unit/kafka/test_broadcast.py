"""Messages between brokers must not delay the end of a broker whose Kafka does not answer."""

from __future__ import annotations

import socket
import time

import pytest

from bascule.kafka import broadcast
from bascule.kafka.appender import APPEND_TIMEOUT_S
from bascule.kafka.broadcast import Broadcast
from tests.support.system import wait_for


def test_close_gives_up_messages_that_a_silent_kafka_does_not_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "CLOSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers = f"127.0.0.1:{silent.getsockname()[1]}"
        messages = Broadcast({"bootstrap.servers": servers, "log_level": 0}, "topic", lambda _: None)
        messages.send(b"nobody stores it")
        wait_for(lambda: messages._appender._producer is not None and len(messages._appender._producer), "the message to be in flight")
        begun_s = time.monotonic()
        messages.close()
        assert time.monotonic() - begun_s < APPEND_TIMEOUT_S / 2
