"""The admin server: health, status, metrics and actions of a broker over HTTP, by default on loopback only.

GET /livez                 200 while the process answers
GET /readyz                200 with the role while the broker serves clients or is a standby, else 503 with the reason
GET /active                200 while the broker serves clients, else 503 with the reason
GET /status                all figures, JSON
GET /queues                the queues, JSON; /queues?name=NAME one queue in detail
GET /subscriptions         the subscriptions of topics, JSON
GET /connections           the client connections, JSON
GET /metrics               Prometheus text
GET /dead-letters          dead letters, JSON; ?queue=NAME&count=N
GET /openapi.json          the description of all paths (bascule.server.openapi)
GET /LOOK                  a part of a list, messages, and what a console needs (bascule.server.looks)
GET /console/              the console (bascule.server.console)
POST /GROUP/ACTION         an action with its arguments as JSON (bascule.server.actions)
GET  /brokers               the brokers of the journal (bascule.server.brokers)
.../diverts, /ingresses    control of pipelines (bascule.server.pipelines)
POST /config/reload        reads the settings again (bascule.server.reload)

``admin_pages`` is the table of all of them with the roles that they need, and ``bascule.server.admin_access`` decides who has a role.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast

import uvicorn
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from bascule.broker.errors import RequestFailed
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import get_log
from bascule.embedded.process import PortInUse
from bascule.server import admin_http, looks
from bascule.server.actions import ACTIONS, CONTENT_ACTIONS
from bascule.server.admin_access import METRICS_PATH, OPEN, AdminAccess, AdminRole, NotAdministrator, NotLoggedIn, Principal, SecureHeaders
from bascule.server.admin_app import AdminPage, BoundedApp, CurrentApp, Page, not_routed, routes_of
from bascule.server.admin_arguments import arguments_of
from bascule.server.admin_http import PEER_ENDED, PROVEN
from bascule.server.answer_places import AnswerPlaces
from bascule.server.audit import AuditTrail
from bascule.server.brokers import BrokerPages
from bascule.server.console import Console
from bascule.server.console_sessions import ConsoleSessions
from bascule.server.descriptors import RESERVED
from bascule.server.exposition import METRICS_TYPE, exposition
from bascule.server.handshakes import Handshakes, TlsContext, no_tls
from bascule.server.json_pieces import JSON_TYPE, LongList, json_pieces
from bascule.server.listener import Listener, bind
from bascule.server.listing import number_of
from bascule.server.openapi import DOCUMENT_PATH, ApiDocument
from bascule.server.pieces_answer import PiecesAnswer, made_beside
from bascule.server.pipelines import PipelinePages
from bascule.server.reload_pages import ReloadPages
from bascule.server.sending_messages import without_content
from bascule.server.status import BrokerRole, BrokerStatus
from bascule.server.status_metrics import StatusCollector
from bascule.threads.lasting import end_process, lasting_task

#: Longest wait for HTTP connections when the broker stops.
STOP_TIMEOUT_S = 1
#: Maximum number of dead letters in one answer, since each is read and decoded on the thread of the event loop.
DEAD_LETTERS_MAX = 1_000
DEAD_LETTERS = 100
#: Pages that describe all queues or connections before they are sent, made at once: the metrics, and a part of a sorted list.
PAGES_AT_ONCE = 1
#: Answers in pieces that are sent at once, each with the figures or a list of all queues. Metrics, which may need no login, have places of
#: their own.
STREAMS_AT_ONCE = 4
#: Longest wait, in seconds, for a place of one of these answers: the default timeout of Prometheus.
STREAM_WAIT_S = 10.0

log = get_log(__name__)


class AdministeredBroker(Protocol):
    """A broker, as the admin server sees it. All methods run on the event loop; long ones take several of its turns."""

    def trouble(self) -> str:
        """Return why the broker does not serve, "" if it serves."""

    def role(self) -> BrokerRole | None:
        """Return the role of the broker; None if it is not ready."""

    async def status(self) -> BrokerStatus:
        """Return the current status."""

    async def status_page(self) -> Mapping[str, Any]:
        """Return the current status for an answer: its lists may be instances of LongList."""

    async def queues(self) -> LongList[Any] | Sequence[Any]:
        """Return the queues."""

    async def queue(self, name: str) -> Mapping[str, Any]:
        """Return one queue in detail: see QueueDetail. Raises UnknownAddress, Unavailable."""

    async def subscriptions(self) -> LongList[Any] | Sequence[Any]:
        """Return the subscriptions of topics: see SubscriptionStatus."""

    async def clients(self) -> LongList[Any] | Sequence[Any]:
        """Return the client connections: see ConnectionStatus."""

    async def dead_letters(self, queue: str, count: int) -> Sequence[Mapping[str, Any]]:
        """Return the first ``count`` messages of a queue; the name "" is the configured queue. Raises UnknownAddress, Unavailable."""

    async def look(self, name: str, parameters: Mapping[str, str]) -> object:
        """Answer one of looks.LOOKS. Raises BasculeError."""

    async def act(self, principal: Principal, action: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one of ACTIONS. Raises BasculeError."""

    def contain(self, error: Exception, path: str) -> None:
        """Count and log an error that concerns one request only."""


