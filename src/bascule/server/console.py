"""The console: pages for a browser, which use the same paths of the admin server as every other client.

GET  /console/             the page, its modules and its style sheet; nobody needs to log in for them
GET  /console/session      who is logged in, and with which role
POST /console/login        begins a session, with credentials as in every other request
POST /console/logout       ends the session
"""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from bascule.server.admin_access import AdminAccess, AdminRole, peer_of
from bascule.server.admin_app import AdminPage
from bascule.server.console_sessions import ConsoleSession, ConsoleSessions, give_cookie, session_of

#: What the pages of the console may load: files of this server. They may make no HTML from text (require-trusted-types-for).
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
ROOT: Final = "/console/"
INDEX: Final = "index.html"


def files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the type of each file of the console, by path."""
    found = {}
    for file in resources.files("bascule.server").joinpath("console_files").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[ROOT + ("" if file.name == INDEX else file.name)] = file.read_bytes(), f"{kind}; charset=utf-8"
    return found


class Console:
    """The console of one admin server."""

    def __init__(self, access: AdminAccess, sessions: ConsoleSessions) -> None:
        self._access = access
        self._sessions = sessions
        self._files = files()

    def pages(self) -> list[AdminPage]:
        """Return the pages. None of them needs a role."""
        return [
            *(AdminPage("GET", path, None, self.root) for path in ("/", ROOT.rstrip("/"))),
            *(AdminPage("GET", path, None, self.file, listed_as=f"{ROOT}{{file}}") for path in self._files),
            AdminPage("GET", "/console/session", None, self.session),
            AdminPage("POST", "/console/login", None, self.login),
            AdminPage("POST", "/console/logout", None, self.logout),
        ]

    async def root(self, _request: Request) -> Response:
        """Lead a browser to the console."""
        return RedirectResponse(ROOT)

    async def file(self, request: Request) -> Response:
        """Answer with a file."""
        content, kind = self._files[request.scope["path"]]
        return Response(content, headers={"content-type": kind, "content-security-policy": CONTENT_SECURITY_POLICY})

    async def session(self, request: Request) -> Response:
        """Answer who is logged in. Without users and tokens, everybody on this machine is."""
        if not self._access.restricted:
            principal = await self._access.admit(request, AdminRole.VIEW)
            return JSONResponse({"name": principal.name, "role": principal.role.word, "csrf": "", "restricted": False})
        session = self._sessions.session(request)
        if session is None:
            return JSONResponse({"name": None, "role": None, "csrf": "", "restricted": True})
        return JSONResponse(_shown(session))

    async def login(self, request: Request) -> Response:
        """Begin a session in place of the one that the browser may have. Raises NotLoggedIn, NotAdministrator, AuditUnavailable."""
        if not self._access.restricted:
            return await self.session(request)
        self._access.audit.check()
        principal = await self._access.admit(request, AdminRole.VIEW)
        self._sessions.end(request)
        session, secret = self._sessions.open(principal)
        response = JSONResponse(_shown(session))
        give_cookie(secret, request, response)
        self._access.audit.record("console login", "", who=principal.name, peer=principal.peer, role=principal.role.word)
        return response

    async def logout(self, request: Request) -> Response:
        """End the session. Raises NotLoggedIn, NotAdministrator."""
        session = session_of(self._sessions, request)
        self._sessions.check_csrf(request, session)
        response = JSONResponse({})
        self._sessions.close(request, response)
        self._access.audit.record("console logout", "", who=session.principal.name, peer=peer_of(request.scope))
        return response


def _shown(session: ConsoleSession) -> dict[str, Any]:
    return {"name": session.principal.name, "role": session.principal.role.word, "csrf": session.csrf, "restricted": True}
