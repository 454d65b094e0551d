"""AMQP over WebSocket with TLS and the unmodified Java client: logins, permissions and limits are those of TCP.

Each test of behaviour runs over both transports, and expects the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import free_port
from tests.interop.conftest import Connect
from tests.interop.exchanges import exchanged, security_refusal
from tests.support.certificates import Authority, Certificate, java_options
from tests.support.qpid import Connection, JmsError, Session
from tests.support.system import System, wait_for

MESSAGE_BYTES_MAX = 200_000
#: Ann may open two connections, with the two sessions of each one that Qpid JMS begins itself, and hold three links.
CONFIG = """
[broker]
users = {{ ann = "a", bob = "b", carl = "c" }}
max_message_bytes = {message_bytes_max}

[broker.tls]
certificate = "{certificate}"
key = "{key}"
client_ca = "{authority}"

[broker.roles]
sales = ["ann", "carl"]
shipping = ["bob"]

[[permission]]
match = "orders.#"
send = ["sales"]
consume = ["sales", "shipping"]
browse = ["sales"]
createAddress = ["sales"]
createDurableQueue = ["sales"]

[[limit]]
roles = ["sales"]
max_connections = 2
max_sessions = 4
max_links = 3
"""
REFUSED = (
    (lambda session: session.consumer("queue:stock"), "'consume' on address 'stock'"),
    (lambda session: session.producer("queue:orders.eu"), "'send' on address 'orders.eu'"),
    (lambda session: session.producer().send("x", to="queue:orders.eu"), "'send' on address 'orders.eu'"),
    (lambda session: session.consumer("queue:orders.new"), "'createAddress' on address 'orders.new'"),
    (lambda session: session.browse("queue:orders.eu"), "'browse' on address 'orders.eu'"),
    (lambda session: session.temporary_queue(), "'createAddress' on address"),
)


class Doors(System):
    """A broker with TLS that accepts AMQP on two ports: over TCP and over WebSocket."""

    def __init__(self, bootstrap: str, directory: Path) -> None:
        self.authority = Authority(directory)
        self.client = self.authority.issue("carl")
        own = self.authority.issue("server")
        config = CONFIG.format(
            certificate=own.certificate, key=own.key, authority=self.authority.certificate, message_bytes_max=MESSAGE_BYTES_MAX
        )
        self.websocket_port = free_port()
        env = {"BASCULE_BROKER__WEBSOCKET__PORT": str(self.websocket_port)}
        super().__init__(bootstrap, directory, prefix="doors", config=config, env=env)

    def url_of(self, scheme: str, client: Certificate | None = None) -> str:
        """Return the URL of a client that trusts the authority of the broker, and may have a certificate of its own."""
        port = self.websocket_port if scheme.startswith("amqpws") else self.port
        return f"{scheme}://127.0.0.1:{port}?{java_options(self.authority.trust_store, client)}&jms.connectTimeout=20000"


@pytest.fixture(scope="module")
def doors(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with Doors(kafka.bootstrap, tmp_path_factory.mktemp("doors")) as running:
        yield running


@pytest.fixture(params=["amqps", "amqpwss"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def enter(doors: Doors, connect_to: Connect, scheme: str) -> Callable[..., Connection]:
    """Return a function that opens connections over the transport of the test. No connection is open before the test."""
    wait_for(lambda: not doors.logins(), "the connections of the test before to be closed")

    def entered(user: str, scheme: str = scheme) -> Connection:
        return connect_to(doors.url_of(scheme), user=user, password=user[0])

    return entered


def test_messages_of_each_size_go_both_ways_and_the_login_is_the_strongest(
    doors: Doors, enter: Callable[..., Connection], queue: str
) -> None:
    session = enter("ann").session("TRANSACTED")
    bodies = ["small", "x" * (MESSAGE_BYTES_MAX - 10_000), b"\x00\xff" * 70_000]
    assert exchanged(session, "queue:orders.eu", bodies) == bodies
    assert doors.logins() == [("ann", "SCRAM-SHA-512")]


def test_wrong_password_is_refused(doors: Doors, connect_to: Connect, scheme: str) -> None:
    with pytest.raises(JmsError, match="authenticate"):
        connect_to(doors.url_of(scheme), user="bob", password="wrong")


def test_certificate_of_the_client_is_its_login(doors: Doors, connect_to: Connect, scheme: str) -> None:
    connection = connect_to(doors.url_of(scheme, doors.client))
    assert doors.logins() == [("carl", "EXTERNAL")]
    connection.session().producer("queue:orders.carl").send("kept")
    assert connection.session().consumer("queue:orders.carl").receive_many(1)[0].body == "kept"


def test_client_that_does_not_trust_the_certificate_does_not_connect(doors: Doors, connect_to: Connect, scheme: str) -> None:
    url = doors.url_of(scheme).partition("?")[0]
    with pytest.raises(JmsError, match=r"(?i)certifi|handshake|SSL"):
        connect_to(f"{url}?jms.connectTimeout=20000", user="ann", password="a")


def test_client_without_tls_is_not_served(doors: Doors, connect_to: Connect, scheme: str) -> None:
    with pytest.raises(JmsError):
        connect_to(doors.url_of(scheme).partition("?")[0].replace("s://", "://") + "?jms.connectTimeout=5000", user="ann", password="a")


@pytest.mark.parametrize(("does", "missing"), REFUSED, ids=[missing for _, missing in REFUSED])
def test_operation_without_permission_raises_the_same_security_exception(
    does: Callable[[Session], object], missing: str, enter: Callable[..., Connection]
) -> None:
    owner = enter("ann").session()
    owner.producer("queue:orders.eu")  # so that the queue exists
    assert f"user 'bob' has no permission {missing}" in security_refusal(does, enter("bob").session())


def test_message_above_the_limit_is_refused(enter: Callable[..., Connection]) -> None:
    session = enter("ann").session()
    producer = session.producer("queue:orders.size")
    with pytest.raises(JmsError, match=r"(?i)size|large|exceeds"):
        producer.send("x" * (MESSAGE_BYTES_MAX + 1))


def test_limits_on_sessions_and_links_are_those_of_the_user(enter: Callable[..., Connection]) -> None:
    first = enter("ann")
    session = first.session()
    enter("ann").session()
    with pytest.raises(JmsError, match="the limit of 4 sessions of user 'ann' is reached"):
        first.session().producer("queue:orders.unwanted")
    producer, consumer = session.producer("queue:orders.links"), session.consumer("queue:orders.links")
    session.consumer("queue:orders.others")
    with pytest.raises(JmsError, match="the limit of 3 links of user 'ann' is reached"):
        session.consumer("queue:orders.unwanted")
    producer.send("served")
    assert consumer.receive_many(1)[0].body == "served"


@pytest.mark.parametrize("beside", ["amqps", "amqpwss"])
def test_connections_of_both_transports_count_towards_one_limit(beside: str, enter: Callable[..., Connection]) -> None:
    enter("ann", beside)
    enter("ann")
    refused = partial(enter, "ann")
    with pytest.raises(JmsError, match=r"the limit of 2 connections .* \(max_connections in \[\[limit\]\] of role 'sales'\)"):
        refused()
    enter("bob")