def _answer(error: BasculeError) -> Response:
    return JSONResponse({"error": str(error)}, error.http_status)


class _Pages:
    """The pages of one broker."""

    def __init__(self, broker: AdministeredBroker, audit: AuditTrail, collectors: Sequence[Collector]) -> None:
        self._broker = broker
        self._audit = audit
        self._collectors = collectors
        self._turn = asyncio.Semaphore(PAGES_AT_ONCE)
        self._metrics = AnswerPlaces(STREAMS_AT_ONCE)
        self._lists = AnswerPlaces(STREAMS_AT_ONCE)

    async def livez(self, _request: Request) -> Response:
        """Answer that the process lives."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _request: Request) -> Response:
        """Answer whether the broker serves or can take over, or why not."""
        return self._role_or_trouble(self._broker.role())

    async def active(self, _request: Request) -> Response:
        """Answer whether the broker serves, or why not."""
        role = self._broker.role()
        return self._role_or_trouble(role if role is BrokerRole.ACTIVE else None)

    def _role_or_trouble(self, role: BrokerRole | None) -> Response:
        return PlainTextResponse(f"{self._broker.trouble()}\n", 503) if role is None else PlainTextResponse(f"{role}\n")

    async def metrics(self, request: Request) -> Response:
        """Answer with metrics for Prometheus."""
        place = await self._metrics.place(_reader(request), STREAM_WAIT_S)
        try:
            async with self._turn:
                status = StatusCollector(await self._broker.status())
            metrics = chain(status.slices(), chain.from_iterable(each.collect() for each in self._collectors))
            pieces = made_beside(exposition(metrics), self._turn)
            first = await anext(pieces)  # an error of all figures is answered
        except BaseException:
            place.give_back()
            raise
        failed = partial(self._broker.contain, path=METRICS_PATH)
        return PiecesAnswer(first, pieces, METRICS_TYPE, place=place, failed=failed)

    async def _json(self, request: Request, content: object) -> Response:
        """Answer with JSON: at once if it is short, otherwise in pieces."""
        pieces = json_pieces(content)
        first = await anext(pieces)
        second = await anext(pieces, b"")
        if not second:
            return Response(first, media_type=JSON_TYPE)
        place = await self._lists.place(_reader(request), STREAM_WAIT_S)
        failed = partial(self._broker.contain, path=request.scope["path"])
        return PiecesAnswer(first + second, pieces, JSON_TYPE, place=place, failed=failed)

    async def look(self, request: Request) -> Response:
        """Answer one of LOOKS."""
        async with self._turn:
            content = await LOOKS[request.scope["path"]](self, request)
        return await self._json(request, content)

    async def look_further(self, request: Request) -> Response:
        """Answer one of looks.LOOKS."""
        name = request.scope["path"].removeprefix("/")
        parameters = dict(request.query_params)
        look = looks.LOOKS[name]
        if look.content:
            principal: Principal = request.state.principal
            self._audit.check()
            on = parameters.get("id", "") if look.long else parameters.get("queue", "")
            self._audit.record(name, on, who=principal.name, peer=principal.peer)
        async with nullcontext() if look.long else self._turn:
            if look.long:
                content = await _while_wanted(request, self._broker.look(name, parameters))
            else:
                content = await self._broker.look(name, parameters)
        if isinstance(content, bytes):
            return Response(content, headers={"content-type": "application/octet-stream", "content-disposition": "attachment"})
        return await self._json(request, content)

    async def act(self, request: Request) -> Response:
        """Run one of ACTIONS."""
        principal: Principal = request.state.principal
        action = request.scope["path"].removeprefix("/")
        arguments = await arguments_of(request)
        shown = without_content(arguments) if action in CONTENT_ACTIONS else arguments
        on = next((str(value) for value in arguments.values()), "")
        with self._audit.acting(action, on, who=principal.name, peer=principal.peer, arguments=json.dumps(shown)) as done:
            answer = await self._broker.act(principal, action, arguments)
            done["result"] = json.dumps(answer)
        log.info("administrator action", who=principal.name, action=action, arguments=shown, answer=answer)
        return JSONResponse(answer)

    async def _status(self, _request: Request) -> object:
        return await self._broker.status_page()

    async def _queues(self, request: Request) -> object:
        name = request.query_params.get("name")
        if name is None:
            return await self._broker.queues()
        return await self._broker.queue(name)

    async def _subscriptions(self, _request: Request) -> object:
        return await self._broker.subscriptions()

    async def _connections(self, _request: Request) -> object:
        return await self._broker.clients()

    async def _dead_letters(self, request: Request) -> object:
        count = number_of(request.query_params, "count", DEAD_LETTERS, 1, DEAD_LETTERS_MAX)
        principal: Principal = request.state.principal
        self._audit.check()
        self._audit.record("dead letters", request.query_params.get("queue", ""), who=principal.name, peer=principal.peer)
        return await self._broker.dead_letters(request.query_params.get("queue", ""), count)


async def _while_wanted(request: Request, answer: Coroutine[Any, Any, object]) -> object:
    """Return an answer. Cancel it if the client leaves, or closes its side of the connection, which looks the same. Raises Unavailable."""
    asking, leaving = asyncio.create_task(answer), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise Unavailable("the client has closed the connection, so the search was cancelled")
        return asking.result()
    finally:
        asking.cancel()
        leaving.cancel()


def _reader(request: Request) -> str:
    """Return who reads an answer: the user or token, or the address of a peer without a login."""
    principal: Principal | None = getattr(request.state, "principal", None)
    if principal is not None:
        return principal.name
    return request.client.host if request.client is not None else ""


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect" and not request.scope["state"].get(PEER_ENDED):
        pass


LOOKS: dict[str, Callable[[_Pages, Request], Awaitable[object]]] = {
    "/status": _Pages._status,
    "/queues": _Pages._queues,
    "/subscriptions": _Pages._subscriptions,
    "/connections": _Pages._connections,
    "/dead-letters": _Pages._dead_letters,
}


class AdminPath(NamedTuple):
    """A path of the admin server, and the role that a request for it needs; None: everybody may send it."""

    method: str
    path: str
    role: AdminRole | None


def admin_paths(access: AdminAccess) -> list[AdminPath]:
    """Return the paths about the broker, with the roles that they need."""
    return [
        AdminPath("GET", "/livez", None),
        AdminPath("GET", "/readyz", None),
        AdminPath("GET", "/active", None),
        AdminPath("GET", METRICS_PATH, None if access.public_metrics else AdminRole.VIEW),
        AdminPath("GET", DOCUMENT_PATH, AdminRole.VIEW),
        # Dead letters show the content of messages.
        *(AdminPath("GET", path, AdminRole.EDIT if path == "/dead-letters" else AdminRole.VIEW) for path in LOOKS),
        *(AdminPath("GET", f"/{name}", look.role) for name, look in looks.LOOKS.items()),
        *(AdminPath("POST", f"/{name}", action.role) for name, action in ACTIONS.items()),
    ]


def admin_pages(
    broker: AdministeredBroker, access: AdminAccess, sessions: ConsoleSessions, collectors: Sequence[Collector] = (),
    pipelines: PipelinePages | None = None, reload: ReloadPages | None = None, brokers: BrokerPages | None = None,
) -> list[AdminPage]:  # fmt: skip
    """Return all pages of a server. The table routes the requests, and the OpenAPI document is made from it."""
    pages = _Pages(broker, access.audit, collectors)
    table: list[AdminPage] = []
    apart: dict[str, Page] = {
        "/livez": pages.livez, "/readyz": pages.readyz, "/active": pages.active, METRICS_PATH: pages.metrics,
        DOCUMENT_PATH: ApiDocument(table).answer,
    }  # fmt: skip
    for method, path, role in admin_paths(access):
        further = method == "GET" and path.removeprefix("/") in looks.LOOKS
        answer = apart.get(path) or (pages.look if path in LOOKS else pages.look_further if further else pages.act)
        table.append(AdminPage(method, path, role, answer))
    table += Console(access, sessions).pages()
    table += () if pipelines is None else pipelines.paths()
    table += () if reload is None else reload.paths()
    table += () if brokers is None else brokers.paths()
    return table


def admin_app(
    broker: AdministeredBroker, access: AdminAccess = OPEN, collectors: Sequence[Collector] = (), pipelines: PipelinePages | None = None,
    reload: ReloadPages | None = None, brokers: BrokerPages | None = None,
) -> ASGIApp:  # fmt: skip
    """Return the application with the routes of one broker."""
    sessions = ConsoleSessions(access)
    pages = admin_pages(broker, access, sessions, collectors, pipelines, reload, brokers)
    routes = routes_of(pages, lambda page: _contained(broker, access, sessions, page.role, page.answer))
    app = Starlette(routes=routes, exception_handlers={HTTPException: not_routed})
    app.router.redirect_slashes = False  # the target of a redirect would have the host that the request names
    return SecureHeaders(app, access)


def _contained(broker: AdministeredBroker, access: AdminAccess, sessions: ConsoleSessions, role: AdminRole | None, page: Page) -> Page:
    """Return a page for a role that answers with its errors: the text of a BasculeError, a reference to the log for any other error."""

    async def answer(request: Request) -> Response:
        try:
            if role is not None:
                request.state.principal = await sessions.admit(request, role)
                if (proven := request.scope["state"].get(PROVEN)) is not None:
                    proven()
            return await page(request)
        except (NotLoggedIn, NotAdministrator) as error:
            access.refused(request.scope, error)
            return _answer(error)
        except BasculeError as error:
            return _answer(error)
        except ClientDisconnect:
            return Response()  # the peer is gone
        except Exception as error:
            broker.contain(error, request.scope["path"])
            return _answer(RequestFailed("the broker failed to answer; see the broker's log"))

    return answer


class _Server(uvicorn.Server):
    """An uvicorn server for the connections that a listener of the broker accepts. The process handles its own signals."""

    def __init__(self, config: uvicorn.Config, sockets: Sequence[socket.socket], tls: TlsContext, audit: AuditTrail) -> None:
        super().__init__(config)
        self._sockets = sockets
        self._tls = tls
        self._audit = audit
        self._handshakes: Handshakes | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Accept connections."""
        await self.lifespan.startup()
        handshakes = self._handshakes = Handshakes(admin_http.LIMITS, self._tls, admin_http.connections(self))
        listener = Listener(self._sockets, self._take, name="admin", reserved=RESERVED)
        handshakes.on_room = listener.room
        handshakes.audit = self._audit
        self.servers: list[Any] = [listener]
        listener.start()
        self.started = True

    def _take(self, sock: socket.socket, peer: tuple[Any, ...]) -> bool:
        begun = self._handshakes
        if begun is None:
            return False
        open_connections = cast(set[admin_http.AdminConnection], self.server_state.connections)
        if len(open_connections) + begun.connecting < admin_http.CONNECTIONS_MAX:
            return begun.take(sock, peer)
        return (admin_http.displace_oldest(open_connections) or begun.displace_connecting()) and begun.take(sock, peer)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


