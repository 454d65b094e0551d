"""TLS and logins with the Java client: SCRAM with a hash, PLAIN, a certificate, and refused logins."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest

from bascule.amqp.verifiers import Verifier
from bascule.client import Queue, connect
from bascule.core.errors import BasculeError
from bascule.embedded.kafka import EmbeddedKafka
from tests.interop.conftest import Connect
from tests.support.certificates import Authority, Certificate, java_options
from tests.support.qpid import JmsError
from tests.support.system import System, wait_for

HASH = Verifier.of("hush", b"0123456789abcdef", 4096)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def ann(authority: Authority) -> Certificate:
    return authority.issue("ann")


@pytest.fixture(scope="module")
def secure(kafka: EmbeddedKafka, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A broker with TLS that knows the hash of bob's password, and accepts certificates of the authority."""
    server = authority.issue("server")
    config = f"""
        [broker]
        users = {{ bob = "{HASH}" }}

        [broker.tls]
        certificate = "{server.certificate}"
        key = "{server.key}"
        client_ca = "{authority.certificate}"
    """
    with System(kafka.bootstrap, tmp_path_factory.mktemp("secure"), prefix="secure", config=config) as running:
        yield running


def url(system: System, authority: Authority, client: Certificate | None = None, options: str = "") -> str:
    return f"amqps://127.0.0.1:{system.port}?{java_options(authority.trust_store, client)}{options}"


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
def test_user_with_a_hashed_password_logs_in_by_each_mechanism(
    mechanism: str, secure: System, authority: Authority, connect_to: Connect, queue: str
) -> None:
    connection = connect_to(url(secure, authority, options=f"&amqp.saslMechanisms={mechanism}"), user="bob", password="hush")
    connection.session().producer(queue).send("kept")
    assert connection.session().consumer(queue).receive().body == "kept"
    wait_for(lambda: secure.logins() == [("bob", mechanism)], "bob alone")


def test_client_prefers_scram_to_plain_by_default(secure: System, authority: Authority, connect_to: Connect) -> None:
    connect_to(url(secure, authority), user="bob", password="hush")
    wait_for(lambda: secure.logins() == [("bob", "SCRAM-SHA-256")], "bob alone, by the safer mechanism")


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
@pytest.mark.parametrize(("user", "password"), [("bob", "guess"), ("eve", "hush"), ("bob", str(HASH))])
def test_wrong_user_or_password_raises_a_security_exception(
    mechanism: str, user: str, password: str, secure: System, authority: Authority, connect_to: Connect
) -> None:
    with pytest.raises(JmsError, match="JMSSecurity"):
        connect_to(url(secure, authority, options=f"&amqp.saslMechanisms={mechanism}"), user=user, password=password)


def test_client_certificate_replaces_the_password_and_names_the_user(
    secure: System, authority: Authority, ann: Certificate, connect_to: Connect
) -> None:
    connect_to(url(secure, authority, ann))
    wait_for(lambda: secure.logins() == [("ann", "EXTERNAL")], "ann alone")


@pytest.mark.parametrize(("password", "user", "mechanism"), [("hush", "bob", "SCRAM-SHA-256-PLUS"), (None, "ann", "EXTERNAL")])
def test_the_python_client_logs_in_by_scram_with_channel_binding_and_by_certificate(
    secure: System, authority: Authority, ann: Certificate, password: str | None, user: str, mechanism: str
) -> None:
    tls = ssl.create_default_context(cafile=authority.certificate)
    if password is None:
        tls.load_cert_chain(ann.certificate, ann.key)
    login = {} if password is None else {"user": user, "password": password}
    with connect(f"amqps://127.0.0.1:{secure.port}", tls=tls, **login) as context:
        wait_for(lambda: secure.logins() == [(user, mechanism)], f"{user} alone")
        context.send(Queue("by.python"), "x")


def test_python_client_raises_an_error_for_a_wrong_password(secure: System, authority: Authority) -> None:
    tls = ssl.create_default_context(cafile=authority.certificate)
    with pytest.raises(BasculeError, match="SCRAM-SHA-256-PLUS"):
        connect(f"amqps://127.0.0.1:{secure.port}", tls=tls, user="bob", password="guess")


def test_client_without_password_and_certificate_is_refused(secure: System, authority: Authority, connect_to: Connect) -> None:
    with pytest.raises(JmsError, match="JMSSecurity"):
        connect_to(url(secure, authority))


def test_connection_without_tls_is_refused(secure: System, connect_to: Connect) -> None:
    with pytest.raises(JmsError):
        connect_to(f"amqp://127.0.0.1:{secure.port}?jms.connectTimeout=5000", user="bob", password="hush")
