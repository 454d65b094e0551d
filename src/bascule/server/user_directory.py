"""The users with passwords: those of the settings and those of ``broker.users_file``."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final, NamedTuple

from bascule.amqp.verifiers import DIGESTS, SALT_BYTES, SCRAM_SHA_256, Verifier, Verifiers, derived_salt
from bascule.config import Settings
from bascule.config.load import display_key
from bascule.config.named_roles import unknown_role
from bascule.config.passwords import is_hash
from bascule.config.private_file import PRIVATE, replace_private
from bascule.config.users_file import SECRET_BYTES, Users, UsersFileError, read
from bascule.core.errors import InvalidInput
from bascule.core.roles import UserRoles

#: Iterations for a password in clear in the settings: an attacker who could guess it from its hash must already be in this process, and can
#: read it there.
ITERATIONS: Final = 4096
#: File in the data directory with the secret from which unknown users get their salts, if there is no file of users, which has its own.
SECRET_FILE: Final = "login-secret"


class EndedLogins(NamedTuple):
    """Why the connections of a user end after a change of the file. ``all_logins``: also those that logged in without a password."""

    reason: str
    all_logins: bool


def read_users(settings: Settings) -> Users | None:
    """Read the file of users; None if the settings name none. Raises UsersFileError, also if a user is in the settings, too."""
    path = settings.broker.users_file
    if path is None:
        return None
    users = read(path)
    _check_apart(settings, users)
    return users


def _check_apart(settings: Settings, users: Users) -> None:
    both = sorted(settings.broker.users.keys() & users.users.keys())
    if both:
        raise UsersFileError(
            f"{settings.broker.users_file}: user {both[0]!r} is also in the settings (broker.users); remove one of the two"
        )


def roles_of(settings: Settings, users: Users | None) -> UserRoles:
    """Return the roles of all users, those of the settings and those of the file."""
    found = UserRoles(settings.broker.roles)
    found.assign(_roles_in(users))
    return found


def _roles_in(users: Users | None) -> dict[str, tuple[str, ...]]:
    return {} if users is None else {name: user.roles for name, user in users.users.items()}


def weaknesses(settings: Settings) -> list[str]:
    """Check the file of users, and return what is likely wrong about it: a role without users, a file that others may read.

    Raises UsersFileError if the broker cannot use the file.
    """
    users, path = read_users(settings), settings.broker.users_file
    if users is None or path is None:
        return []
    found = (
        [] if is_private(path) else [f"{path}: other users of the machine may read the hashes of the passwords (its mode should be 0600)"]
    )
    held = {*settings.broker.roles, *(role for roles in _roles_in(users).values() for role in roles)}
    wrong = unknown_role(settings.permission, settings.limit, settings.admin, sorted(held))
    if wrong is not None:
        found.append(f"{display_key(wrong.path, settings)}: {wrong.reason}")
    return found


class ListedUser(NamedTuple):
    """A user with a password, for a list. ``iterations`` is None for a password in clear."""

    user: str
    roles: tuple[str, ...]
    source: str
    iterations: int | None


def listed_users(settings: Settings) -> list[ListedUser]:
    """Return the users of the settings and of the file of users, by name. Raises UsersFileError."""
    broker, users = settings.broker, read_users(settings)
    roles = roles_of(settings, users)
    iterations = {
        (name, "broker.users"): Verifier.parse(given).iterations if is_hash(given) else None for name, given in broker.passwords.items()
    }
    for user in () if users is None else users.users.values():
        iterations[user.name, str(broker.users_file)] = user.verifiers[SCRAM_SHA_256].iterations
    return [ListedUser(name, tuple(sorted(roles.of(name))), source, count) for (name, source), count in sorted(iterations.items())]


def is_private(path: Path) -> bool:
    """Return whether only the owner may use a file. Raises OSError."""
    return not path.stat().st_mode & 0o777 & ~PRIVATE


class UserDirectory:
    """All users with passwords, by mechanism. The file may change while the broker runs."""

    def __init__(self, settings: Settings) -> None:
        """Read the file of users, if the settings name one. Raises UsersFileError, InvalidInput."""
        broker = settings.broker
        self._settings = settings
        self._file = read_users(settings)
        self._secret = b"" if self._file is not None or not broker.users else _kept_secret(Path(settings.embedded.data_dir) / SECRET_FILE)
        # A client chooses its mechanism before the broker knows the user: each mechanism that is offered must work for all users.
        only_sha_256 = any(is_hash(password) for password in broker.passwords.values())
        mechanisms = (SCRAM_SHA_256,) if only_sha_256 else tuple(DIGESTS)
        self.verifiers = {each: Verifiers({}, b"", each) for each in mechanisms} if broker.has_passwords else {}
        self._replace_verifiers()
        self.roles = roles_of(settings, self._file)

    def check(self, user: str, password: str) -> bool:
        """Check a password, in a thread that may block for milliseconds."""
        return self.verifiers[SCRAM_SHA_256].check(user, password)

    def read_again(self) -> dict[str, EndedLogins] | None:
        """Read the file again. Return the users whose connections must end; None if nothing has changed. Raises UsersFileError.

        The call takes milliseconds, and may be made in any thread, by one thread at a time. A check of a password that begins after the
        call uses the new file.
        """
        before, users = self._file, read_users(self._settings)
        if before is None or users is None or users == before:
            return None
        self._file = users
        self._replace_verifiers()
        self.roles.assign(_roles_in(users))
        return _ended(before, users)

    @property
    def count(self) -> int:
        """Return the number of users in the file."""
        return 0 if self._file is None else len(self._file.users)

    def _replace_verifiers(self) -> None:
        secret = self._secret if self._file is None else self._file.secret
        of_file = {} if self._file is None else self._file.users
        for mechanism, verifiers in self.verifiers.items():
            configured = {user: _of_setting(user, given, secret, mechanism) for user, given in self._settings.broker.passwords.items()}
            verifiers.replace(configured | {name: user.verifiers[mechanism] for name, user in of_file.items()}, secret)


def _of_setting(user: str, password: str, secret: bytes, mechanism: str) -> Verifier:
    """Return the verifier of a user of the settings. With a password in clear, the salt is the same after a restart."""
    if is_hash(password):
        return Verifier.parse(password)
    return Verifier.of(password, derived_salt(secret, mechanism, user, SALT_BYTES), ITERATIONS, mechanism)


def _ended(before: Users, after: Users) -> dict[str, EndedLogins]:
    """Return the users who were removed, whose password was changed, or who lost a role."""
    ended: dict[str, EndedLogins] = {}
    for name, user in before.users.items():
        now = after.users.get(name)
        lost = sorted(set(user.roles).difference(() if now is None else now.roles))
        if now is None:
            ended[name] = EndedLogins(f"user {name!r} was removed", all_logins=bool(lost))
        elif lost:
            ended[name] = EndedLogins(f"user {name!r} has lost the role {lost[0]!r}", all_logins=True)
        elif now.verifiers != user.verifiers:
            ended[name] = EndedLogins(f"the password of user {name!r} was changed", all_logins=False)
    return ended


def _kept_secret(file: Path) -> bytes:
    """Return the secret of a data directory; it is made at the first call. Raises InvalidInput."""
    try:
        if not file.exists() or file.stat().st_size != SECRET_BYTES:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_private(file, secrets.token_bytes(SECRET_BYTES))
        return file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}; embedded.data_dir must be a directory that the broker can use") from error
