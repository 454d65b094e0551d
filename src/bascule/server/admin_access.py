"""Who may use the admin server: roles, the credentials of a request, and the checks of its Host and Origin headers."""

from __future__ import annotations

import base64
import binascii
import enum
import hmac
import ipaddress
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bascule.amqp.bearer import is_token
from bascule.amqp.sasl import AuthenticationFailed, LoginUnavailable, TokenIdentity
from bascule.config.fields import is_loopback
from bascule.core.errors import InvalidInput
from bascule.core.permissions import Permission, Unauthorized
from bascule.server.audit import ADMINISTRATION, NO_AUDIT, AuditTrail

PORT_MAX: Final = 65_535
#: A name, or an IPv6 address in brackets, and an optional port (RFC 9110, section 7.2).
_AUTHORITY: Final = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[a-zA-Z0-9._-]+))(?::(?P<port>[0-9]{0,5}))?")
#: Headers that say who sends a request, or which page has caused it.
SINGLE_HEADERS: Final = frozenset(
    {b"authorization", b"cookie", b"host", b"origin", b"sec-fetch-dest", b"sec-fetch-site", b"x-bascule-console", b"x-csrf-token"}
)
#: The page that a token of the role ``view`` reads also without TLS.
METRICS_PATH: Final = "/metrics"


class AdminRole(enum.IntEnum):
    """The roles of administrators. A role may do everything that a lower role may do."""

    #: See queues, subscriptions, connections, branches and figures.
    VIEW = 1
    #: See and change messages; create and delete queues and subscriptions.
    EDIT = 2
    #: Act on connections, transaction branches and ingresses.
    MANAGE = 3

    @property
    def word(self) -> str:
        """Return the name in settings, pages and errors."""
        return self.name.lower()


#: What each role may do, on every address.
ROLE_PERMISSIONS: Final[Mapping[AdminRole, frozenset[Permission]]] = {
    AdminRole.VIEW: frozenset({Permission.VIEW}),
    AdminRole.EDIT: frozenset(Permission) - {Permission.MANAGE, Permission.CONSUME},
    AdminRole.MANAGE: frozenset(Permission),
}


class NotLoggedIn(InvalidInput):
    """The request has no valid credentials. ``who`` is the user that it names, for the audit."""

    who = ""
    condition = "amqp:unauthorized-access"
    http_status = 401


class NotAdministrator(InvalidInput):
    """The request comes from somebody without the necessary role: ``who``, if that is known."""

    who = ""
    condition = "amqp:unauthorized-access"
    http_status = 403


class ForeignHost(InvalidInput):
    """The Host header names another server: the name of an attacker may point to this machine."""

    http_status = 421


RefusedRequest = TypeVar("RefusedRequest", NotLoggedIn, NotAdministrator)


