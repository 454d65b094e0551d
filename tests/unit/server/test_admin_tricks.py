"""The table of roles holds for every form of a request: each path with each role, and tricks with paths, methods, headers and hosts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
from starlette.responses import PlainTextResponse

from bascule.server.admin import admin_app
from bascule.server.admin_access import SECURITY_HEADERS, AdminRole
from bascule.server.admin_app import AdminPage, BoundedApp
from tests.support import api_page
from tests.support.http_tricks import IGNORED_HEADERS, METHODS, NOT_HTTP, PATHS, TRICKS, Effect, Trick, head
from tests.unit.server.test_admin import Broker, served
from tests.unit.server.test_pipelines import ACCESS

ROLES: dict[str, int] = {"": 0, **{role.word: role for role in AdminRole}}
PAGES = api_page.all_pages()
#: Statuses of the effects that do not depend on the role. The HTTP server itself answers 400 to some.
STATUSES = {Effect.NO_PAGE: {404, 405}, Effect.MALFORMED: {400}, Effect.FOREIGN: {400, 403, 421}}
#: A page for each role, and one with a name in its path. All tricks are tried with them, and those with paths and methods with all pages.
REPRESENTATIVE = {
    ("GET", "/livez"), ("GET", "/status"), ("POST", "/queues/purge"), ("POST", "/connections/close"), ("GET", "/diverts/{name}"),
}  # fmt: skip
#: All headers that change nothing, apart from second ones of the same name.
ALL_IGNORED = tuple({each.headers[0].partition(b":")[0]: each.headers[0] for each in IGNORED_HEADERS}.values())
#: Pages that are asked over a socket.
OVER_HTTP = {("GET", "/status"), ("POST", "/queues/purge")}


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def target_of(page: AdminPage) -> bytes:
    return page.path.replace("{name}", "n").replace("{partition}", "0").replace("{offset}", "0").encode()


def page_of(method: str, raw: bytes) -> AdminPage | None:
    """Return the page that a request names: its segments, decoded once, are those of the path."""
    segments = unquote(raw.partition(b"?")[0].decode()).split("/")
    for page in PAGES:
        wanted = page.path.split("/")
        if page.method in (method, "GET" if method == "HEAD" else "") and len(wanted) == len(segments):
            pairs = zip(wanted, segments, strict=True)
            if all(segment == word or (word.startswith("{") and segment and "\n" not in segment) for word, segment in pairs):
                return page
    return None


def expected(page: AdminPage | None, trick: Trick, role: str, answered: int) -> set[int]:
    """Return the right statuses. ``answered``: that of the page for the same role without the trick."""
    if trick.effect in (Effect.MALFORMED, Effect.FOREIGN):
        return STATUSES[trick.effect]
    if page is None:
        return STATUSES[Effect.NO_PAGE]
    needed = page.role or 0
    if ROLES[role] < needed:
        return {403 if role else 401}
    return {answered} if trick.effect is Effect.NONE else set(range(200, 600)) - {401, 403}


def fields_of(trick: Trick, role: str) -> list[bytes]:
    """Return the headers of a request with a role."""
    repeats = any(field.lower().startswith(b"authorization:") for field in trick.headers)
    return [*([f"Authorization: Bearer {role}".encode()] if role and not repeats else []), *trick.headers]


async def asked(app: Any, method: str, raw: bytes, fields: list[bytes], peer: str = "127.0.0.1") -> Reply:
    """Ask the application as the HTTP server does."""
    path, _, query = raw.partition(b"?")
    headers = [
        (name.lower(), value.strip()) for field in fields for name, _, value in (line.partition(b":") for line in field.split(b"\r\n"))
    ]
    scope = {
        "type": "http", "method": method, "path": unquote(path.decode()), "raw_path": path, "query_string": query, "scheme": "http",
        "headers": headers, "client": (peer, 1), "server": ("127.0.0.1", 8672), "state": {}, "http_version": "1.1",
    }  # fmt: skip
    reply: dict[str, Any] = {"body": b""}

    body = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(body, None) or await asyncio.Event().wait()  # type: ignore[return-value]  # the peer stays

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.update(status=message["status"], headers={name.decode(): value.decode() for name, value in message["headers"]})
        else:
            reply["body"] += message.get("body", b"")

    await app(scope, receive, send)
    return Reply(reply["status"], reply["headers"], reply["body"])


def of_application(trick: Trick) -> bool:
    """Return whether the application sees what the trick changes; the HTTP server refuses the others itself."""
    return not any(field.lower().startswith(b"content-length") for field in trick.headers)


def tricks_for(page: AdminPage, role: str) -> Iterator[Trick]:
    """Yield the tricks to try with a page."""
    yield Trick("all ignored headers", Effect.NONE, headers=ALL_IGNORED)
    if (page.method, page.path) in REPRESENTATIVE:
        yield from filter(of_application, TRICKS)
    elif role in ("", "manage"):
        yield from (*PATHS, *METHODS)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role or "no role")
def test_roles_of_the_table_hold_for_every_form_of_a_request(role: str) -> None:
    broker = Broker()
    app = admin_app(broker, ACCESS, (), api_page.PIPELINES, api_page.RELOAD, api_page.BROKERS)

    async def ask() -> list[tuple[str, ...]]:
        wrong: list[tuple[str, ...]] = []
        for page in PAGES:
            plain = [b"Host: localhost", *fields_of(Trick("none", Effect.NONE), role)]
            answered = (await asked(app, page.method, target_of(page), plain)).status
            for trick in tricks_for(page, role):
                method, raw = trick.method.decode() or page.method, trick.target(target_of(page))
                fields = [*([] if trick.host is None else [b"Host: " + trick.host]), *fields_of(trick, role)]
                acted, page_asked = len(broker.acted), page_of(method, raw)
                reply = await asked(app, method, raw, fields)
                right = expected(page_asked, trick, role, answered)
                if reply.status not in right or (len(broker.acted) > acted and reply.status >= 400):
                    wrong.append((page.method, page.path, trick.name, str(reply.status), str(right)[:60]))
                if not SECURITY_HEADERS.keys() <= reply.headers.keys() or (reply.status >= 400 and not is_error(reply, method)):
                    wrong.append((page.method, page.path, trick.name, "no error in JSON with secure headers"))
        return wrong

    assert asyncio.run(ask()) == []


def is_error(reply: Reply, method: str) -> bool:
    """Return whether an answer is an error in JSON, as every other error of the server. Health checks answer with text."""
    if method == "HEAD" or (reply.headers.get("content-type", "").startswith("text/plain; charset=utf-8") and reply.status == 503):
        return True
    return reply.headers.get("content-type") == "application/json" and json.loads(reply.body).keys() == {"error"}


@pytest.mark.parametrize("trick", [each for each in PATHS if each.effect is Effect.NO_PAGE], ids=lambda trick: trick.name)
def test_trick_with_a_path_names_no_page_except_by_a_name_in_the_path(trick: Trick) -> None:
    found = [page_of(page.method, trick.target(target_of(page))) for page in PAGES]
    assert all(page is None or page.path.endswith("}") for page in found)


async def said_to(port: int, said: bytes) -> Reply:
    """Send bytes, and return the answer. The server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    first, _, body = answer.partition(b"\r\n\r\n")
    line, *fields = first.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    return Reply(int(line.split()[1]), headers, body)


