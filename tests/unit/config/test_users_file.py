"""The file of users: what is refused and why, and how it is written."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bascule.amqp.verifiers import SCRAM_SHA_256, SCRAM_SHA_512, Verifier
from bascule.config import users_file
from bascule.config.user_names import check_name
from bascule.config.users_file import User, Users, UsersFileError, changing, parse, read, stamp
from bascule.core.errors import InvalidInput

ANN, BOB = (User.of(name, f"of {name}", ("sales",), 1) for name in ("ann", "bob"))
TWO = Users(bytes(32)).with_user(ANN).with_user(BOB)


def changed(line: int, change: Callable[[dict[str, object]], object]) -> bytes:
    rows = [json.loads(each) for each in TWO.text().splitlines()]
    change(rows[line - 1])
    return "\n".join(map(json.dumps, rows)).encode()


WEAK = str(Verifier.of("x", b"salt", 1))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "users:1: not valid JSON: Expecting value at column 1"),
        (b"[]", "users:1: must be a JSON object"),
        (b"{}", 'users:1: the first line must have "format": "bascule-users-1"'),
        (changed(1, lambda row: row.update(format="bascule-users-2")), "users:1: the first line must have"),
        (changed(1, lambda row: row.update(secret="AAAA")), "users:1: secret must have 32 bytes"),
        (changed(1, lambda row: row.update(secret="*")), "users:1: secret must be base64"),
        (changed(1, lambda row: row.update(users="2")), "users:1: users must be a number"),
        (changed(1, lambda row: row.update(more=1)), "users:1: must have exactly the keys format, secret, users"),
        (changed(2, lambda row: row.pop("roles")), "users:2: must have exactly the keys user, roles, verifiers"),
        (changed(3, lambda row: row.update(user="ann")), "users:3: user 'ann' is given twice"),
        (changed(3, lambda row: row.update(user="anonymous")), "users:3: 'anonymous' is the user of a client without a login"),
        (changed(3, lambda row: row.update(roles=["a", "a"])), "users:3: user 'bob' has a role twice"),
        (changed(3, lambda row: row.update(roles=["*"])), "users:3: '*' stands for all clients"),
        (changed(2, lambda row: row.update(verifiers=["x"])), "users:2: a verifier of user 'ann' must be SCRAM-SHA-256$"),
        (
            changed(2, lambda row: row.update(verifiers=[WEAK, WEAK])),
            "users:2: user 'ann' must have no verifier, or one for each of SCRAM-SHA-512",
        ),
        (
            changed(2, lambda row: row.update(verifiers=[WEAK])),
            "users:2: user 'ann' must have no verifier, or one for each of SCRAM-SHA-512",
        ),
        (TWO.text().rpartition('{"user"')[0].encode(), "users:2: the file has 1 users, and 2 by its first line"),
        (TWO.text().encode() + b"\n", "users:4: not valid JSON"),
        (TWO.text().encode() + b"\xff", "users:4: not UTF-8"),
        (b'{"format": 1, "format": 2}', "users:1: a key is given twice"),
        (b"[" * 100_000, "users:1: not valid"),
    ],
)
def test_damaged_file_is_refused_with_file_and_line(data: bytes, error: str) -> None:
    with pytest.raises(UsersFileError) as caught:
        parse(data, "users")
    assert str(caught.value).startswith(error)


def test_file_beyond_its_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_file, "FILE_BYTES_MAX", 100)
    with pytest.raises(UsersFileError, match="larger than 100 bytes"):
        parse(TWO.text().encode(), "users")


@pytest.mark.parametrize("name", ["", " ann", "ann ", "a\nb", "a\x1b[0m", "x" * 201, "ﬁsh", "\ud800"])
def test_name_that_could_be_mistaken_for_another_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="user"):
        check_name(name, "user")


def test_each_user_has_a_verifier_and_a_salt_of_its_own_for_each_mechanism() -> None:
    assert ANN.verifiers.keys() == {SCRAM_SHA_256, SCRAM_SHA_512}
    assert all(each.fits("of ann") and not each.fits("of bob") for each in ANN.verifiers.values())
    assert len({each.salt for user in (ANN, BOB) for each in user.verifiers.values()}) == 4
    assert "verifier" not in repr(ANN)


def test_change_is_written_with_mode_0600_and_keeps_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "users"
    with changing(file) as draft:
        draft.content = draft.content.with_user(ANN)
    first = read(file)
    file.chmod(0o644)
    with changing(file) as draft:
        draft.content = draft.content.with_user(BOB).without("ann")
    assert read(file) == Users(first.secret, {"bob": BOB})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["users", "users.lock"]


def test_failed_change_leaves_the_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "users"
    file.write_text(TWO.text())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsersFileError, match="No space left"), changing(file) as draft:
        draft.content = draft.content.without("ann")
    assert read(file) == TWO
    assert sorted(each.name for each in tmp_path.iterdir()) == ["users", "users.lock"]


def test_change_through_a_symbolic_link_replaces_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(TWO.text())
    (tmp_path / "users").symlink_to("real")
    with changing(tmp_path / "users") as draft:
        draft.content = draft.content.without("ann")
    assert (tmp_path / "users").is_symlink()
    assert read(tmp_path / "real").users.keys() == {"bob"}


def test_damaged_file_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text("junk")
    with pytest.raises(UsersFileError, match=r"users:1: "), changing(file) as draft:
        draft.content = draft.content.with_user(ANN)
    assert file.read_text() == "junk"


def test_changes_at_once_lose_no_user(tmp_path: Path) -> None:
    file, errors = tmp_path / "users", []

    def add(number: int) -> None:
        try:
            with changing(file) as draft:
                draft.content = draft.content.with_user(User(f"user{number}", ANN.verifiers))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert read(file).users.keys() == {f"user{number}" for number in range(20)}


def test_stamp_changes_with_a_replacement(tmp_path: Path) -> None:
    file = tmp_path / "users"
    stamps = []
    for users in (TWO, Users(bytes(32), TWO.users)):
        with changing(file) as draft:
            draft.content = users.without("ann" if stamps else "bob")
        stamps.append(stamp(file))
    assert stamps[0] != stamps[1]


def test_missing_user_and_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsersFileError, match="No such file or directory; `bascule user add` creates it"):
        read(tmp_path / "users")
    with pytest.raises(InvalidInput, match="there is no user 'ann' in"), changing(tmp_path / "users") as draft:
        draft.existing("ann")
    assert not (tmp_path / "users").exists()
