"""Authentication of clients: the mechanisms that the settings allow, the safest first, and the checks of passwords."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

from bascule.amqp.sasl import AnonymousServer, PlainServer, ServerMechanism
from bascule.amqp.scram import NAME as SCRAM
from bascule.amqp.scram import SALT_BYTES, ScramServer, Verifier, Verifiers
from bascule.config.settings import Broker, is_hash
from bascule.core.log import get_log
from bascule.threads.background import in_background

#: Iterations for a password in clear in the settings: an attacker who could guess it from its hash must already be in this process, and can
#: read it there.
ITERATIONS = 4096
NONCE_BYTES = 18
#: Passwords checked at once. A check takes milliseconds of processor time, or more if hashes have many iterations, and any peer can cause
#: one. The other processors stay free for clients that are logged in.
CHECKS_AT_ONCE: Final = 1

log = get_log(__name__)


class LoginChecks:
    """Checks passwords beside the event loop, one at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def check(self, check: Callable[[], bool]) -> bool:
        """Return the result of a check; False if the check fails with an error."""
        async with self._turn:
            try:
                return await asyncio.wrap_future(in_background(check, "login"))
            except Exception as error:
                log.exception("login check failed", error=repr(error))
                return False


def verifiers(passwords: dict[str, str]) -> Verifiers:
    """Return verifiers for passwords in clear and for hashes."""
    known = {
        user: Verifier.parse(password) if is_hash(password) else Verifier.of(password, secrets.token_bytes(SALT_BYTES), ITERATIONS)
        for user, password in passwords.items()
    }
    return Verifiers(known, secrets.token_bytes(SALT_BYTES))


def sasl_mechanisms(broker: Broker) -> dict[str, Callable[[], ServerMechanism]]:
    """Return the mechanisms offered to clients. A client uses the first that it knows, or the one that it prefers."""
    mechanisms: dict[str, Callable[[], ServerMechanism]] = {}
    if broker.users:
        users = verifiers(broker.passwords)
        mechanisms[SCRAM] = lambda: ScramServer(users, secrets.token_urlsafe(NONCE_BYTES))
        mechanisms["PLAIN"] = lambda: PlainServer(users.check)
    if broker.anonymous_allowed:
        mechanisms["ANONYMOUS"] = AnonymousServer
    return mechanisms
