"""Changes of the file of users by ``bascule user``. Each function returns what it has done."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import typer

from bascule.config import load
from bascule.config.fields import read_secret
from bascule.config.user_names import check_name
from bascule.config.users_file import User, Users, UsersDraft, changing, read
from bascule.core.errors import InvalidInput

#: Characters of a password. A SASL frame has at most 4 KiB.
PASSWORD_LENGTH_MAX: Final = 1000


class EditedFile(NamedTuple):
    """The file of users of a command, and the users of the settings."""

    path: Path
    configured: frozenset[str]

    def read(self) -> Users:
        """Return the content of the file; no users if the file does not exist. Raises UsersFileError."""
        return read(self.path) if self.path.exists() else Users.none()

    def changing_existing(self) -> AbstractContextManager[UsersDraft]:
        """Change the file, which must exist. Raises UsersFileError."""
        read(self.path)
        return changing(self.path)


def target(file: Path | None, config: Path | None) -> EditedFile:
    """Return the file that a command changes: the option's, or that of the settings. Raises InvalidInput."""
    if file is not None and config is None:
        return EditedFile(file, frozenset())
    broker = load(config).settings.broker
    path = file or broker.users_file
    if path is None:
        raise InvalidInput('no file of users is set; set users_file = "PATH" in [broker] of the configuration file, or use --file')
    return EditedFile(path, frozenset(broker.users))


def given_password(file: Path | None) -> str:
    """Return a password from a file, the terminal or standard input. Raises InvalidInput."""
    if file is not None:
        try:
            password = read_secret(f"file:{file}")
        except ValueError as error:
            raise InvalidInput(str(error)) from error
    elif sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise InvalidInput("no password was given")
    if len(password) > PASSWORD_LENGTH_MAX or not password.isprintable():
        raise InvalidInput(f"a password must have at most {PASSWORD_LENGTH_MAX} characters, all printable")
    return password


def existing(target: EditedFile, name: str) -> User:
    """Return a user of the file. Raises InvalidInput."""
    return UsersDraft(target.read(), target.path).existing(name)


def add(target: EditedFile, name: str, roles: Iterable[str], iterations: int, password_file: Path | None) -> str:
    """Add a user. Raises InvalidInput."""
    _check_new(target, name)  # before the command asks for a password
    return _add(target, User.of(name, given_password(password_file), _roles(roles), iterations))


def add_without_password(target: EditedFile, name: str, roles: Iterable[str]) -> str:
    """Add a user who logs in by certificate or token only. Raises InvalidInput."""
    _check_new(target, name)
    return _add(target, User(name, {}, _roles(roles)))


def _check_new(target: EditedFile, name: str) -> None:
    """Check that a user may be added. Raises InvalidInput."""
    _valid(name, "user")
    if name in target.configured:
        raise InvalidInput(f"user {name!r} is in the settings (broker.users); remove the user there first")
    if name in target.read().users:
        raise _exists(name)


def _add(target: EditedFile, user: User) -> str:
    with changing(target.path) as draft:
        if user.name in draft.content.users:
            raise _exists(user.name)
        draft.content = draft.content.with_user(user)
    return f"user {user.name!r} added to {target.path}"


def change_password(target: EditedFile, name: str, iterations: int, password_file: Path | None) -> str:
    """Change the password of a user. Raises InvalidInput."""
    existing(target, name)  # before the command asks for a password
    user = User.of(name, given_password(password_file), (), iterations)
    with target.changing_existing() as draft:
        draft.content = draft.content.with_user(replace(user, roles=draft.existing(name).roles))
    return f"password of user {name!r} changed in {target.path}"


def remove(target: EditedFile, name: str) -> str:
    """Remove a user. Raises InvalidInput."""
    with target.changing_existing() as draft:
        draft.content = draft.content.without(draft.existing(name).name)
    return f"user {name!r} removed from {target.path}"


def set_roles(target: EditedFile, name: str, roles: Iterable[str]) -> str:
    """Set the roles of a user. Raises InvalidInput."""
    wanted = _roles(roles)
    with target.changing_existing() as draft:
        draft.content = draft.content.with_user(replace(draft.existing(name), roles=wanted))
    return f"user {name!r} has {', '.join(wanted) or 'no role'} in {target.path}"


def _exists(name: str) -> InvalidInput:
    return InvalidInput(f"user {name!r} exists; change the password with `bascule user passwd`, the roles with `bascule user roles`")


def _roles(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_valid(name, "role") for name in names))


def _valid(name: str, what: str) -> str:
    try:
        return check_name(name, what)
    except ValueError as error:
        raise InvalidInput(str(error)) from error
