"""The console over HTTP: files, sessions, tokens against forged requests, and the headers of its pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from bascule.server.admin_access import OPEN, AdminAccess, AdminRole, Principal
from bascule.server.console import CONTENT_SECURITY_POLICY, files
from bascule.server.console_sessions import (
    COOKIE,
    IDLE_S,
    LIFE_S,
    SESSIONS_MAX,
    SESSIONS_PER_USER_MAX,
    ConsoleSessions,
    give_cookie,
)
from tests.support.costs import COST_S_MAX, processor_s
from tests.unit.server.served import run_async
from tests.unit.server.test_admin import Broker, served
from tests.unit.server.test_admin_access import access_of, basic, prompt, send, settings

__all__ = ["prompt"]  # a fixture

ANN = Principal("ann", AdminRole.EDIT, is_user=True, password="p")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request_with(secret: str, method: str = "GET", scheme: str = "http", **headers: str) -> Request:
    given = {"cookie": f"{'__Host-' if scheme == 'https' else ''}{COOKIE}={secret}", **headers}
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    return Request({"type": "http", "method": method, "scheme": scheme, "path": "/", "headers": encoded, "client": ("127.0.0.1", 9)})


def sessions_of(**changes: Any) -> tuple[ConsoleSessions, Clock, dict[str, Any]]:
    """Return sessions, their clock, and the role and password of every user, which a test may change."""
    now: dict[str, Any] = {"role": AdminRole.EDIT, "password": "p"}
    access = replace(AdminAccess(), restricted=True, role_of=lambda *_: now["role"], password_of=lambda _: now["password"], **changes)
    clock = Clock()
    return ConsoleSessions(access, now_s=clock, wall_s=clock), clock, now


def cookie_of(answered: Mapping[str, list[str]]) -> str:
    return answered["set-cookie"][0].partition(";")[0]


def logged_in(port: int, credentials: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the cookie of a new session as headers, and what the log-in says."""
    code, answered, text = send(port, "POST", "/console/login", {"authorization": credentials}, "{}")
    assert code == 200, text
    return {"cookie": cookie_of(answered)}, json.loads(text)


@pytest.mark.parametrize("second", ["{0}=x; {0}={1}", "{0}={1}; {0}=x", "{0}={1};{0}={1}", "{0}=;{0}={1}"])
def test_second_cookie_of_the_same_name_leaves_no_session(second: str) -> None:
    """Another server of the host, or another host of the domain, may have set it."""
    sessions, _, _ = sessions_of()
    _, secret = sessions.open(ANN)
    assert sessions.session(request_with("", cookie=f"{COOKIE}={secret}")) is not None
    assert sessions.session(request_with("", cookie=second.format(COOKIE, secret))) is None


def test_cookie_of_thousands_of_backslashes_takes_little_time() -> None:
    sessions, _, _ = sessions_of()
    _, secret = sessions.open(ANN)
    for header in (f'{COOKIE}="' + "\\" * 16_000 + '"', f"{COOKIE}={'=;' * 8_000}"):
        request = request_with("", cookie=header)
        assert processor_s(lambda request=request: sessions.session(request)) < COST_S_MAX  # type: ignore[misc]
    assert sessions.session(request_with(secret, cookie=f"other=1;{COOKIE} = {secret} ; a")) is not None
    assert sessions.session(request_with(secret, cookie=f"x{COOKIE}={secret}")) is None


def test_files_of_the_console_are_served_with_a_strict_policy_and_name_no_other_host() -> None:
    found: dict[str, tuple[int, list[str], str]] = {}

    def ask(port: int) -> None:
        for path in files():
            code, answered, text = send(port, "GET", path, {})
            found[path] = code, answered["content-security-policy"], text
        assert send(port, "GET", "/", {})[:1] == (307,)
        assert send(port, "GET", "/console/none.js", {})[0] == 404
        assert send(port, "GET", "/console/..%2fadmin.py", {})[0] == 404

    served(Broker(), ask)
    assert {"/console/", "/console/app.js", "/console/style.css"} <= found.keys()
    for path, (code, policy, text) in found.items():
        assert (code, policy) == (200, [CONTENT_SECURITY_POLICY]), path
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), f"{path} names a host"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|style=", text), path
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_without_users_everybody_on_this_machine_is_logged_in() -> None:
    def ask(port: int) -> None:
        said = json.loads(send(port, "GET", "/console/session", {})[2])
        assert said == {"name": "local", "role": "manage", "csrf": "", "restricted": False}
        code, answered, text = send(port, "POST", "/console/login", {}, "{}")
        assert (code, json.loads(text), "set-cookie" in answered) == (200, said, False), "no session is needed, nor begun"

    served(Broker(), ask)


