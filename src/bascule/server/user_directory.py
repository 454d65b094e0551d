"""The users: those of the settings and those of ``broker.users_file``."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bascule.amqp.verifiers import DIGESTS, SALT_BYTES, SCRAM_SHA_256, Verifier, Verifiers, derived_salt
from bascule.config import Settings
from bascule.config.load import display_key
from bascule.config.named_roles import unknown_role
from bascule.config.passwords import is_hash
from bascule.config.pipeline_checks import unknown_user
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
    """Check the file of users, and return what is likely wrong: a role without users, an unknown user, a file that others may read.

    Raises UsersFileError if the broker cannot use the file.
    """
    users, path = read_users(settings), settings.broker.users_file
    if users is None or path is None:
        return []
    found = (
        [] if is_private(path) else [f"{path}: other users of the machine may read the hashes of the passwords (its mode should be 0600)"]
    )
    held = {*settings.broker.roles, *(role for roles in _roles_in(users).values() for role in roles)}
    wrong = unknown_role(settings.permission, settings.limit, settings.admin, sorted(held), settings.broker.oidc.roles)
    if wrong is not None:
        found.append(f"{display_key(wrong.path, settings)}: {wrong.reason}")
    if settings.permission and (unlisted := unknown_user(settings.divert, settings.ingress, known_users(settings, users))):
        found.append(f"{display_key(unlisted[0], settings)}: {unlisted[1]}")
    return found


def known_users(settings: Settings, users: Users | None) -> frozenset[str]:
    """Return the users with a password or a role."""
    return settings.listed_users if users is None else settings.listed_users.union(users.users)


class ListedUser(NamedTuple):
    """A user, for a list. ``iterations`` is None for a password in clear, and without a password."""

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
        iterations[user.name, str(broker.users_file)] = user.verifiers[SCRAM_SHA_256].iterations if user.verifiers else None
    return [ListedUser(name, tuple(sorted(roles.of(name))), source, count) for (name, source), count in sorted(iterations.items())]


def is_private(path: Path) -> bool:
    """Return whether only the owner may use a file. Raises OSError."""
    return not path.stat().st_mode & 0o777 & ~PRIVATE


class NextUsers(NamedTuple):
    """The users by other settings, or by a changed file, ready to be adopted."""

    settings: Settings
    file: Users | None
    secret: bytes
    verifiers: Mapping[str, Mapping[str, Verifier]]

    @classmethod
    def read(cls, settings: Settings) -> NextUsers:
        """Read the file of users, if the settings name one. Raises UsersFileError, InvalidInput."""
        broker = settings.broker
        file = read_users(settings)
        kept = file is None and broker.users
        secret = file.secret if file is not None else _kept_secret(Path(settings.embedded.data_dir) / SECRET_FILE) if kept else b""
        # A client chooses its mechanism before the broker knows the user: each mechanism that is offered must work for all users.
        only_sha_256 = any(is_hash(password) for password in broker.passwords.values())
        mechanisms = (SCRAM_SHA_256,) if only_sha_256 else tuple(DIGESTS)
        return cls(
            settings, file, secret, {each: _verifiers(settings, file, secret, each) for each in mechanisms} if broker.has_passwords else {}
        )

    def password_of(self, user: str) -> object:
        """Return what stands for the password of a user, and changes with it; None for a user without a password."""
        listed = None if self.file is None else self.file.users.get(user)
        return self.settings.broker.passwords.get(user) if listed is None else listed.verifiers

    def has(self, user: str) -> bool:
        """Return whether a user is listed in the settings or in the file."""
        return user in self.settings.broker.users or (self.file is not None and user in self.file.users)

    def names(self) -> set[str]:
        """Return the names of all users, also of those that have only roles."""
        broker = self.settings.broker
        return {*broker.users, *(user for users in broker.roles.values() for user in users), *(self.file.users if self.file else ())}


class UserDirectory:
    """All users with passwords, by mechanism. The settings and the file may change while the broker runs."""

    def __init__(self, settings: Settings) -> None:
        """Read the file of users, if the settings name one. Raises UsersFileError, InvalidInput."""
        self.verifiers: dict[str, Verifiers] = {}
        self.roles = UserRoles({})
        self._lock = threading.Lock()  # the file and the settings may change at the same time
        self._now = NextUsers.read(settings)
        self._use(self._now)

    def check(self, user: str, password: str) -> bool:
        """Check a password, in a thread that may block for milliseconds."""
        verifiers = self.verifiers.get(SCRAM_SHA_256)  # None if the settings name no users with passwords
        return verifiers is not None and verifiers.check(user, password)

    def knows(self, user: str) -> bool:
        """Return whether a user is in the settings or in the file."""
        return self._now.has(user) or self.roles.has(user)

    def read_again(self) -> dict[str, EndedLogins] | None:
        """Read the file again. Return the users whose connections must end; None if nothing has changed. Raises UsersFileError.

        The call takes milliseconds, and may be made in any thread. A check of a password that begins after the call uses the new file.
        """
        with self._lock:
            before, users = self._now.file, read_users(self._now.settings)
            if before is None or users is None or users == before:
                return None
            return self._adopt(NextUsers.read(self._now.settings))

    def adopt(self, users: NextUsers) -> dict[str, EndedLogins]:
        """Use the users by other settings. Return the users whose connections must end."""
        with self._lock:
            return self._adopt(users)

    def password_of(self, user: str) -> object:
        """Return what stands for the password of a user, and changes with it; None for a user without a password."""
        return self._now.password_of(user)

    @property
    def count(self) -> int:
        """Return the number of users in the file."""
        return 0 if self._now.file is None else len(self._now.file.users)

    def _adopt(self, users: NextUsers) -> dict[str, EndedLogins]:
        before, self._now = self._now, users
        self._use(users)
        certified = users.settings.broker.tls.only_known_users
        return _ended(before, users, lambda name: certified and not self.knows(name))

    def _use(self, users: NextUsers) -> None:
        dropped = self.verifiers.keys() - users.verifiers.keys()
        for mechanism in dropped:
            self.verifiers[mechanism].replace({}, users.secret)  # a client may be logging in
        self.verifiers = {each: self.verifiers.get(each) or Verifiers({}, b"", each) for each in users.verifiers}
        for mechanism, of_users in users.verifiers.items():
            self.verifiers[mechanism].replace(dict(of_users), users.secret)
        self.roles.assign(_roles_in(users.file), users.settings.broker.roles)


def _verifiers(settings: Settings, file: Users | None, secret: bytes, mechanism: str) -> dict[str, Verifier]:
    configured = {user: _of_setting(user, given, secret, mechanism) for user, given in settings.broker.passwords.items()}
    of_file = {} if file is None else file.users
    return configured | {name: user.verifiers[mechanism] for name, user in of_file.items() if user.verifiers}


def _of_setting(user: str, password: str, secret: bytes, mechanism: str) -> Verifier:
    """Return the verifier of a user of the settings. With a password in clear, the salt is the same after a restart."""
    if is_hash(password):
        return Verifier.parse(password)
    return Verifier.of(password, derived_salt(secret, mechanism, user, SALT_BYTES), ITERATIONS, mechanism)


def _ended(before: NextUsers, after: NextUsers, refused: Callable[[str], bool]) -> dict[str, EndedLogins]:
    """Return the users who were removed, whose password was changed, or who lost a role.

    ``refused`` returns whether a certificate of a removed user is no login any more.
    """
    ended: dict[str, EndedLogins] = {}
    had, has = roles_of(before.settings, before.file), roles_of(after.settings, after.file)
    for name in before.names():
        lost = sorted(had.of(name) - has.of(name))
        if before.has(name) and not after.has(name):
            ended[name] = EndedLogins(f"user {name!r} was removed", all_logins=bool(lost) or refused(name))
        elif lost:
            ended[name] = EndedLogins(f"user {name!r} has lost the role {lost[0]!r}", all_logins=True)
        elif before.password_of(name) != after.password_of(name):
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
