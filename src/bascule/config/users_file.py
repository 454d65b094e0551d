"""The file of users: verifiers of their passwords, and their roles. ``bascule user`` writes the file, and the broker reads it.

The file has one JSON object a line. The first line has a secret, from which unknown users get their salts, and the number of users:

    {"format": "bascule-users-1", "secret": "BASE64", "users": 1}
    {"user": "ann", "roles": ["sales"], "verifiers": ["SCRAM-SHA-512$...", "SCRAM-SHA-256$..."]}
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from bascule.amqp.verifiers import DIGESTS, ITERATIONS, SALT_BYTES, Verifier
from bascule.config.load import ConfigError
from bascule.config.private_file import locked, replace_private
from bascule.config.user_names import check_name
from bascule.core.errors import InvalidInput

FORMAT: Final = "bascule-users-1"
SECRET_BYTES: Final = 32
#: Roles of one user.
ROLES_MAX: Final = 1000
#: Size of the file. A user takes 400 bytes.
FILE_BYTES_MAX: Final = 64 << 20


class UsersFileError(ConfigError):
    """The file of users cannot be used."""


@dataclass(frozen=True, slots=True)
class User:
    """One user of the file: a verifier for each mechanism, or none if the user logs in by certificate or token only, and roles."""

    name: str
    verifiers: Mapping[str, Verifier] = field(repr=False)
    roles: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, password: str, roles: tuple[str, ...] = (), iterations: int = ITERATIONS) -> User:
        """Return a user with new verifiers of a password."""
        made = {mechanism: Verifier.of(password, secrets.token_bytes(SALT_BYTES), iterations, mechanism) for mechanism in DIGESTS}
        return cls(name, made, roles)


@dataclass(frozen=True, slots=True)
class Users:
    """The content of a file of users."""

    secret: bytes = field(repr=False)
    users: Mapping[str, User] = field(default_factory=dict)

    @classmethod
    def none(cls) -> Users:
        """Return the content of a new file."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    def with_user(self, user: User) -> Users:
        """Return the content with a new or changed user."""
        return replace(self, users={**self.users, user.name: user})

    def without(self, name: str) -> Users:
        """Return the content without a user."""
        return replace(self, users={each: user for each, user in self.users.items() if each != name})

    def text(self) -> str:
        """Return the text of the file."""
        header = {"format": FORMAT, "secret": base64.b64encode(self.secret).decode(), "users": len(self.users)}
        rows: list[dict[str, Any]] = [
            {"user": user.name, "roles": list(user.roles), "verifiers": [str(user.verifiers[each]) for each in DIGESTS if user.verifiers]}
            for user in self.users.values()
        ]
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (header, *rows))


class Stamp(NamedTuple):
    """What changes if a file is replaced or written."""

    inode: int
    size: int
    changed_ns: int


def stamp(path: Path) -> Stamp:
    """Return the stamp of a file. Raises OSError."""
    found = path.stat()
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


