"""How clients may say who they are: the mechanisms that the settings allow, the safest first."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from bascule.amqp.sasl import AnonymousServer, PlainServer, ServerMechanism
from bascule.amqp.scram import NAME as SCRAM
from bascule.amqp.scram import SALT_BYTES, ScramServer, Verifier, Verifiers
from bascule.config.settings import Broker, is_hash

#: For a password that stands in the settings: whoever could guess it from its hash has to be in this process, and can read it there.
ITERATIONS = 4096
NONCE_BYTES = 18


def verifiers(passwords: dict[str, str]) -> Verifiers:
    """Of passwords, and of those of which only the hash is known."""
    known = {
        user: Verifier.parse(password) if is_hash(password) else Verifier.of(password, secrets.token_bytes(SALT_BYTES), ITERATIONS)
        for user, password in passwords.items()
    }
    return Verifiers(known, secrets.token_bytes(SALT_BYTES))


def sasl_mechanisms(broker: Broker) -> dict[str, Callable[[], ServerMechanism]]:
    """What is offered to every client; a client takes the first that it knows, or the one it likes best."""
    mechanisms: dict[str, Callable[[], ServerMechanism]] = {}
    if broker.users:
        users = verifiers(broker.passwords)
        mechanisms[SCRAM] = lambda: ScramServer(users, secrets.token_urlsafe(NONCE_BYTES))
        mechanisms["PLAIN"] = lambda: PlainServer(users.check)
    if broker.anonymous_allowed:
        mechanisms["ANONYMOUS"] = AnonymousServer
    return mechanisms
