"""Who may use the admin server: each path with each role over HTTP, credentials, and requests of foreign web pages."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from bascule.config import Settings
from bascule.config.audit import Audit as AuditSettings
from bascule.config.load import ConfigError, load
from bascule.core.defaults import OWNER_TOKEN_FILE
from bascule.server.admin import AdminPath, admin_app, admin_paths
from bascule.server.admin_access import OPEN, SECURITY_HEADERS, AdminAccess, AdminRole, ForeignHost, NotAdministrator
from bascule.server.admin_logins import admin_access
from bascule.server.audit import audit_of
from bascule.server.login_delays import LoginDelays
from bascule.server.logins import LoginChecks
from bascule.server.user_directory import UserDirectory
from tests.support.provider import Provider, SigningKey, known_tokens
from tests.unit.server.test_admin import Broker, served

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "operations.md"
USERS = {"viewer": "v", "editor": "e", "manager": "m", "nobody": "n"}
SETTINGS: dict[str, Any] = {
    "broker": {
        "users": USERS,
        "roles": {"looks": ["viewer"], "changes": ["editor"], "acts": ["manager"], "sends": ["nobody"]},
    },
    "admin": {
        "token": "manage-token", "edit_token": "edit-token", "view_token": "view-token",
        "view": ["looks"], "edit": ["changes"], "manage": ["acts"],
    },
}  # fmt: skip


def settings(directory: Path, **changes: Any) -> Settings:
    return Settings.model_validate({**SETTINGS, "embedded": {"data_dir": directory}, **changes})


def access_of(chosen: Settings) -> AdminAccess:
    return admin_access(chosen, UserDirectory(chosen), LoginChecks())


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay no logins: the tests send hundreds of wrong passwords. Delays have tests of their own."""
    monkeypatch.setattr(LoginDelays, "delay_s", lambda *_: 0.0)


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


#: Credentials of a request -> the role that they have, or the status of every request with them.
CREDENTIALS: dict[str, AdminRole | int] = {
    "": 401,
    "Bearer guess": 401,
    "Bearer": 401,
    "Digest x": 401,
    "Basic !": 401,
    "Basic " + base64.b64encode(b"no colon").decode(): 401,
    "Basic " + base64.b64encode(b"\xff:\xff").decode(): 401,
    basic("manager", "wrong"): 401,
    basic("unknown", "m"): 401,
    basic("nobody", "n"): 403,
    "Bearer view-token": AdminRole.VIEW,
    "Bearer edit-token": AdminRole.EDIT,
    "bearer manage-token": AdminRole.MANAGE,
    basic("viewer", "v"): AdminRole.VIEW,
    basic("editor", "e"): AdminRole.EDIT,
    basic("manager", "m"): AdminRole.MANAGE,
}


