"""The application of the admin server, which is replaced when other settings say who may use it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bascule.server.admin_access import AdminAccess, AdminRole


class AdminPage(NamedTuple):
    """A path, the role that a request for it needs, and the function that answers."""

    method: str
    path: str
    role: AdminRole
    answer: Callable[[Request], Awaitable[Response]]


class CurrentApp:
    """An application that answers each request as the access of this moment says."""

    def __init__(self, make: Callable[[AdminAccess], ASGIApp], access: AdminAccess) -> None:
        self._make = make
        self._app = make(access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._app(scope, receive, send)

    def admit_by(self, access: AdminAccess) -> None:
        """Admit requests by other settings from now on. The sessions of the console end; requests that are being answered go on."""
        self._app = self._make(access)
