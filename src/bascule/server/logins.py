"""Authentication of clients: the mechanisms that the settings allow, the safest first, and the checks of passwords."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from bascule.amqp.bearer import (
    OAUTHBEARER,
    XOAUTH2,
    BearerServer,
    PlainTokenServer,
    TokenCheck,
    read_oauthbearer,
    read_xoauth2,
)
from bascule.amqp.sasl import (
    AnonymousServer,
    AuthenticationFailed,
    ExternalServer,
    LoginUnavailable,
    PlainServer,
    QuickCheck,
    ServerMechanism,
    TokenIdentity,
)
from bascule.amqp.scram import ScramServer
from bascule.amqp.verifiers import PLUS, Verifiers
from bascule.config.settings import Broker
from bascule.core.log import get_log
from bascule.server.listener_tls import TlsPeer
from bascule.server.login_delays import LoginDelays
from bascule.server.tokens import TokenLogins
from bascule.server.user_directory import UserDirectory
from bascule.threads.background import in_background

NONCE_BYTES = 18
#: Passwords checked at once. A check takes milliseconds of processor time, or more if hashes have many iterations, and any peer can cause
#: one. The other processors stay free for clients that are logged in.
CHECKS_AT_ONCE: Final = 1
#: Requests to the admin server that wait for an unknown key of a token. Each holds a connection for seconds, and anybody can send one.
REQUESTS_WAITING_MAX: Final = 16
#: Characters of a claimed user name in a log line.
USER_SHOWN_MAX: Final = 60

log = get_log(__name__)


class _Way(NamedTuple):
    """How to carry out a check. A ``slow`` check waits for its turn."""

    carry_out: Callable[[], Awaitable[bool]]
    slow: bool


async def _at_once(check: Callable[[], bool]) -> bool:
    return check()


async def _beside(check: Callable[[], bool]) -> bool:
    return await asyncio.wrap_future(in_background(check, "login"))


class LoginChecks:
    """Checks passwords and tokens: slow checks beside the event loop, one at a time, and each after the delay that failures cause."""

    def __init__(self, tokens: TokenLogins | None = None) -> None:
        self.failed = self.delayed = self.refused = 0  # checks since the start
        self._turn = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._waiting = 0  # requests that wait for a key
        self._delays = LoginDelays()
        self.tokens = tokens

    async def check(self, check: Callable[[], bool], user: str, address: str) -> bool:
        """Return the result of a check of a password or token of a user; False if the check fails with an error."""
        delay_s = self._delays.delay_s(user, address, time.monotonic())
        if delay_s is None:
            self.refused += 1
            return False
        if delay_s:
            self.delayed += 1
            await asyncio.sleep(delay_s)
        way = self._way(check)
        if way.slow:
            await self._turn.acquire()  # a peer that leaves before its turn leaves no work behind
        # A check that has begun ends, and counts, also if nobody waits for its result any more.
        checking = asyncio.ensure_future(self._checked(check, way, user, address))
        if way.slow:
            checking.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(checking)

    async def _checked(self, check: Callable[[], bool], way: _Way, user: str, address: str) -> bool:
        try:
            proven = await way.carry_out()
        except Exception as error:
            log.exception("login check failed", error=repr(error))
            proven = False
        if proven:
            self._delays.succeeded(user, address)
        elif not (isinstance(check, TokenCheck) and check.undecided):  # a provider that is away says nothing about the client
            self._count_failure(user, address)
        return proven

    async def identify(self, token: str, address: str) -> TokenIdentity:
        """Return who the holder of a token is. Raises AuthenticationFailed, and LoginUnavailable if the key of the token is unknown."""
        if self.tokens is None:
            raise AuthenticationFailed("the broker accepts no tokens; see broker.oidc")
        check = TokenCheck(self.tokens.verifier, "", token)
        waits = not self.tokens.knows_key_of(token)
        if waits and self._waiting >= REQUESTS_WAITING_MAX:
            raise LoginUnavailable("the key of the token is not in the key set, and other requests wait for it already; try again")
        self._waiting += waits
        try:
            await self.check(check, check.claimed_user, address)
        finally:
            self._waiting -= waits
        if check.identity is None:
            refusal = check.refusal or AuthenticationFailed("refused because of earlier failures; try again later")
            refusal.claimed_user = check.claimed_user
            raise refusal
        return check.identity

    def _way(self, check: Callable[[], bool]) -> _Way:
        if isinstance(check, QuickCheck):
            return _Way(partial(_at_once, check), slow=False)
        if self.tokens is not None and isinstance(check, TokenCheck):
            return _Way(partial(self.tokens.check, check), slow=False)
        return _Way(partial(_beside, check), slow=True)

    def _count_failure(self, user: str, address: str) -> None:
        self.failed += 1
        failed = self._delays.failed(user, address, time.monotonic())
        if failed.begins:
            log.warning(
                "logins delayed after failures", user=user[:USER_SHOWN_MAX], address=address, of_pair=failed.of_pair,
                of_address=failed.of_address, of_user=failed.of_user,
            )  # fmt: skip


#: SASL mechanisms by name, the safest first. A client uses the first that it knows, or the one that it prefers.
Mechanisms = dict[str, Callable[[], ServerMechanism]]


def sasl_mechanisms(broker: Broker, users: UserDirectory, tokens: TokenLogins | None = None) -> Callable[[TlsPeer], Mechanisms]:
    """Return a function that returns the mechanisms offered to a client."""
    others: Mechanisms = {}
    if tokens is not None and broker.plain_allowed:
        verifier, url = tokens.verifier, tokens.configuration_url
        others[OAUTHBEARER] = lambda: BearerServer(verifier, url, read_oauthbearer)
        others[XOAUTH2] = lambda: BearerServer(verifier, url, read_xoauth2)
        others["PLAIN"] = lambda: PlainTokenServer(verifier, users.check)
    elif users.verifiers and broker.plain_allowed:
        others["PLAIN"] = lambda: PlainServer(users.check)
    if broker.anonymous_allowed:
        others["ANONYMOUS"] = AnonymousServer
    only_known = broker.tls.only_known_users
    return lambda peer: {**_external(peer.user, users, only_known), **_scrams(users.verifiers, peer), **others}


def _external(user: str | None, users: UserDirectory, only_known: bool) -> Mechanisms:
    """Return the login by certificate. It is not offered to an unknown user, who may have a password beside the certificate."""
    if user is None or (only_known and not users.knows(user)):
        return {}
    return {"EXTERNAL": lambda: ExternalServer(user, lambda: not only_known or users.knows(user))}


def _scrams(verifiers: Mapping[str, Verifiers], peer: TlsPeer) -> Mechanisms:
    found: Mechanisms = {}
    for plus in (True, False) if peer.bindings else (False,):
        for mechanism, of_users in verifiers.items():
            found[f"{mechanism}{PLUS}" if plus else mechanism] = partial(_scram, of_users, peer, plus)
    return found


def _scram(verifiers: Verifiers, peer: TlsPeer, plus: bool) -> ServerMechanism:
    return ScramServer(verifiers, secrets.token_urlsafe(NONCE_BYTES), peer.bindings, plus=plus)
