"""Hostile requests to an admin server with users, tokens and a provider of tokens: without a role, nobody sees or changes anything."""

from __future__ import annotations

import base64
import os
import random
from pathlib import Path

import pytest

from bascule.server.admin_access import AdminAccess
from bascule.server.admin_logins import admin_access
from bascule.server.login_delays import LoginDelays
from bascule.server.logins import LoginChecks
from bascule.server.user_directory import UserDirectory
from tests.property.guarded import NOBODY, settings_of
from tests.property.test_hostile_http import ask, judge, serve
from tests.support.hostile_http import HostileHttp
from tests.support.hostile_login import USERS, HostileTokens
from tests.support.provider import Provider, known_tokens
from tests.unit.server.test_administrator import Node

SEEDS_OF_ONE_TEST = 200
#: Paths that need no role.
PUBLIC = (b"/livez", b"/readyz")


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay no logins: the tests fail thousands of times. Delays have tests of their own."""
    monkeypatch.setattr(LoginDelays, "delay_s", lambda *_: 0.0)


@pytest.fixture
def access(provider: Provider, tmp_path: Path) -> AdminAccess:
    settings = settings_of(provider, tmp_path)
    return admin_access(settings, UserDirectory(settings), LoginChecks(known_tokens(provider, settings.broker.oidc)))


class Credentials:
    """A random choice of credentials without a role by a seed: valid, wrong and malformed ones."""

    def __init__(self, seed: int, provider: Provider) -> None:
        self._random = random.Random(seed)
        self._tokens = HostileTokens(seed, provider)

    def header(self) -> bytes:
        choose = self._random.choice
        token = self._tokens.token().encode(errors="surrogatepass").replace(b"\n", b"").replace(b"\r", b"")
        basic = base64.b64encode(
            choose((NOBODY.encode() + b":knows", choose(USERS) + b":" + choose((b"", b"wrong", token)), b"x", b"\xff:\xff"))
        )
        return choose((
            b"", b"Bearer " + token, b"bearer  " + token, b"Bearer", b"Bearer eyJ", b"Basic " + basic, b"Basic !", b"Basic " + b"A" * 9_000,
            b"Digest x", b"Bearer " + base64.b64encode(token[:3_000]), b"\xff", b"Bearer \xff\xfe",
            b"Basic " + basic + b", Bearer " + token,
        ))  # fmt: skip


def with_header(request: bytes, header: bytes) -> bytes:
    """Return a request with credentials, unless it is no HTTP."""
    first, end, rest = request.partition(b"\r\n")
    return first + end + b"Authorization: " + header + end + rest if end and b" HTTP/1.1" in first else request


def ask_all(access: AdminAccess, provider: Provider, first: int, count: int) -> None:
    async def work(node: Node, port: int) -> None:
        before = {queue.name: queue.held_messages for queue in node.engine.addresses.queues.values()}
        for seed in range(first, first + count):
            said = with_header(HostileHttp(seed).request(), Credentials(seed, provider).header())
            await judge(port, said)
            answer = await ask(port, said)
            public = any(path in said.partition(b"\r\n")[0] for path in PUBLIC)
            assert public or not answer.startswith(b"HTTP/1.1 200"), said[:300]
        assert {queue.name: queue.held_messages for queue in node.engine.addresses.queues.values()} == before

    serve(work, access)


def test_hostile_request_without_a_role_is_refused_cheaply_and_changes_nothing(access: AdminAccess, provider: Provider) -> None:
    ask_all(access, provider, 0, SEEDS_OF_ONE_TEST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_hostile_requests_without_a_role_change_nothing(access: AdminAccess, provider: Provider) -> None:
    """BASCULE_HOSTILE_SEEDS is the number of seeds, BASCULE_HOSTILE_FIRST the first of them."""
    ask_all(access, provider, int(os.environ.get("BASCULE_HOSTILE_FIRST", "10000")), int(os.environ.get("BASCULE_HOSTILE_SEEDS", "5000")))
