"""Authentication of clients: the mechanisms that the settings allow, the safest first, and the checks of passwords."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from bascule.amqp.sasl import AnonymousServer, PlainServer, QuickCheck, ServerMechanism
from bascule.amqp.scram import ScramServer
from bascule.amqp.verifiers import Verifiers
from bascule.config.settings import Broker
from bascule.core.log import get_log
from bascule.server.login_delays import LoginDelays
from bascule.server.user_directory import UserDirectory
from bascule.threads.background import in_background

NONCE_BYTES = 18
#: Passwords checked at once. A check takes milliseconds of processor time, or more if hashes have many iterations, and any peer can cause
#: one. The other processors stay free for clients that are logged in.
CHECKS_AT_ONCE: Final = 1
#: Characters of a claimed user name in a log line.
USER_SHOWN_MAX: Final = 60

log = get_log(__name__)


class LoginChecks:
    """Checks passwords: slow checks beside the event loop, one at a time, and each check after the delay that wrong passwords cause."""

    def __init__(self) -> None:
        self.failed = self.delayed = self.refused = 0  # checks since the start
        self._turn = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._delays = LoginDelays()

    async def check(self, check: Callable[[], bool], user: str, address: str) -> bool:
        """Return the result of a check of a password of a user; False if the check fails with an error."""
        delay_s = self._delays.delay_s(user, address, time.monotonic())
        if delay_s is None:
            self.refused += 1
            return False
        if delay_s:
            self.delayed += 1
            await asyncio.sleep(delay_s)
        proven = await self._result(check)
        if proven:
            self._delays.succeeded(user, address)
        else:
            self._count_failure(user, address)
        return proven

    async def _result(self, check: Callable[[], bool]) -> bool:
        try:
            if isinstance(check, QuickCheck):
                return check()
            async with self._turn:
                return await asyncio.wrap_future(in_background(check, "login"))
        except Exception as error:
            log.exception("login check failed", error=repr(error))
            return False

    def _count_failure(self, user: str, address: str) -> None:
        self.failed += 1
        failed = self._delays.failed(user, address, time.monotonic())
        if failed.begins:
            log.warning(
                "logins delayed after wrong passwords", user=user[:USER_SHOWN_MAX], address=address, of_pair=failed.of_pair,
                of_address=failed.of_address, of_user=failed.of_user,
            )  # fmt: skip


def sasl_mechanisms(broker: Broker, users: UserDirectory) -> dict[str, Callable[[], ServerMechanism]]:
    """Return the mechanisms offered to clients. A client uses the first that it knows, or the one that it prefers."""
    mechanisms: dict[str, Callable[[], ServerMechanism]] = {}
    for mechanism, verifiers in users.verifiers.items():
        mechanisms[mechanism] = partial(_scram, verifiers)
    if users.verifiers and broker.plain_allowed:
        mechanisms["PLAIN"] = lambda: PlainServer(users.check)
    if broker.anonymous_allowed:
        mechanisms["ANONYMOUS"] = AnonymousServer
    return mechanisms


def _scram(verifiers: Verifiers) -> ServerMechanism:
    return ScramServer(verifiers, secrets.token_urlsafe(NONCE_BYTES))