class AdminServer:
    """The admin server on the event loop of its broker."""

    def __init__(
        self, broker: AdministeredBroker, *, host: str, port: int, access: AdminAccess = OPEN, tls: TlsContext = no_tls,
        collectors: Sequence[Collector] = (), pipelines: PipelinePages | None = None, reload: ReloadPages | None = None,
        brokers: BrokerPages | None = None,
    ) -> None:  # fmt: skip
        """Bind the port at once (0 = any free port). ``collectors`` have further metrics. Raises PortInUse.

        Without ``pipelines``, the server has no paths about pipelines; without ``reload``, none to reload the settings;
        without ``brokers``, none about the brokers of the journal.
        """
        try:
            sockets = bind(host, port)
            for each in sockets:
                each.listen()
        except OSError as error:
            raise PortInUse(
                f"port {port} for admin on {host} cannot be used ({error.strerror}); choose another with --admin-port"
            ) from error
        self.port: int = sockets[0].getsockname()[1]
        self._sockets = sockets
        self.access = access
        self._app = CurrentApp(lambda access: admin_app(broker, access, collectors, pipelines, reload, brokers), access)
        self._server = _Server(
            admin_http.config(BoundedApp(self._app, admin_http.CONNECTIONS_MAX), STOP_TIMEOUT_S), sockets, tls, access.audit
        )
        self._task: asyncio.Task[None] | None = None

    def admit_by(self, access: AdminAccess) -> None:
        """Admit requests by other settings from now on. The sessions of the console end."""
        self.access = access
        self._app.admit_by(access)

    def start(self) -> None:
        """Start to serve; the event loop must be running."""
        self._task = lasting_task(self._server.serve(), "admin", on_failure=end_process)

    async def stop(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        for each in self._sockets:
            each.close()