def test_session_has_a_strict_cookie_and_its_role_and_changes_need_its_token(tmp_path: Path) -> None:
    broker, body = Broker(), json.dumps({"name": "q"})

    def ask(port: int) -> None:
        _, answered, _ = send(port, "POST", "/console/login", {"authorization": basic("editor", "e")}, "{}")
        (given,) = answered["set-cookie"]
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(given.split("; "))
        cookie, said = {"cookie": cookie_of(answered)}, None
        said = json.loads(send(port, "GET", "/console/session", cookie)[2])
        assert (said["name"], said["role"], said["restricted"]) == ("editor", "edit", True)
        assert send(port, "GET", "/messages", cookie)[0] == 200
        assert send(port, "GET", "/settings", cookie)[0] == 403
        for token in ({}, {"x-csrf-token": ""}, {"x-csrf-token": said["csrf"][:-1]}, {"x-csrf-token": "\xe9"}):
            assert send(port, "POST", "/queues/purge", {**cookie, **token}, body)[0] == 403
            assert send(port, "POST", "/console/logout", {**cookie, **token}, "{}")[0] == 403
        assert broker.acted == []
        good = {**cookie, "x-csrf-token": said["csrf"]}
        assert send(port, "POST", "/queues/purge", good, body)[0] == 200
        assert send(port, "POST", "/branches/forget", good, json.dumps({"xid": "x"}))[0] == 403
        assert send(port, "POST", "/queues/purge", {**good, "origin": "http://evil.example"}, body)[0] == 403
        assert send(port, "POST", "/queues/purge", {**good, "sec-fetch-site": "cross-site"}, body)[0] == 403
        assert len(broker.acted) == 1
        assert send(port, "POST", "/console/logout", good, "{}")[0] == 200
        assert send(port, "GET", "/messages", cookie)[0] == 401
        assert send(port, "POST", "/console/logout", good, "{}")[0] == 401
        assert json.loads(send(port, "GET", "/console/session", cookie)[2])["name"] is None

    served(broker, ask, access=access_of(settings(tmp_path)))


def test_every_log_in_has_the_checks_of_credentials_and_the_console_gets_no_challenge(tmp_path: Path) -> None:
    def ask(port: int) -> None:
        for credentials, code in (("", 401), (basic("editor", "wrong"), 401), (basic("nobody", "n"), 403), ("Bearer guess", 401)):
            for mine in ({}, {"x-bascule-console": "1"}):
                headers = {**mine, **({"authorization": credentials} if credentials else {})}
                got, answered, _ = send(port, "POST", "/console/login", headers, "{}")
                assert (got, "set-cookie" in answered) == (code, False)
                assert ("www-authenticate" in answered) == (code == 401 and not mine)
        cookie, said = logged_in(port, "Bearer manage-token")
        assert (said["name"], said["role"]) == ("admin.token", "manage")
        for headers in (cookie, {**cookie, "x-csrf-token": said["csrf"]}):
            assert send(port, "POST", "/console/login", headers, "{}")[0] == 401, "a session begins no other"

    served(Broker(), ask, access=access_of(settings(tmp_path)))


def test_link_from_another_site_opens_the_console_and_nothing_else() -> None:
    def ask(port: int) -> None:
        linked = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document", "sec-fetch-mode": "navigate"}
        assert send(port, "GET", "/console/", linked)[0] == 200
        code, headers, _ = send(port, "GET", "/console", linked)
        assert (code, headers["location"]) == (307, ["/console/"])
        assert send(port, "GET", "/", linked)[0] == 307
        for path, headers in (("/status", linked), ("/console/app.js", linked), ("/console/", {**linked, "sec-fetch-dest": "iframe"})):
            assert send(port, "GET", path, headers)[0] == 403
        assert send(port, "GET", "/console/", {**linked, "host": "evil.example"})[0] == 421

    served(Broker(), ask)


@pytest.mark.parametrize(
    ("idle_s", "valid"), [(IDLE_S - 1, True), (IDLE_S, False)],
)  # fmt: skip
def test_session_ends_after_a_time_without_requests(idle_s: float, valid: bool) -> None:
    sessions, clock, _ = sessions_of()
    _, secret = sessions.open(ANN)
    clock.now_s += idle_s
    assert (sessions.session(request_with(secret)) is not None) is valid


def test_session_ends_after_a_day_although_it_is_used() -> None:
    sessions, clock, _ = sessions_of()
    _, secret = sessions.open(ANN)
    used = 0
    while sessions.session(request_with(secret)) is not None:
        clock.now_s += IDLE_S / 2
        used += 1
    assert used == LIFE_S // (IDLE_S / 2)


def lose_role(now: dict[str, Any], _: Clock) -> None:
    now["role"] = None


