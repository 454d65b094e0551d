"""The roles of users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

_NONE: Final[frozenset[str]] = frozenset()


class UserRoles:
    """The roles of each user: those of the settings and those of the file of users. Both may change at any time, also in another thread."""

    def __init__(self, roles: Mapping[str, Iterable[str]]) -> None:
        """``roles`` has the users of each role. A client without a login is the user ``anonymous``."""
        self._lent: dict[str, Counter[frozenset[str]]] = {}  # by user, how many connected clients have roles by their token
        self.assign({}, roles)

    def assign(self, roles: Mapping[str, Iterable[str]], with_users: Mapping[str, Iterable[str]] | None = None) -> None:
        """Set the roles of each user beside those of ``__init__``, in place of an earlier call.

        ``with_users`` has the users of each role, in place of those of ``__init__``.
        """
        if with_users is not None:
            self._configured = _by_user(with_users)
        users = {**dict.fromkeys(self._configured, ()), **roles}
        self._all = {user: frozenset(self._configured.get(user, ())).union(names) for user, names in users.items()}

    def of(self, user: str) -> frozenset[str]:
        """Return the roles of a user."""
        return self._all.get(user, _NONE)

    def lend(self, user: str, roles: frozenset[str]) -> None:
        """Note that a client of the user is connected that has roles by its token."""
        if roles:
            self._lent.setdefault(user, Counter())[roles] += 1

    def take_back(self, user: str, roles: frozenset[str]) -> None:
        """Note that a client for which ``lend`` was called has gone."""
        if roles:
            lent = self._lent[user]
            lent[roles] -= 1
            if not lent[roles]:
                del lent[roles]
            if not lent:
                del self._lent[user]

    def with_lent(self, user: str) -> frozenset[str]:
        """Return the roles of a user, with those of the tokens of its connected clients."""
        own, lent = self.of(user), self._lent.get(user)
        return own if lent is None else own.union(*lent)

    def has(self, user: str) -> bool:
        """Return whether a user has a role."""
        return bool(self._all.get(user))


def _by_user(roles: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for role, users in roles.items():
        for user in users:
            found.setdefault(user, set()).add(role)
    return found
