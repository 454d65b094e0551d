"""The application of the admin server: the table of its pages, their routes, and the replacement when other settings say who may use it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bascule.server.admin_access import SECURITY_HEADERS, AdminAccess, AdminRole
from bascule.server.admin_http import ANSWERING, DISPLACED

Page = Callable[[Request], Awaitable[Response]]


class AdminPage(NamedTuple):
    """A method and a path, the role that a request for it needs (None: everybody may send it), and the function that answers.

    ``listed_as``: the path in the OpenAPI document, if one path there stands for several pages.
    """

    method: str
    path: str
    role: AdminRole | None
    answer: Page
    listed_as: str = ""


def routes_of(pages: Iterable[AdminPage], guarded: Callable[[AdminPage], Page]) -> list[Route]:
    """Return a route for each path, so that the answer to a wrong method names all that are right. ``guarded`` checks roles."""
    by_path: dict[str, dict[str, Page]] = {}
    for page in pages:
        by_path.setdefault(page.path, {})[page.method] = guarded(page)
    return [Route(path, partial(_by_method, answers), methods=list(answers)) for path, answers in by_path.items()]


async def _by_method(answers: dict[str, Page], request: Request) -> Response:
    if request.scope["path"].endswith("\n"):
        raise HTTPException(404)  # the pattern of a route ignores a line break at the end
    return await answers["GET" if request.method == "HEAD" else request.method](request)


async def not_routed(_request: Request, error: Exception) -> Response:
    """Answer a request without a page: an unknown path, or a method that the path does not have."""
    methods = (error.headers or {}).get("Allow", "") if isinstance(error, HTTPException) else ""
    if not methods:
        return JSONResponse({"error": "there is no such path"}, 404)
    allowed = ", ".join(sorted(methods.split(", ")))
    return JSONResponse({"error": f"the path allows only {allowed}"}, 405, {"allow": allowed})


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


class BoundedApp:
    """An application that answers a limited number of requests at once, those of peers that have gone included."""

    def __init__(self, app: ASGIApp, at_most: int) -> None:
        self._app = app
        self._at_most = at_most
        self._answering = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if self._answering >= self._at_most:
            error = {"error": f"the server is answering {self._at_most} requests; send the request again later"}
            await JSONResponse(error, 503, SECURITY_HEADERS)(scope, receive, send)
            return
        self._answering += 1
        state = scope["state"]
        state[ANSWERING] = asyncio.current_task()
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if DISPLACED not in state:
                raise
        finally:
            del state[ANSWERING]
            self._answering -= 1