def refused_to(who: str, error: RefusedRequest) -> RefusedRequest:
    """Return an error that says who has sent the request."""
    error.who = who
    return error


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who uses the admin server: a user, or the holder of a token of the settings. ``peer`` is HOST:PORT.

    ``of_token`` are the roles of a user by the token of a provider, which is valid until ``until_s`` in seconds since 1970. ``password``
    stands for the password of a user before it was checked. ``certified``: the user has logged in with a client certificate.
    """

    name: str
    role: AdminRole
    peer: str = ""
    is_user: bool = False
    of_token: frozenset[str] = frozenset()
    until_s: float = math.inf
    password: object = field(default=None, repr=False, compare=False)
    certified: bool = False

    def check_role(self, role: AdminRole) -> None:
        """Raise NotAdministrator for a lower role."""
        if self.role < role:
            error = NotAdministrator(f"{self.name} has the role {self.role.word}; this request needs {role.word}")
            raise refused_to(self.name, error)

    def authorize(self, permission: Permission, address: str) -> None:
        """Raise Unauthorized if the role lacks the permission."""
        if permission not in ROLE_PERMISSIONS[self.role]:
            raise Unauthorized(self.name, permission, address)


#: In the state of a request: the user of the client's certificate, None without one.
CERTIFIED: Final = "certified"
#: Everybody on this machine, if the broker has no users and the admin server no tokens.
LOCAL: Final = Principal("local", AdminRole.MANAGE)


async def _nobody(_user: str, _password: str, _address: str) -> bool:
    return False


def _known(_user: str) -> bool:
    return True


def _no_role(_user: str, _of_token: frozenset[str]) -> AdminRole | None:
    return None


def _no_password(_user: str) -> object:
    return None


@dataclass(frozen=True)
class AdminAccess:
    """Decides who sends a request, and with which role.

    ``tokens`` has the name and role of each token of the settings. ``role_of`` returns the role of a user by name and roles of a token,
    ``check`` checks the password of a user at an address, and ``identify`` returns who the holder of a JSON Web Token at an address is;
    None if such tokens are not accepted. ``password_of`` returns what stands for the password of a user, and changes with it. ``knows``
    returns whether a user may log in by certificate. If ``restricted`` is false, every process of this machine has the role ``manage``.
    ``hosts`` are the names of this server. ``insecure``: other machines may send tokens of the settings without TLS.
    """

    restricted: bool = False
    tokens: Mapping[str, tuple[str, AdminRole]] = field(default_factory=dict)
    role_of: Callable[[str, frozenset[str]], AdminRole | None] = _no_role
    check: Callable[[str, str, str], Awaitable[bool]] = _nobody
    identify: Callable[[str, str], Awaitable[TokenIdentity]] | None = None
    knows: Callable[[str], bool] = _known
    password_of: Callable[[str], object] = _no_password
    hosts: Iterable[str] = ()
    public_metrics: bool = False
    audit: AuditTrail = NO_AUDIT
    insecure: bool = False

    async def admit(self, request: Request, role: AdminRole) -> Principal:
        """Return who sends a request that needs ``role``. Raises NotLoggedIn, NotAdministrator."""
        host, peer = request.client.host if request.client is not None else "", peer_of(request.scope)
        if not self.restricted:
            if not is_loopback(host):
                raise NotAdministrator("no users and no admin.token are set, so only requests from this machine are allowed")
            return Principal(LOCAL.name, LOCAL.role, peer)
        principal = await self._principal(request, host, peer)
        principal.check_role(role)
        return principal

    async def _principal(self, request: Request, host: str, peer: str) -> Principal:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        match scheme.lower():
            case "bearer":
                if self.identify is not None and is_token(given.strip()):
                    _check_private(request, host, "a token of a provider")
                    return await self._of_provider(self.identify, given.strip(), host, peer)
                principal = self._of_token(given.strip(), peer)
                # Prometheus reads the metrics with a token that can do no more than this without TLS.
                if not self.insecure and (principal.role is not AdminRole.VIEW or request.scope["path"] != METRICS_PATH):
                    _check_private(request, host, "a token of [admin]", ", or accept the risk with broker.allow_insecure = true")
                return principal
            case "basic":
                _check_private(request, host, "a password")
                return await self._of_user(given.strip(), host, peer)
        certified = request.scope.get("state", {}).get(CERTIFIED)
        if certified is not None and not given and self.knows(certified):
            return replace(self._user(certified, frozenset(), peer), certified=True)
        raise NotLoggedIn("log in with a token (Authorization: Bearer TOKEN), or as a user (Authorization: Basic, or a client certificate)")

    def _of_token(self, given: str, peer: str) -> Principal:
        found: Principal | None = None
        for name, (token, role) in self.tokens.items():  # all are compared, so that the time says nothing
            if hmac.compare_digest(given.encode(), token.encode()):
                found = Principal(name, role, peer)
        if found is None:
            raise NotLoggedIn("the token is not valid")
        return found

    async def _of_user(self, given: str, host: str, peer: str) -> Principal:
        try:
            user, colon, password = base64.b64decode(given, validate=True).decode().partition(":")
        except (ValueError, binascii.Error):
            raise NotLoggedIn("the credentials are not base64 of USER:PASSWORD in UTF-8") from None
        checked = self.password_of(user)  # it may change during the check
        if not colon or not await self.check(user, password, host):
            raise refused_to(user, NotLoggedIn("unknown user or wrong password"))
        return replace(self._user(user, frozenset(), peer), password=checked)

    async def _of_provider(self, identify: Callable[[str, str], Awaitable[TokenIdentity]], token: str, host: str, peer: str) -> Principal:
        try:
            identity = await identify(token, host)
        except LoginUnavailable:
            raise
        except AuthenticationFailed as error:
            raise refused_to(error.claimed_user, NotLoggedIn(error.description)) from None
        return self._user(identity.user, identity.roles, peer, identity.until_s)

    def _user(self, user: str, of_token: frozenset[str], peer: str, until_s: float = math.inf) -> Principal:
        role = self.role_of(user, of_token)
        if role is None:
            error = NotAdministrator(f"user {user!r:.60} has no role for the admin server; see admin.view, admin.edit and admin.manage")
            raise refused_to(user, error)
        return Principal(user, role, peer, is_user=True, of_token=of_token, until_s=until_s, password=self.password_of(user))

    def refused(self, scope: Scope, error: InvalidInput) -> None:
        """Record a refused request. Requests that do not prove who sends them are recorded unless their address has had many."""
        path, who, peer, result = f"{scope['method']} {scope['path']}", getattr(error, "who", ""), peer_of(scope), str(error)
        if isinstance(error, NotAdministrator) and who:
            self.audit.record(ADMINISTRATION, path, who=who, peer=peer, allowed=False, result=result)
        else:
            self.audit.refused(ADMINISTRATION, ADMINISTRATION, path, who=who, peer=peer, result=result)

    def check_origin(self, headers: Headers, scheme: str, *, linked: bool = False) -> None:
        """Check that no web page of another site has caused the request. Raises ForeignHost, NotAdministrator.

        Pages of other sites may have links to a page that is ``linked``, which shows nothing of the broker. A page can point a host name of
        its own to this machine, and can send requests whose answers it cannot read.
        """
        authority = headers.get("host", "")
        name = host_of(authority)
        if authority and (name is None or not (_is_ip(name) or name in {"localhost", *(each.lower() for each in self.hosts)})):
            raise ForeignHost(f"host {name or authority!r:.100} is not a name of this server; add it to admin.hosts")
        if any(origin.lower() != f"{scheme}://{authority.lower()}" for origin in headers.getlist("origin")):
            raise NotAdministrator("requests from web pages of other sites are not allowed")
        if linked and headers.getlist("sec-fetch-dest") == ["document"]:
            return
        if any(site not in {"same-origin", "none"} for site in headers.getlist("sec-fetch-site")):
            raise NotAdministrator("requests from web pages of other sites are not allowed")


def _check_private(request: Request, host: str, what: str, else_: str = "") -> None:
    """Check that nobody on the network can read the credentials of a request. An error ends with ``else_``. Raises NotAdministrator."""
    if request.scope["scheme"] != "https" and not is_loopback(host):
        raise NotAdministrator(f"{what} is accepted only over TLS or from this machine; set admin.tls{else_}")


#: Access without users and tokens.
OPEN: Final = AdminAccess()


def peer_of(scope: Scope) -> str:
    """Return HOST:PORT of the client."""
    host, port = scope.get("client") or ("", 0)
    return f"{host}:{port}"


def host_of(authority: str) -> str | None:
    """Return the host in a Host header, in lower case, without brackets, port and the dot of the root; None if the header has another form.

    A part that is not checked could change which host the header names: in ``[localhost].example``, for example.
    """
    match = _AUTHORITY.fullmatch(authority)
    if match is None or int(match["port"] or 0) > PORT_MAX:
        return None
    if (address := match["address"]) is not None:
        return address.lower() if ":" in address and _is_ip(address) else None
    return match["name"].lower().removesuffix(".")


def check_once(headers: Headers) -> None:
    """Check that a request has each header that decides who sends it at most once. Raises InvalidInput.

    A proxy in front of the server may have looked at another of two headers than the server.
    """
    names = [name for name, _ in headers.raw if name in SINGLE_HEADERS]
    for name in set(names):
        names.remove(name)
    if names:
        raise InvalidInput(f"the request has several headers {names[0].decode()}; send one")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


#: Headers of every answer: no copy is kept, and a browser neither runs nor frames the answer, nor guesses its type.
SECURITY_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
#: The ways to log in.
CHALLENGES: Final = ("Bearer", 'Basic realm="bascule", charset="UTF-8"')
#: The console sends this header: a browser would answer a challenge with a dialog of its own.
CONSOLE_HEADER: Final = "x-bascule-console"
#: Pages to which other sites may have links.
LINKED_PATHS: Final = frozenset({"/", "/console", "/console/"})


class SecureHeaders:
    """An application whose answers have the security headers, and which refuses requests of foreign web pages."""

    def __init__(self, app: ASGIApp, access: AdminAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        given = Headers(scope=scope)

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if message["status"] == NotLoggedIn.http_status and CONSOLE_HEADER not in given:
                    for challenge in CHALLENGES:
                        headers.append("www-authenticate", challenge)
            await send(message)

        app = self._app
        try:
            check_once(given)
            linked = scope["path"] in LINKED_PATHS and scope["method"] == "GET"
            self._access.check_origin(given, scope.get("scheme", "http"), linked=linked)
        except InvalidInput as error:
            self._access.refused(scope, error)
            app = JSONResponse({"error": str(error)}, error.http_status)
        await app(scope, receive, secured)