def requests(pages: list[AdminPage]) -> Iterator[tuple[AdminPage, Trick, str, str, bytes]]:
    for page in pages:
        for trick in TRICKS:
            for role in ("", "manage"):
                method, raw = trick.method.decode() or page.method, trick.target(target_of(page))
                length = 2 if page.method == "POST" else None
                said = head(method.encode(), raw, *fields_of(trick, role), b"Connection: close", host=trick.host, length=length)
                yield page, trick, role, method, said + (b"{}" if length else b"")


def test_roles_of_the_table_hold_for_every_form_of_a_request_over_http() -> None:
    wrong: list[tuple[object, ...]] = []
    broker = Broker()

    async def ask_all(port: int) -> None:
        for page, trick, role, method, said in requests([page for page in PAGES if (page.method, page.path) in OVER_HTTP]):
            raw = said.split(b" ", 2)[1]
            page_asked = page_of(method, raw)
            reply = await said_to(port, said)
            answered = reply.status if reply.status not in (401, 403, 404, 405, 421) else 0
            if reply.status not in expected(page_asked, trick, role, answered):
                wrong.append((page.path, trick.name, role, reply.status))
            if not SECURITY_HEADERS.keys() <= reply.headers.keys() or (reply.status >= 400 and not is_error(reply, method)):
                wrong.append((page.path, trick.name, role, reply))

    served(
        broker,
        lambda port: asyncio.run(ask_all(port)),
        access=ACCESS,
        pipelines=api_page.PIPELINES,
        reload=api_page.RELOAD,
        brokers=api_page.BROKERS,
    )
    assert wrong == []


@pytest.mark.parametrize("said", NOT_HTTP, ids=lambda said: repr(said[:40]))
def test_bytes_that_are_not_http_get_an_error_in_json(said: bytes) -> None:
    found: list[Reply] = []
    served(Broker(), lambda port: found.append(asyncio.run(said_to(port, said))))
    (reply,) = found
    assert (reply.status, list(json.loads(reply.body))) == (400, ["error"])
    assert SECURITY_HEADERS.keys() <= reply.headers.keys()


def test_requests_beyond_the_limit_are_refused_in_json_until_others_are_answered() -> None:
    async def check() -> None:
        answers, started = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            started.set()
            await answers.wait()
            await PlainTextResponse("ok")(scope, receive, send)

        app = BoundedApp(slow, 1)
        first = asyncio.create_task(asked(app, "GET", b"/livez", []))
        await started.wait()
        refused = await asked(app, "GET", b"/livez", [])
        assert (refused.status, is_error(refused, "GET")) == (503, True)
        assert SECURITY_HEADERS.keys() <= refused.headers.keys()
        answers.set()
        assert (await first).status == 200
        assert (await asked(app, "GET", b"/livez", [])).status == 200

    asyncio.run(check())


def test_view_token_without_tls_reads_the_metrics_alone_whatever_the_host_header_says() -> None:
    app = admin_app(Broker(), ACCESS)
    fields = [b"Authorization: Bearer view"]

    async def codes() -> list[int]:
        hosts = (b"127.0.0.1", b"127.0.0.1/metrics", b"127.0.0.1:80/metrics?", b"127.0.0.1/metrics#")
        return [(await asked(app, "GET", b"/status", [b"Host: " + host, *fields], peer="192.0.2.1")).status for host in hosts]

    assert asyncio.run(codes()) == [403, 421, 421, 421]
