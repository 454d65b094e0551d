"""Sessions of the console: a cookie in place of the credentials of each request.

The cookie is ``HttpOnly`` and ``SameSite=Strict``, and ``Secure`` under TLS. A request that changes something also needs the token of the
session in a header, which no page of another site knows.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from bascule.server.admin_access import AdminAccess, AdminRole, NotAdministrator, NotLoggedIn, Principal, peer_of, refused_to

#: A session ends after this time without a request, and after this time in any case: a working day.
IDLE_S: Final = 30 * 60.0
LIFE_S: Final = 10 * 3600.0
#: Maximum number of sessions, of all users and of one user. Beyond it the session that was used longest ago ends.
SESSIONS_MAX: Final = 1_000
SESSIONS_PER_USER_MAX: Final = 20
SECRET_BYTES: Final = 32
COOKIE: Final = "bascule-console"
PORT_DIGITS_MAX: Final = 5
#: Browsers accept a cookie with this prefix only over TLS, and from this server alone.
SECURE_PREFIX: Final = "__Host-"
CSRF_HEADER: Final = "x-csrf-token"
SAFE_METHODS: Final = frozenset({"GET", "HEAD"})


@dataclass(slots=True)
class ConsoleSession:
    """A session of a principal, with the role that the principal had at the last request."""

    principal: Principal
    csrf: str
    begun_s: float
    used_s: float


class ConsoleSessions:
    """The sessions of one admin server. They end with the process."""

    def __init__(
        self, access: AdminAccess, *, now_s: Callable[[], float] = time.monotonic, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._access = access
        self._now_s, self._wall_s = now_s, wall_s
        self._sessions: OrderedDict[bytes, ConsoleSession] = OrderedDict()  # by digest of the cookie; the last one was used last

    async def admit(self, request: Request, role: AdminRole) -> Principal:
        """Return who sends a request that needs ``role``: by its credentials, else by its cookie. Raises NotLoggedIn, NotAdministrator."""
        session = None if "authorization" in request.headers else self.session(request)
        if session is None:
            return await self._access.admit(request, role)
        if request.method not in SAFE_METHODS:
            self.check_csrf(request, session)
        principal = replace(session.principal, peer=peer_of(request.scope))
        principal.check_role(role)
        return principal

    def check_csrf(self, request: Request, session: ConsoleSession) -> None:
        """Check that the console sends a request, and not another page by means of the cookie. Raises NotAdministrator."""
        if not hmac.compare_digest(request.headers.get(CSRF_HEADER, "").encode(), session.csrf.encode()):
            needs = f"the request has a cookie of the console, so it needs the header {CSRF_HEADER} with the session's token"
            raise refused_to(session.principal.name, NotAdministrator(needs))

    def open(self, principal: Principal) -> tuple[ConsoleSession, str]:
        """Begin a session. Return it and the secret for its cookie."""
        mine = [key for key, each in self._sessions.items() if each.principal.name == principal.name]
        for key in mine[: max(0, len(mine) + 1 - SESSIONS_PER_USER_MAX)]:
            del self._sessions[key]
        while len(self._sessions) >= SESSIONS_MAX:
            self._sessions.popitem(last=False)
        secret, now_s = secrets.token_urlsafe(SECRET_BYTES), self._now_s()
        session = ConsoleSession(principal, secrets.token_urlsafe(SECRET_BYTES), now_s, now_s)
        self._sessions[_digest(secret)] = session
        return session, secret

    def session(self, request: Request) -> ConsoleSession | None:
        """Return the valid session of a request, with the role that its user has now; None if there is none."""
        key = _digest(_secret_of(request))
        session = self._sessions.get(key)
        if session is None:
            return None
        now_s = self._now_s()
        principal = self._current(session) if now_s < min(session.used_s + IDLE_S, session.begun_s + LIFE_S) else None
        if principal is None:
            del self._sessions[key]
            return None
        session.principal, session.used_s = principal, now_s
        self._sessions.move_to_end(key)
        return session

    def end(self, request: Request) -> None:
        """End the session of a request, if there is one."""
        self._sessions.pop(_digest(_secret_of(request)), None)

    def close(self, request: Request, response: Response) -> None:
        """End the session of a request, and delete its cookie."""
        self.end(request)
        response.delete_cookie(_cookie(request), path="/", secure=_is_secure(request), httponly=True, samesite="strict")

    def _current(self, session: ConsoleSession) -> Principal | None:
        principal = session.principal
        if self._wall_s() >= principal.until_s:
            return None
        if not principal.is_user:
            return principal
        if principal.certified and not self._access.knows(principal.name):
            return None
        role = self._access.role_of(principal.name, principal.of_token)
        if role is None or self._access.password_of(principal.name) != principal.password:
            return None
        return replace(principal, role=role)


def give_cookie(secret: str, request: Request, response: Response) -> None:
    """Give the cookie of a session to the browser."""
    response.set_cookie(_cookie(request), secret, path="/", secure=_is_secure(request), httponly=True, samesite="strict")


def session_of(sessions: ConsoleSessions, request: Request) -> ConsoleSession:
    """Return the session of a request. Raises NotLoggedIn."""
    session = sessions.session(request)
    if session is None:
        raise NotLoggedIn("the session of the console has ended; log in again")
    return session


def _secret_of(request: Request) -> str:
    """Return the secret in the cookie of a request, "" if there is none or if there are two.

    A browser sends a cookie of the same name that another server of the host has set for a path, or another host for its domain, besides
    that of this server, and does not say which is which.

    The secrets need no unquoting, for which Python before 3.11.10 and 3.12.6 takes a second if a header has thousands of backslashes.
    """
    wanted = _cookie(request)
    pairs = (pair.partition("=") for pair in request.headers.get("cookie", "").split(";"))
    secrets_found = [value.strip() for name, _, value in pairs if name.strip() == wanted]
    return secrets_found[0] if len(secrets_found) == 1 else ""


def _cookie(request: Request) -> str:
    """Return the name of the cookie. It has the port, because a browser sends all cookies of a host to all its ports."""
    port = request.headers.get("host", "").rpartition(":")[2]
    name = f"{COOKIE}-{port}" if port.isascii() and port.isdecimal() and len(port) <= PORT_DIGITS_MAX else COOKIE
    return SECURE_PREFIX + name if _is_secure(request) else name


def _is_secure(request: Request) -> bool:
    return bool(request.scope.get("scheme") == "https")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()
