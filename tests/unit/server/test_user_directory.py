"""The users of the settings and of the file, the watch of the file, and the connections that end after a change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bascule.amqp.events import ConnectionClosed
from bascule.amqp.sasl import TokenIdentity
from bascule.config import Settings
from bascule.config.limit import Limit
from bascule.config.users_file import User, Users, UsersFileError, changing, read
from bascule.core.access import AccessRules
from bascule.core.errors import InvalidInput
from bascule.core.permissions import Permission, Unauthorized
from bascule.core.user_limits import UserResource
from bascule.server import users_watch
from bascule.server.node import Node
from bascule.server.user_directory import EndedLogins, UserDirectory, listed_users, weaknesses
from bascule.server.users_watch import UsersWatch, end_connections
from tests.unit.server.served import Client, Served, run_async

SOON_S = 60.0


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(**users: tuple[str, ...]) -> None:
    """Write the file ``users`` with users, their password and roles."""
    with changing(Path("users")) as draft:
        secret = draft.content.secret
        draft.content = Users(secret, {name: User.of(name, password, tuple(roles), 1) for name, (password, *roles) in users.items()})


def settings(rules: list[Any] | None = None, **broker: object) -> Settings:
    return Settings.model_validate({"broker": {"users_file": "users", **broker}, "permission": rules or []})


def test_user_in_settings_and_file_is_an_error_at_start_and_later() -> None:
    write(ann=("x",))
    with pytest.raises(UsersFileError, match=r"users: user 'ann' is also in the settings \(broker\.users\)"):
        UserDirectory(settings(users={"ann": "x"}))
    directory = UserDirectory(settings(users={"bob": "x"}))
    write(ann=("x",), bob=("y",))
    with pytest.raises(UsersFileError, match="user 'bob' is also in the settings"):
        directory.read_again()
    assert directory.check("bob", "x")
    assert directory.check("ann", "x")
    assert not directory.check("bob", "y")


def test_missing_file_is_an_error_at_the_start_of_a_broker() -> None:
    with pytest.raises(UsersFileError, match="users: No such file or directory; `bascule user add` creates it"):
        Node(settings())


def test_directory_that_cannot_keep_the_secret_is_named() -> None:
    Path("file").write_text("")
    with pytest.raises(InvalidInput, match=r"embedded\.data_dir must be a directory that the broker can use"):
        UserDirectory(Settings.model_validate({"broker": {"users": {"ann": "x"}}, "embedded": {"data_dir": "file"}}))


@pytest.mark.parametrize(
    ("before", "after", "ended"),
    [
        (("x",), ("x",), {}),
        (("x",), None, {"ann": EndedLogins("user 'ann' was removed", all_logins=False)}),
        (("x", "sales"), None, {"ann": EndedLogins("user 'ann' was removed", all_logins=True)}),
        (("x",), ("y",), {"ann": EndedLogins("the password of user 'ann' was changed", all_logins=False)}),
        (("x", "sales", "b"), ("x", "b"), {"ann": EndedLogins("user 'ann' has lost the role 'sales'", all_logins=True)}),
        (("x",), ("x", "sales"), {}),
    ],
)
def test_change_names_the_users_whose_connections_end(
    before: tuple[str, ...], after: tuple[str, ...] | None, ended: dict[str, EndedLogins]
) -> None:
    write(ann=before, bob=("y",))
    directory = UserDirectory(settings())
    file = read(Path("users"))
    if after is not None and after[0] == before[0]:
        with changing(Path("users")) as draft:
            draft.content = file.with_user(User("ann", file.users["ann"].verifiers, after[1:]))
    else:
        with changing(Path("users")) as draft:
            draft.content = file.without("ann") if after is None else file.with_user(User.of("ann", *after, iterations=1))  # type: ignore[arg-type]
    found = directory.read_again()
    assert (found or {}) == ended
    assert directory.check("bob", "y")
    assert directory.check("ann", "x") is (after is not None and after[0] == "x")
    assert directory.read_again() is None


def test_roles_of_file_and_settings_add_up_and_follow_the_file() -> None:
    write(ann=("x", "sales"))
    given = settings([{"match": "#", "send": ["sales"], "consume": ["shipping"]}], roles={"shipping": ["ann", "cert"]})
    node = Node(given)
    rules = node.permissions
    assert isinstance(rules.now, AccessRules)
    rules.authorize("ann", Permission.SEND, "a")
    rules.authorize("ann", Permission.CONSUME, "a")
    rules.authorize("cert", Permission.CONSUME, "a")
    write(ann=("x",), bob=("y", "sales"))
    node.users.read_again()
    rules.authorize("bob", Permission.SEND, "a")
    rules.authorize("ann", Permission.CONSUME, "a")
    with pytest.raises(Unauthorized):
        rules.authorize("ann", Permission.SEND, "a")


@run_async
async def test_limits_by_roles_follow_the_file() -> None:
    write(ann=("x", "sales"), bob=("y",))
    node = Node(settings().model_copy(update={"limit": (Limit.model_validate({"roles": ["sales"], "max_links": 5}),)}))

    def links(user: str) -> int:
        return node.usage._limits.of_users.of(user, UserResource.LINKS).most

    default = node.settings.broker.max_links_per_user
    assert (links("ann"), links("bob")) == (5, default)
    write(ann=("x",), bob=("y", "sales"))
    ended = node.users.read_again()
    assert ended is not None
    node._users_changed(ended)
    assert (links("ann"), links("bob")) == (default, 5)


def test_list_has_all_users_with_their_roles_from_both_places() -> None:
    write(carl=("x", "sales"))
    found = listed_users(settings(users={"ann": "x"}, roles={"shipping": ["carl", "ann"]}))
    assert [tuple(user) for user in found] == [
        ("ann", ("shipping",), "broker.users", None), ("carl", ("sales", "shipping"), "users", 1)
    ]  # fmt: skip


def test_weaknesses_are_a_role_without_users_and_a_file_that_others_may_read() -> None:
    write(ann=("x", "sales"))
    given = settings([{"match": "a.#", "send": ["sales", "salez"]}])
    assert weaknesses(given) == ["permission[\"a.#\"].send: there is no role 'salez'; known are sales"]
    Path("users").chmod(0o644)
    assert "mode should be 0600" in weaknesses(given)[0]
    assert weaknesses(Settings()) == []


def test_user_of_a_pipeline_that_neither_the_settings_nor_the_file_list_is_a_weakness() -> None:
    write(ann=("x", "sales"))

    def given(user: str) -> Settings:
        pipelines = {"ingress": [{"name": "in", "topics": ["t"], "user": user}]}
        return Settings.model_validate({"broker": {"users_file": "users"}, "permission": [{"match": "#"}], **pipelines})

    assert weaknesses(given("ann")) == []
    assert weaknesses(given("bob"))[0].startswith("ingress[\"in\"].user: there is no user 'bob'")


class Watched:
    """A watch of the file ``users``, and what it has reported."""

    def __init__(self) -> None:
        self.directory = UserDirectory(settings())
        self.seen: list[Mapping[str, EndedLogins]] = []
        self.watch = UsersWatch(self.directory, Path("users"), self.seen.append)

    async def sees(self, count: int) -> None:
        deadline_s = time.monotonic() + SOON_S
        while len(self.seen) < count:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)


@run_async
async def test_watch_reads_a_changed_file_and_reports_each_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_watch, "LOOK_S", 0.01)
    write(ann=("x",))
    watched = Watched()
    write(ann=("x",), bob=("y",))
    await watched.sees(1)
    Path("users").touch()  # no change
    write(bob=("y",))
    await watched.sees(2)
    watched.watch.close()
    assert "ann" in watched.seen[-1]
    assert not watched.directory.check("ann", "x")


@run_async
async def test_watch_keeps_the_users_of_a_damaged_or_missing_file_and_logs_each_reason_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(users_watch, "LOOK_S", 0.01)
    write(ann=("x",))
    watched = Watched()
    right = Path("users").read_text()

    async def logged(text: str) -> None:
        deadline_s = time.monotonic() + SOON_S
        while text not in caplog.text:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)

    Path("users").write_text("junk")
    await logged('users not read again, the users before stay reason="users:1: not valid JSON')
    Path("users").unlink()
    await logged("No such file or directory")
    assert watched.directory.check("ann", "x")
    Path("users").write_text(right)
    Path("users").chmod(0o644)
    await logged("other users of the machine may read")
    write(bob=("y",))
    await watched.sees(1)
    watched.watch.close()
    assert caplog.text.count("not valid JSON") == 1
    assert caplog.text.count("No such file") == 1


@run_async
async def test_change_ends_connections_of_its_users_also_those_that_are_about_to_log_in() -> None:
    served = Served()
    by_password, other, by_certificate, by_token = (Client(served, name) for name in ("one", "two", "three", "four"))
    about_to = served.connection()
    about_to.connection_made(by_password.wire)  # type: ignore[arg-type]
    for connection, user, mechanism in (
        (by_password.connection, "ann", "SCRAM-SHA-512"), (other.connection, "bob", "PLAIN"),
        (by_certificate.connection, "ann", "EXTERNAL"), (about_to, "ann", "PLAIN"), (by_token.connection, "ann", "PLAIN"),
    ):  # fmt: skip
        connection.sasl.mechanism = mechanism
        connection.sasl.user = user
    by_token.connection.sasl.identity = TokenIdentity("ann", frozenset(), time.time() + 60)
    about_to.sasl.user, about_to.sasl._chosen = None, type("Chosen", (), {"user": "ann"})()

    def end(*, all_logins: bool) -> None:
        served.client_turns.in_slices(
            end_connections(served.connections, {"ann": EndedLogins("ann was removed", all_logins)}), served.dispatch
        )
        for client in (by_password, other, by_certificate, by_token):
            client.run()

    end(all_logins=False)
    assert [str(event.error) for event in by_password.events_of(ConnectionClosed)] == ["amqp:connection:forced: ann was removed"]
    assert about_to.client.ended
    assert not other.events_of(ConnectionClosed)
    assert not by_certificate.events_of(ConnectionClosed)
    assert not by_token.events_of(ConnectionClosed)
    end(all_logins=True)
    assert by_certificate.events_of(ConnectionClosed)
    assert by_token.events_of(ConnectionClosed)
    assert not other.events_of(ConnectionClosed)
