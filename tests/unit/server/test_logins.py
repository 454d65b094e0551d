"""The mechanisms that the settings offer, and the users that each of them knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from bascule.amqp.sasl import AnonymousClient, ClientMechanism, PlainClient, SaslClient, SaslServer
from bascule.amqp.scram import ScramClient, Verifier
from bascule.config.settings import Broker
from bascule.server.logins import sasl_mechanisms
from tests.unit.amqp.pair import Pair

HASH = str(Verifier.of("hush", b"salt", 1000))


@pytest.mark.parametrize("password", ["hush", HASH])
@pytest.mark.parametrize("make", [PlainClient, partial(ScramClient, nonce="nonce")], ids=["PLAIN", "SCRAM"])
def test_user_logs_in_with_plain_and_scram_against_configured_password_or_hash(
    password: str, make: Callable[[str, str], ClientMechanism]
) -> None:
    broker = Broker.model_validate({"users": {"ann": password}})
    pair = Pair(sasl=SaslServer(sasl_mechanisms(broker)), client_sasl=SaslClient([make("ann", "hush")]), require_sasl=True).run()
    assert pair.server.user == "ann"


@pytest.mark.parametrize(
    ("settings", "offered"),
    [
        ({}, ["ANONYMOUS"]),
        ({"users": {"ann": "x"}}, ["SCRAM-SHA-256", "PLAIN"]),
        ({"users": {"ann": "x"}, "allow_anonymous": True}, ["SCRAM-SHA-256", "PLAIN", "ANONYMOUS"]),
        ({"host": "0.0.0.0", "tls": {"certificate": "c", "client_ca": "a"}}, []),
    ],
)
def test_the_safest_mechanism_is_first_and_anonymous_is_offered_only_if_allowed(settings: dict[str, object], offered: list[str]) -> None:
    assert list(sasl_mechanisms(Broker.model_validate(settings))) == offered


def test_login_with_password_hash_as_password_is_refused() -> None:
    broker = Broker.model_validate({"users": {"ann": HASH}})
    for client in (PlainClient("ann", HASH), ScramClient("ann", HASH, "nonce"), AnonymousClient()):
        pair = Pair(sasl=SaslServer(sasl_mechanisms(broker)), client_sasl=SaslClient([client]), require_sasl=True).run()
        assert pair.server.user is None