def change_password(now: dict[str, Any], _: Clock) -> None:
    now["password"] = "another"


def end_token(_: dict[str, Any], clock: Clock) -> None:
    clock.now_s = 150.0


@pytest.mark.parametrize("change", [lose_role, change_password, end_token])
def test_session_ends_with_the_right_to_log_in(change: Callable[[dict[str, Any], Clock], None]) -> None:
    sessions, clock, now = sessions_of()
    _, secret = sessions.open(replace(ANN, until_s=150.0))
    assert sessions.session(request_with(secret)) is not None
    change(now, clock)
    assert sessions.session(request_with(secret)) is None
    now.update(role=AdminRole.EDIT, password="p")
    clock.now_s = 101.0
    assert sessions.session(request_with(secret)) is None, "it does not begin again"


def test_session_has_the_role_that_its_user_has_now() -> None:
    sessions, _, now = sessions_of()
    _, secret = sessions.open(ANN)
    now["role"] = AdminRole.VIEW
    session = sessions.session(request_with(secret))
    assert session is not None
    assert session.principal.role is AdminRole.VIEW


def test_number_of_sessions_is_limited_and_the_oldest_ends_first() -> None:
    sessions, _, _ = sessions_of()
    mine = [sessions.open(ANN)[1] for _ in range(SESSIONS_PER_USER_MAX + 2)]
    assert [sessions.session(request_with(each)) is not None for each in mine] == [False] * 2 + [True] * SESSIONS_PER_USER_MAX
    for number in range(SESSIONS_MAX - 1):
        sessions.open(replace(ANN, name=f"user-{number}"))
    valid = [sessions.session(request_with(each)) is not None for each in mine]
    assert valid == [False] * (SESSIONS_PER_USER_MAX + 1) + [True]


def test_cookie_of_plain_http_is_none_of_https() -> None:
    sessions, _, _ = sessions_of()
    _, secret = sessions.open(ANN)
    assert sessions.session(request_with(secret, scheme="https")) is not None
    request = request_with(secret)
    request.scope["scheme"] = "https"
    assert sessions.session(request) is None


def test_certified_user_without_password_who_is_removed_has_no_session() -> None:
    known = {"ann"}
    sessions, _, now = sessions_of(knows=known.__contains__)
    now["password"] = None
    _, secret = sessions.open(replace(ANN, password=None, certified=True))
    assert sessions.session(request_with(secret)) is not None
    known.clear()
    assert sessions.session(request_with(secret)) is None, "although everybody may have the role"


@run_async
async def test_session_ends_if_the_password_changes_while_it_is_checked() -> None:
    now = {"password": "old"}

    async def check(*_: str) -> bool:
        now["password"] = "new"  # as if the file of users was read again
        return True

    access = AdminAccess(
        restricted=True, role_of=lambda *_: AdminRole.EDIT, password_of=lambda _: now["password"], check=check,
    )  # fmt: skip
    sessions = ConsoleSessions(access)
    _, secret = sessions.open(await access.admit(request_with("", authorization=basic("ann", "old")), AdminRole.VIEW))
    assert sessions.session(request_with(secret)) is None


def test_brokers_on_several_ports_of_a_host_have_cookies_of_their_own() -> None:
    sessions, _, _ = sessions_of()
    given: dict[str, str] = {}
    for host in ("a", "a:8672", "a:8673", "[::1]", "[::1]:8672", "a:", "a:x=1;y", "a:\u00b2", "a:123456"):
        response = Response()
        give_cookie(sessions.open(ANN)[1], request_with("", host=host), response)
        given[host] = response.headers["set-cookie"].partition("=")[0]
    own = {"a:8672": f"{COOKIE}-8672", "a:8673": f"{COOKIE}-8673", "[::1]:8672": f"{COOKIE}-8672"}
    assert given == {host: own.get(host, COOKIE) for host in given}


def test_log_in_ends_the_session_that_the_browser_had(tmp_path: Path) -> None:
    def ask(port: int) -> None:
        first, _ = logged_in(port, basic("editor", "e"))
        code, answered, _ = send(port, "POST", "/console/login", {**first, "authorization": basic("viewer", "v")}, "{}")
        assert (code, cookie_of(answered) != first["cookie"]) == (200, True)
        assert json.loads(send(port, "GET", "/console/session", first)[2])["name"] is None
        assert json.loads(send(port, "GET", "/console/session", {"cookie": cookie_of(answered)})[2])["name"] == "viewer"

    served(Broker(), ask, access=access_of(settings(tmp_path)))


def test_open_access_has_no_role_for_a_session() -> None:
    assert not OPEN.restricted
    assert OPEN.password_of("ann") is None