def read(path: Path) -> Users:
    """Read a file of users. Raises UsersFileError."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        advice = "; `bascule user add` creates it" if isinstance(error, FileNotFoundError) else ""
        raise UsersFileError(f"{path}: {error.strerror}{advice}") from error
    return parse(data, str(path))


def parse(data: bytes, place: str) -> Users:
    """Parse the content of a file of users. ``place`` is its name. Raises UsersFileError with the name and the line."""
    if len(data) > FILE_BYTES_MAX:
        raise UsersFileError(f"{place}: larger than {FILE_BYTES_MAX} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsersFileError(f"{place}:{line}: not UTF-8 (byte {error.start})") from error
    number, users, header, secret = 0, dict[str, User](), _Row(), b""
    try:
        for number, row_text in enumerate(text.removesuffix("\n").split("\n"), start=1):
            row = _Row.parse(row_text)
            if number == 1:
                header, secret = row, _secret(row)
                continue
            user = _user(row)
            if user.name in users:
                raise ValueError(f"user {user.name!r} is given twice")
            users[user.name] = user
        if len(users) != header["users"]:
            raise ValueError(f"the file has {len(users)} users, and {header['users']!r} by its first line: a part is missing or was added")
    except ValueError as error:
        raise UsersFileError(f"{place}:{number}: {error}; restore the file from a copy, or delete it and add the users again") from None
    return Users(secret, users)


class _Row(dict[str, Any]):
    """One line of the file."""

    @classmethod
    def parse(cls, line: str) -> _Row:
        """Parse a line. Raises ValueError."""
        try:
            found = json.loads(line, object_pairs_hook=cls._unique)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise ValueError("not valid: values are nested too deeply") from None
        if not isinstance(found, cls):
            raise ValueError("must be a JSON object")
        return found

    @classmethod
    def _unique(cls, pairs: list[tuple[str, Any]]) -> _Row:
        row = cls(pairs)
        if len(row) != len(pairs):
            raise ValueError("a key is given twice")
        return row

    def of(self, *keys: str) -> list[Any]:
        """Return the values of exactly these keys. Raises ValueError."""
        if self.keys() != set(keys):
            raise ValueError(f"must have exactly the keys {', '.join(keys)}")
        return [self[key] for key in keys]


def _secret(header: _Row) -> bytes:
    if header.get("format") != FORMAT:
        raise ValueError(f'the first line must have "format": "{FORMAT}"; this is no file of users, or of another version of Bascule')
    _, secret, count = header.of("format", "secret", "users")
    if type(count) is not int:
        raise ValueError("users must be a number")
    try:
        found = base64.b64decode(secret, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise ValueError("secret must be base64") from None
    if len(found) != SECRET_BYTES:
        raise ValueError(f"secret must have {SECRET_BYTES} bytes")
    return found


def _user(row: _Row) -> User:
    name, roles, texts = row.of("user", "roles", "verifiers")
    if not isinstance(name, str):
        raise ValueError("user must be text")
    if not _is_texts(roles) or not _is_texts(texts):
        raise ValueError("roles and verifiers must be lists of text")
    check_name(name, "user")
    if len(set(roles)) != len(roles) or len(roles) > ROLES_MAX:
        raise ValueError(f"user {name!r} has a role twice, or more than {ROLES_MAX} roles")
    for role in roles:
        check_name(role, "role")
    try:
        verifiers = [Verifier.parse(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"a verifier of user {name!r} {error}") from None
    by_mechanism = {each.mechanism: each for each in verifiers}
    if texts and (len(verifiers) != len(DIGESTS) or by_mechanism.keys() != DIGESTS.keys()):
        raise ValueError(f"user {name!r} must have no verifier, or one for each of {', '.join(DIGESTS)}")
    return User(name, by_mechanism, tuple(roles))


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


class UsersDraft:
    """A file of users that is being changed: assign to ``content``."""

    def __init__(self, content: Users, path: Path) -> None:
        self.content = content
        self._path = path

    def existing(self, name: str) -> User:
        """Return a user of the file. Raises InvalidInput."""
        user = self.content.users.get(name)
        if user is None:
            raise InvalidInput(f"there is no user {name!r} in {self._path}")
        return user


@contextmanager
def changing(path: Path) -> Iterator[UsersDraft]:
    """Change a file of users, or create it: it is written at the end of the context, if there was no error.

    A reader sees the file before or after the change. Two changes happen one after the other. After the context, the change survives a
    crash of the machine. Raises UsersFileError.
    """
    try:
        with locked(path):
            draft = UsersDraft(read(path) if path.exists() else Users.none(), path)
            before = draft.content
            yield draft
            if draft.content != before or not path.exists():
                replace_private(path, draft.content.text().encode())
    except OSError as error:
        raise UsersFileError(f"{error.filename or path}: {error.strerror}") from error
