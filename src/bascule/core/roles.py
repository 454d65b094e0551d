"""The roles of users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class UserRoles:
    """The roles of each user: some for as long as the process lives, and some that may change at any time, also in another thread."""

    def __init__(self, roles: Mapping[str, Iterable[str]]) -> None:
        """``roles`` has the users of each role. A client without a login is the user ``anonymous``."""
        self._lasting: dict[str, set[str]] = {}
        for role, users in roles.items():
            for user in users:
                self._lasting.setdefault(user, set()).add(role)
        self.assign({})

    def assign(self, roles: Mapping[str, Iterable[str]]) -> None:
        """Set the roles of each user beside those of ``__init__``, in place of an earlier call."""
        users = {**dict.fromkeys(self._lasting, ()), **roles}
        self._all = {user: frozenset(self._lasting.get(user, ())).union(names) for user, names in users.items()}

    def of(self, user: str) -> frozenset[str]:
        """Return the roles of a user."""
        return self._all.get(user, frozenset())
