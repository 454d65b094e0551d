"""The mechanisms that the settings offer, the users that each of them knows, and the checks of passwords."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bascule.amqp.channel_binding import TLS_SERVER_END_POINT
from bascule.amqp.sasl import AnonymousClient, ClientMechanism, PlainClient, QuickCheck, SaslClient, SaslServer
from bascule.amqp.scram import ScramClient
from bascule.amqp.verifiers import SCRAM_SHA_256, SCRAM_SHA_512, Verifier
from bascule.config import Settings
from bascule.config.users_file import User, changing
from bascule.server import logins
from bascule.server.admin_logins import admin_access
from bascule.server.listener_tls import TlsPeer
from bascule.server.login_delays import FREE_FAILURES
from bascule.server.logins import LoginChecks, sasl_mechanisms
from bascule.server.user_directory import ITERATIONS, UserDirectory
from tests.unit.amqp.pair import Pair
from tests.unit.server.served import run_async

HASH = str(Verifier.of("hush", b"salt", 1000))
NO_TLS = TlsPeer()
BOTH = [SCRAM_SHA_512, SCRAM_SHA_256]
CLIENTS = {
    "PLAIN": PlainClient,
    SCRAM_SHA_256: partial(ScramClient, nonce="nonce"),
    SCRAM_SHA_512: partial(ScramClient, nonce="nonce", name=SCRAM_SHA_512),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    """Return a file with the user ``carl``."""
    with changing(tmp_path / "users") as draft:
        draft.content = draft.content.with_user(User.of("carl", "of carl", ("sales",), ITERATIONS))
    return tmp_path / "users"


def offered(peer: TlsPeer = NO_TLS, **broker: object) -> SaslServer:
    settings = Settings.model_validate({"broker": broker})
    return SaslServer(sasl_mechanisms(settings.broker, UserDirectory(settings))(peer))


def logged_in(server: SaslServer, *clients: ClientMechanism) -> str | None:
    return Pair(sasl=server, client_sasl=SaslClient(clients), require_sasl=True).run().server.user


@pytest.mark.parametrize("mechanism", CLIENTS)
def test_user_logs_in_by_each_mechanism_with_a_password_of_the_settings_or_of_the_file(mechanism: str, users_file: Path) -> None:
    server = partial(offered, users={"ann": "hush"}, users_file=users_file)
    make = CLIENTS[mechanism]
    assert logged_in(server(), make("ann", "hush")) == "ann"
    assert logged_in(server(), make("carl", "of carl")) == "carl"
    for user, password in (("ann", "of carl"), ("carl", "hush"), ("carl", ""), ("nobody", "hush"), ("", "")):
        assert logged_in(server(), make(user, password)) is None


@pytest.mark.parametrize("mechanism", ["PLAIN", SCRAM_SHA_256])
def test_user_with_a_hash_in_the_settings_logs_in(mechanism: str) -> None:
    assert logged_in(offered(users={"ann": HASH}), CLIENTS[mechanism]("ann", "hush")) == "ann"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["ANONYMOUS"]),
        ({"users": {"ann": "x"}}, [*BOTH, "PLAIN"]),
        ({"users": {"ann": "x", "bob": HASH}}, [SCRAM_SHA_256, "PLAIN"]),
        ({"users": {"ann": "x"}, "allow_anonymous": True}, [*BOTH, "PLAIN", "ANONYMOUS"]),
        ({"users": {"ann": "x"}, "host": "0.0.0.0", "allow_insecure": True}, [*BOTH, "PLAIN"]),
        ({"host": "0.0.0.0", "tls": {"certificate": "c", "client_ca": "a"}, "allow_insecure": True}, []),
    ],
)
def test_the_safest_mechanism_is_first_and_each_one_works_for_all_users(settings: dict[str, object], names: list[str]) -> None:
    assert list(offered(**settings)._mechanisms) == names


def test_variants_with_channel_binding_come_first_where_the_connection_has_one() -> None:
    bound = TlsPeer("carl", {TLS_SERVER_END_POINT: b"x"})
    plus = [f"{each}-PLUS" for each in BOTH]
    assert list(offered(bound, users={"ann": "x"})._mechanisms) == ["EXTERNAL", *plus, *BOTH, "PLAIN"]
    assert list(offered(bound, users={"ann": HASH})._mechanisms) == ["EXTERNAL", plus[1], SCRAM_SHA_256, "PLAIN"]


def test_plain_is_not_offered_where_the_password_could_be_read_on_the_network(users_file: Path) -> None:
    settings = Settings.model_validate({"broker": {"users_file": users_file}})
    exposed = settings.broker.model_copy(update={"host": "0.0.0.0"})
    assert list(sasl_mechanisms(exposed, UserDirectory(settings))(TlsPeer())) == BOTH


def test_login_with_password_hash_as_password_is_refused() -> None:
    for client in (PlainClient("ann", HASH), ScramClient("ann", HASH, "nonce"), AnonymousClient()):
        assert logged_in(offered(users={"ann": HASH}), client) is None


@pytest.mark.parametrize("mechanism", BOTH)
def test_challenge_for_each_user_is_the_same_after_a_restart(mechanism: str, users_file: Path) -> None:
    """Otherwise a changed salt shows whether a user exists."""

    def challenges(**broker: object) -> list[bytes]:
        found = []
        for user in ("ann", "carl", "nobody"):
            exchange = offered(users={"ann": "hush"}, **broker)._mechanisms[mechanism]()
            challenge = exchange.step(f"n,,n={user},r=c".encode())
            assert isinstance(challenge, bytes)
            found.append(challenge.partition(b",")[2])
        return found

    for broker in ({}, {"users_file": users_file}):
        assert challenges(**broker) == challenges(**broker)
        assert len({len(challenge) for challenge in challenges(**broker)}) == 1
    assert Path("bascule-data/login-secret").stat().st_mode & 0o777 == 0o600


ADDRESS = "192.0.2.1"


@run_async
async def test_delayed_check_runs_after_its_delay_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.server.login_delays.FIRST_DELAY_S", 2.0)
    checks, begun_s, ended_s = LoginChecks(), time.monotonic(), {}
    for _ in range(FREE_FAILURES):
        assert not await checks.check(QuickCheck(lambda: False), "ann", ADDRESS)

    async def login(user: str, slow: bool) -> None:
        assert await checks.check((lambda: True) if slow else QuickCheck(lambda: True), user, ADDRESS)
        ended_s[user] = time.monotonic() - begun_s

    await asyncio.gather(login("ann", slow=True), login("bob", slow=True), login("carl", slow=False))
    assert ended_s["ann"] >= 2.0
    assert max(ended_s["bob"], ended_s["carl"]) < ended_s["ann"]
    assert (checks.failed, checks.delayed, checks.refused) == (FREE_FAILURES, 1, 0)


@run_async
async def test_check_that_would_wait_too_long_is_refused_and_not_made(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bascule.server.login_delays.DELAY_S_MAX", 3.0)
    monkeypatch.setattr("bascule.server.login_delays.FIRST_DELAY_S", 2.0)
    checks, made = LoginChecks(), []
    for _ in range(FREE_FAILURES):
        await checks.check(lambda: False, "ann", ADDRESS)
    results = await asyncio.gather(*(checks.check(lambda: not made.append(1), "ann", ADDRESS) for _ in range(3)))
    assert (results, len(made), checks.refused) == ([True, False, False], 1, 2)
    assert [record.getMessage() for record in caplog.records] == [
        f"logins delayed after failures user=ann address={ADDRESS} of_pair={FREE_FAILURES} of_address={FREE_FAILURES}"
        f" of_user={FREE_FAILURES}"
    ]


@run_async
async def test_quick_check_does_not_wait_behind_a_slow_one() -> None:
    checks, go_on = LoginChecks(), threading.Event()
    slow = asyncio.create_task(checks.check(lambda: go_on.wait(60), "ann", ADDRESS))
    assert await checks.check(QuickCheck(lambda: True), "bob", ADDRESS)
    assert not slow.done()
    go_on.set()
    assert await slow


@run_async
async def test_peer_that_leaves_before_its_turn_leaves_no_check_behind_and_a_check_that_has_begun_counts() -> None:
    checks, begun, go_on, made = LoginChecks(), threading.Event(), threading.Event(), list[str]()

    def guess(user: str) -> bool:
        made.append(user)
        begun.set()
        return not go_on.wait(60)

    peers = [asyncio.create_task(checks.check(partial(guess, user), user, ADDRESS)) for user in ("first", "second", "third")]
    assert await asyncio.to_thread(begun.wait, 60)
    for peer in peers:
        peer.cancel()
    await asyncio.gather(*peers, return_exceptions=True)
    go_on.set()
    assert await checks.check(lambda: True, "ann", ADDRESS)
    assert (made, checks.failed) == (["first"], 1)


@pytest.mark.parametrize("quick", [True, False])
@run_async
async def test_check_that_fails_with_an_error_refuses_the_login(quick: bool, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise RuntimeError("injected")

    check: Callable[[], bool] = QuickCheck(fail) if quick else fail
    assert not await LoginChecks().check(check, "ann", ADDRESS)
    assert "login check failed" in caplog.text
    assert logins.CHECKS_AT_ONCE == 1


@run_async
async def test_failures_at_the_admin_port_delay_logins_of_clients(tmp_path: Path) -> None:
    settings = Settings.model_validate({"broker": {"users": {"ann": "hush"}}, "embedded": {"data_dir": tmp_path}})
    users, checks = UserDirectory(settings), LoginChecks()
    access = admin_access(settings, users, checks)
    for _ in range(FREE_FAILURES):
        assert not await access.check("ann", "guess", "192.0.2.1")
    assert checks.delayed == 0
    assert await checks.check(partial(users.check, "ann", "hush"), "ann", "192.0.2.1")
    assert checks.delayed == 1
