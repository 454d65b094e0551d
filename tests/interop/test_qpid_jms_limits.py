"""What Qpid JMS reports for limits on connections, sessions and links."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from tests.interop.conftest import Connect
from tests.support.qpid import JmsError
from tests.support.speed import SLOWNESS
from tests.support.system import System, wait_for

#: Two connections with one session each; Qpid JMS begins another session for each connection.
CONFIG = """
[broker]
max_connections = 2
max_sessions_per_user = 4
max_links_per_user = 3
"""


@pytest.fixture(scope="module")
def limited(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("limits"), prefix="limits", config=CONFIG) as running:
        yield running


def test_exceeded_limits_are_reported_and_existing_sessions_continue(connect_to: Connect, limited: System) -> None:
    first, second = connect_to(limited.url), connect_to(limited.url)
    with pytest.raises(JmsError, match="the limit of 2 connections is reached"):
        connect_to(limited.url)
    session = first.session()
    second.session()
    assert limited.status()["users"][0]["sessions"] == 4
    with pytest.raises(JmsError, match="the limit of 4 sessions of user 'anonymous' is reached"):
        first.session().producer("queue:unwanted")  # AMQP answers a begin before it can refuse
    producer, consumer = session.producer("queue:limits"), session.consumer("queue:limits")
    session.consumer("queue:others")
    with pytest.raises(JmsError, match="the limit of 3 links of user 'anonymous' is reached"):
        session.consumer("queue:unwanted")
    producer.send("served")
    message = consumer.receive()
    assert message is not None
    assert message.body == "served"
    second.close()
    wait_for(lambda: limited.status()["gauges"]["connections"] == 1, "the place to be free")
    connect_to(limited.url).close()
    first.close()


def test_failover_client_waits_for_a_free_connection(connect_to: Connect, limited: System) -> None:
    wait_for(lambda: limited.status()["gauges"]["connections"] == 0, "no connections")
    first, second = connect_to(limited.url), connect_to(limited.url)
    with pytest.raises(JmsError):
        connect_to(f"failover:({limited.url})?failover.maxReconnectAttempts=2&failover.startupMaxReconnectAttempts=2")
    begun_s = time.monotonic()
    second.close()
    connect_to(limited.failover_url).close()
    assert time.monotonic() - begun_s < 60 * SLOWNESS
    first.close()
