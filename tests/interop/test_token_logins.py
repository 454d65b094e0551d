"""Logins with tokens: unmodified Qpid JMS by PLAIN and XOAUTH2, the Python client by OAUTHBEARER, and the end of a token."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from bascule.client import Queue, SecurityDenied, connect
from bascule.core.errors import Unavailable
from bascule.embedded.kafka import EmbeddedKafka
from tests.interop.conftest import Connect
from tests.support.provider import KEYS_PATH, Provider, SigningKey
from tests.support.qpid import JmsError
from tests.support.system import System, failover, wait_for

CONFIG = """
[broker]
users = {{ bob = "hush" }}
handshake_timeout_s = 60

[broker.oidc]
issuer = "{issuer}"
audience = ["bascule"]
jwks_url = "{issuer}{path}"
user_claim = "preferred_username"
roles_claim = "realm_access.roles"
roles = ["sales"]
clock_skew_s = 0

[admin]
view = ["sales"]

[[permission]]
match = "sales.#"
send = ["sales"]
consume = ["sales"]
createAddress = ["sales"]
createDurableQueue = ["sales"]
"""
SALES = {"roles": ["sales"]}


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider() as running:
        yield running


@pytest.fixture(scope="module")
def guarded(kafka: EmbeddedKafka, provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    config = CONFIG.format(issuer=provider.issuer, path=KEYS_PATH)
    with System(kafka.bootstrap, tmp_path_factory.mktemp("tokens"), prefix="tokens", config=config) as running:
        yield running


def token(provider: Provider, **claims: object) -> str:
    return provider.token("f3a1", **{"preferred_username": "ann", "realm_access": SALES, **claims})


def url(system: System, mechanism: str) -> str:
    return f"{system.url}?amqp.saslMechanisms={mechanism}"


def logins(system: System) -> list[tuple[str, str]]:
    return [(connection["user"], connection["mechanism"]) for connection in system.ask("connections")]


@pytest.mark.parametrize("padding", [0, 8_000], ids=["short", "long"])
@pytest.mark.parametrize("mechanism", ["PLAIN", "XOAUTH2"])
def test_java_client_logs_in_with_a_token_and_has_its_roles(
    mechanism: str, padding: int, guarded: System, provider: Provider, connect_to: Connect
) -> None:
    password = token(provider, padding="x" * padding)
    connection = connect_to(url(guarded, mechanism), user="ann", password=password)
    connection.session().producer("queue:sales.eu").send("kept")
    assert connection.session().consumer("queue:sales.eu").receive().body == "kept"
    wait_for(lambda: logins(guarded) == [("ann", mechanism)], "ann alone")
    with pytest.raises(JmsError, match="JMSSecurity"):
        connection.session().producer("queue:other")
    assert password.split(".")[2] not in guarded.broker.said()


@pytest.mark.parametrize("mechanism", ["PLAIN", "XOAUTH2"])
@pytest.mark.parametrize(
    ("user", "claims"), [("bob", {}), ("ann", {"aud": "other"}), ("ann", {"exp": 1}), ("ann", {"preferred_username": "eve"})]
)
def test_java_client_with_a_wrong_token_gets_a_security_exception(
    mechanism: str, user: str, claims: dict[str, object], guarded: System, provider: Provider, connect_to: Connect
) -> None:
    with pytest.raises(JmsError, match="JMSSecurity") as refused:
        connect_to(url(guarded, mechanism), user=user, password=token(provider, **claims))
    if mechanism == "XOAUTH2" and "aud" in claims:
        assert "claim 'aud'" in str(refused.value), "the client shows the reason"


def test_token_without_a_role_gives_no_permission(guarded: System, provider: Provider, connect_to: Connect) -> None:
    connection = connect_to(url(guarded, "PLAIN"), user="ann", password=token(provider, realm_access={"roles": []}))
    with pytest.raises(JmsError, match="JMSSecurity"):
        connection.session().producer("queue:sales.eu")


def test_password_of_a_user_still_counts(guarded: System, connect_to: Connect) -> None:
    connect_to(url(guarded, "PLAIN"), user="bob", password="hush")
    with pytest.raises(JmsError, match="JMSSecurity"):
        connect_to(url(guarded, "PLAIN"), user="bob", password="eyJ.eyJ.x")


def test_python_client_logs_in_and_is_told_which_claim_is_wrong(guarded: System, provider: Provider) -> None:
    with connect(guarded.url, token=token(provider)) as context:
        context.send(Queue("sales.eu"), "x")
        wait_for(lambda: logins(guarded) == [("ann", "OAUTHBEARER")], "ann alone")
    with pytest.raises(SecurityDenied, match="claim 'iss'"):
        connect(guarded.url, token=token(provider, iss="https://other.example"))
    with pytest.raises(SecurityDenied, match="not a token of user 'bob'"):
        connect(guarded.url, user="bob", token=token(provider))


def test_admin_server_accepts_a_token_and_its_roles(guarded: System, provider: Provider) -> None:
    def status(path: str, given: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{guarded.admin_port}/{path}", headers={"Authorization": f"Bearer {given}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status("status", token(provider)) == 200
    assert status("dead-letters", token(provider)) == 403
    assert status("status", token(provider, realm_access={"roles": []})) == 403
    assert status("status", token(provider, aud="other")) == 401


def test_connection_ends_with_its_token_and_the_client_returns_with_a_fresh_one(guarded: System, provider: Provider) -> None:
    given: list[str] = []

    def fresh() -> str:
        given.append(token(provider, exp=time.time() + (300 if given else 3)))
        return given[-1]

    with connect(f"failover:({guarded.url})", token=fresh) as context:
        context.send(Queue("sales.eu"), "before")
        wait_for(lambda: len(given) > 1, "the end of the first token")
        context.send(Queue("sales.eu"), "after")
    assert len(given) == 2
    expires = connect(guarded.url, token=token(provider, exp=time.time() + 3))
    with expires as context:
        wait_for(lambda: guarded.ask("connections") == [], "the end of the token")
        with pytest.raises(SecurityDenied, match="the token of this connection has expired"):
            context.send(Queue("sales.eu"), "late")


def test_failed_function_for_tokens_is_named(guarded: System) -> None:
    def fails() -> str:
        raise OSError("the provider is away")

    with pytest.raises(Unavailable, match="the provider is away"):
        connect(guarded.url, token=fails)


def test_java_connection_ends_with_its_token(guarded: System, provider: Provider, connect_to: Connect) -> None:
    connection = connect_to(url(guarded, "XOAUTH2"), user="ann", password=token(provider, exp=time.time() + 5))
    producer = connection.session().producer("queue:sales.eu")
    wait_for(lambda: logins(guarded) == [], "the end of the token")
    with pytest.raises(JmsError):
        producer.send("late")


def test_java_client_with_failover_is_refused_after_the_end_of_its_token(guarded: System, provider: Provider, connect_to: Connect) -> None:
    connection = connect_to(failover(url(guarded, "PLAIN")), user="ann", password=token(provider, exp=time.time() + 5))
    producer = connection.session().producer("queue:sales.eu")
    wait_for(lambda: logins(guarded) == [], "the end of the token")
    with pytest.raises(JmsError):
        producer.send("late")


def test_new_key_of_the_provider_counts_at_once_and_the_old_key_no_more(guarded: System, provider: Provider, connect_to: Connect) -> None:
    old, known = provider.keys, token(provider)
    provider.keys = [SigningKey("second", "ES256")]
    connect_to(url(guarded, "PLAIN"), user="ann", password=token(provider))
    with pytest.raises(JmsError):
        connect_to(url(guarded, "PLAIN"), user="ann", password=known)
    provider.keys = [*provider.keys, *old]
    connect_to(url(guarded, "PLAIN"), user="ann", password=token(provider))


def test_known_keys_count_while_the_provider_is_away(guarded: System, provider: Provider, connect_to: Connect) -> None:
    connect_to(url(guarded, "PLAIN"), user="ann", password=token(provider))
    provider.away = True
    try:
        connect_to(url(guarded, "PLAIN"), user="ann", password=token(provider))
        with pytest.raises(JmsError):
            connect_to(url(guarded, "PLAIN"), user="ann", password=token(provider, key=SigningKey("third")))
    finally:
        provider.away = False