def send(port: int, method: str, path: str, headers: Mapping[str, str], body: str | None = None) -> tuple[int, dict[str, list[str]], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        found: dict[str, list[str]] = {}
        for name, value in answer.getheaders():
            found.setdefault(name.lower(), []).append(value)
        return answer.status, found, answer.read().decode()
    finally:
        connection.close()


def expected(path: AdminPath, given: AdminRole | int) -> int:
    if path.role is None:
        return 200
    if isinstance(given, int) and not isinstance(given, AdminRole):
        return given
    return 200 if given >= path.role else 403


@pytest.mark.parametrize("public_metrics", [False, True])
def test_each_path_answers_exactly_the_credentials_that_have_its_role(tmp_path: Path, public_metrics: bool) -> None:
    chosen = settings(tmp_path, admin={**SETTINGS["admin"], "public_metrics": public_metrics})
    access, broker = access_of(chosen), Broker()
    found, wanted = {}, {}

    def ask(port: int) -> None:
        for path in admin_paths(access):
            for credentials, role in CREDENTIALS.items():
                headers = {"authorization": credentials} if credentials else {}
                body = "{}" if path.method == "POST" else None
                acted = len(broker.acted)
                code, answered, _ = send(port, path.method, path.path, headers, body)
                found[path.path, credentials] = code, len(broker.acted) - acted, "www-authenticate" in answered
                code = expected(path, role)
                wanted[path.path, credentials] = code, int(code == 200 and path.method == "POST"), code == 401

    served(broker, ask, access=access)
    assert found == wanted
    assert len(found) > 200


def test_page_has_the_table_of_paths_and_roles() -> None:
    section = PAGE.read_text().split("## Decide who may use the admin server")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(GET|POST) (/\S+)` \| (.+?) \|$", section, re.MULTILINE)
    wanted = [(each.method, each.path, "none" if each.role is None else f"`{each.role.word}`") for each in admin_paths(OPEN)]
    assert rows == wanted


def test_without_users_and_tokens_this_machine_has_the_role_manage_and_others_have_none() -> None:
    codes: set[int] = set()

    def ask(port: int) -> None:
        codes.update(send(port, path.method, path.path, {}, "{}" if path.method == "POST" else None)[0] for path in admin_paths(OPEN))

    served(Broker(), ask)
    assert codes == {200}


@pytest.mark.parametrize(
    "changes",
    [
        {"broker": {"users": {"ann": "a"}}, "admin": {}},
        {"broker": {}, "admin": {"view_token": "t"}},
        {"broker": {"tls": {"certificate": "c", "client_ca": "ca"}}, "admin": {}},
        {"broker": {"oidc": {"issuer": "https://login.example", "audience": ["bascule"]}}, "admin": {}},
    ],
)
def test_with_users_or_tokens_every_path_needs_a_role_and_the_owner_of_the_broker_has_it(changes: Any, tmp_path: Path) -> None:
    access = access_of(settings(tmp_path, **changes))
    file = tmp_path / OWNER_TOKEN_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def ask(port: int) -> None:
        for path in admin_paths(access):
            for headers, code in (({}, 200 if path.role is None else 401), ({"authorization": f"Bearer {file.read_text()}"}, 200)):
                assert send(port, path.method, path.path, headers, "{}" if path.method == "POST" else None)[0] == code

    served(Broker(), ask, access=access)
    first = file.read_text()
    access_of(settings(tmp_path, **changes))
    assert file.read_text() != first, "each start has a token of its own"
    assert not access_of(settings(tmp_path, broker={}, admin={})).restricted
    assert not file.exists()


def test_star_gives_a_role_to_every_user_and_a_user_has_the_highest_of_the_roles(tmp_path: Path) -> None:
    roles = {"view": ["*"], "edit": [], "manage": ["acts"]}
    access = access_of(settings(tmp_path, admin=roles))

    def ask(port: int) -> None:
        assert send(port, "GET", "/status", {"authorization": basic("nobody", "n")})[0] == 200
        assert send(port, "POST", "/ingress/reset", {"authorization": basic("nobody", "n")}, "{}")[0] == 403
        assert send(port, "POST", "/ingress/reset", {"authorization": basic("manager", "m")}, "{}")[0] == 200

    served(Broker(), ask, access=access)


def oidc_settings(provider: Provider, directory: Path) -> Settings:
    oidc = {"issuer": provider.issuer, "audience": ["bascule"], "roles_claim": "roles", "roles": ["looks", "acts"]}
    return settings(directory, broker={**SETTINGS["broker"], "oidc": oidc})


def test_token_of_a_provider_has_the_highest_role_of_the_token_and_its_user(tmp_path: Path) -> None:
    with Provider() as provider:
        chosen = oidc_settings(provider, tmp_path)
        logins = LoginChecks(known_tokens(provider, chosen.broker.oidc))
        audit = audit_of(AuditSettings(file=tmp_path / "audit"), {})
        access = admin_access(chosen, UserDirectory(chosen), logins, audit)
        credentials: dict[str, AdminRole | int] = {
            provider.token(roles=["looks"]): AdminRole.VIEW,
            provider.token(roles=["looks", "acts"]): AdminRole.MANAGE,
            provider.token("editor", roles=["looks"]): AdminRole.EDIT,
            provider.token(roles=["changes"]): 403,  # not in broker.oidc.roles
            provider.token(): 403,
            provider.token(roles=["acts"], exp=1): 401,
            provider.token(roles=["acts"], aud="other"): 401,
            provider.token(roles=["acts"], key=SigningKey("first")): 401,
            provider.token(roles=["acts"], key=SigningKey("second")): 503,
            "eyJ.eyJ.": 401,
            "eyJ" + "x" * 12_000 + "..": 401,
        }
        broker = Broker()

        def ask(port: int) -> None:
            for token, role in credentials.items():
                for path in admin_paths(access):
                    body = "{}" if path.method == "POST" else None
                    code, _, text = send(port, path.method, path.path, {"authorization": f"Bearer {token}"}, body)
                    assert code == expected(path, role), (path, role, text)
            assert send(port, "GET", "/status", {"authorization": "Bearer view-token"})[0] == 200

        served(broker, ask, access=access)
        assert logins.failed > 0
    audit.close()
    found = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert {line["who"] for line in found if "has expired" in line["result"]} == {"ann"}, "the user that the token names"


@pytest.mark.parametrize(("scheme", "peer", "code"), [("http", "192.0.2.1", 403), ("https", "192.0.2.1", 200), ("http", "127.0.0.1", 200)])
def test_a_token_of_a_provider_is_accepted_only_over_tls_or_from_this_machine(tmp_path: Path, scheme: str, peer: str, code: int) -> None:
    with Provider() as provider:
        chosen = oidc_settings(provider, tmp_path)
        access = admin_access(chosen, UserDirectory(chosen), LoginChecks(known_tokens(provider, chosen.broker.oidc)))
        assert asgi_code(access, scheme, peer, f"Bearer {provider.token(roles=['looks'])}") == code


def test_a_role_of_the_admin_server_without_users_is_a_fault_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text('[broker.roles]\nops = ["ann"]\n[admin]\nview = ["opps"]\n')
    with pytest.raises(ConfigError, match="there is no role 'opps'; known are ops"):
        load(file)


@pytest.mark.parametrize("path", ["/livez", "/status", "/nowhere", "/queues/purge"])
def test_every_answer_forbids_caches_frames_and_scripts(path: str) -> None:
    def ask(port: int) -> None:
        _, headers, _ = send(port, "GET", path, {})
        assert {name: headers[name] for name in SECURITY_HEADERS} == {name: [value] for name, value in SECURITY_HEADERS.items()}

    served(Broker(), ask)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "evil.example:8672"}, 421),
        ({"host": "localhost.evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "[::1]:8672"}, 200),
        ({"host": "192.0.2.7"}, 200),
        ({"host": "LOCALHOST"}, 200),
        ({"host": "console.example:8672"}, 200),
        ({"host": "localhost", "origin": "http://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost", "origin": "https://localhost"}, 403),
        ({"host": "localhost:8672", "origin": "http://localhost"}, 403),
        ({"host": "localhost:8672", "origin": "http://localhost:8672"}, 200),
        ({"host": "localhost", "sec-fetch-site": "cross-site"}, 403),
        ({"host": "localhost", "sec-fetch-site": "same-site"}, 403),
        ({"host": "localhost", "sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_requests_of_foreign_web_pages_are_refused(headers: Mapping[str, str], code: int) -> None:
    """A page may point its own host name to this machine, or send requests that its browser completes with a password."""
    broker = Broker()

    def ask(port: int) -> None:
        assert send(port, "POST", "/queues/purge", headers, "{}")[0] == code
        assert send(port, "GET", "/status", headers)[0] == code

    served(broker, ask, access=AdminAccess(hosts=("Console.example",)))
    assert len(broker.acted) == (code == 200)


def test_the_second_of_two_origins_counts() -> None:
    twice = Headers(raw=[(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"origin", b"http://evil.example")])
    with pytest.raises(NotAdministrator):
        OPEN.check_origin(twice, "http")
    with pytest.raises(ForeignHost):
        OPEN.check_origin(Headers({"host": "[evil.example]"}), "http")


@pytest.mark.parametrize(
    ("scheme", "peer", "code"), [("http", "192.0.2.1", 403), ("https", "192.0.2.1", 200), ("http", "127.0.0.1", 200), ("http", "::1", 200)]
)
def test_a_password_is_accepted_only_over_tls_or_from_this_machine(tmp_path: Path, scheme: str, peer: str, code: int) -> None:
    assert asgi_code(access_of(settings(tmp_path)), scheme, peer, basic("viewer", "v")) == code


@pytest.mark.parametrize(
    ("scheme", "peer", "insecure", "codes"),
    [
        ("http", "192.0.2.1", False, (403, 403, 403, 200)),
        ("http", "192.0.2.1", True, (200, 200, 200, 200)),
        ("https", "192.0.2.1", False, (200, 200, 200, 200)),
        ("http", "127.0.0.1", False, (200, 200, 200, 200)),
    ],
)
def test_tokens_of_the_settings_are_accepted_only_over_tls_from_this_machine_or_with_the_accepted_risk(
    tmp_path: Path, scheme: str, peer: str, insecure: bool, codes: tuple[int, ...]
) -> None:
    def asked(role: str, path: str) -> int:
        chosen = settings(tmp_path, broker={**SETTINGS["broker"], "allow_insecure": insecure})
        return asgi_code(access_of(chosen), scheme, peer, f"Bearer {role}-token", path)

    paths = (("view", "/status"), ("manage", "/status"), ("manage", "/metrics"), ("view", "/metrics"))
    assert tuple(asked(*each) for each in paths) == codes


@pytest.mark.parametrize(("peer", "code"), [("192.0.2.1", 403), ("127.0.0.1", 200), ("::1", 200)])
def test_without_users_only_this_machine_is_allowed(peer: str, code: int) -> None:
    assert asgi_code(OPEN, "http", peer, None) == code


def asgi_code(access: AdminAccess, scheme: str, peer: str, credentials: str | None, path: str = "/status") -> int:
    """Return the status of a request from a peer that this machine cannot be."""
    codes: list[int] = []
    headers = [] if credentials is None else [(b"authorization", credentials.encode())]
    scope = {
        "type": "http", "method": "GET", "path": path, "scheme": scheme, "headers": headers, "query_string": b"", "client": (peer, 1),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def answer(message: Any) -> None:
        if message["type"] == "http.response.start":
            codes.append(message["status"])

    asyncio.run(admin_app(Broker(), access)(scope, receive, answer))
    return codes[0]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("[" * 30_000 + "]" * 30_000, "the arguments are nested more than 8 levels deep"),
        ('{"a":' * 12_000, "the arguments are nested more than 8 levels deep"),
        ('{"name": ' + "9" * 5000 + "}", "the arguments are not valid JSON: a number has 5000 characters; at most 19 are allowed"),
        ('{"name": ' + "9" * 5000 + ".0}", "the arguments are not valid JSON: a number has 5002 characters; at most 19 are allowed"),
        ('{"name": "' + "[" * 1000 + '\\"[[[[[[[[[[[["}', None),
    ],
)
def test_depth_and_numbers_of_arguments_are_limited(body: str, error: str | None) -> None:
    def ask(port: int) -> None:
        code, _, text = send(port, "POST", "/queues/purge", {}, body)
        assert (code, json.loads(text).get("error")) == ((200, None) if error is None else (400, error))

    served(Broker(), ask)


def test_a_count_of_5000_digits_is_a_fault_of_the_request() -> None:
    def ask(port: int) -> None:
        code, _, text = send(port, "GET", "/dead-letters?count=" + "9" * 5000, {})
        assert (code, json.loads(text)["error"]) == (400, "count '9999999999999999999 must be a number from 1 to 1000")

    served(Broker(), ask)
