"""The share of the memory that connections, sessions and links may use, in total and by user.

Peers before their login do not count: they have limits of their own, and must not keep out users with a login.
"""

from __future__ import annotations

from collections.abc import Callable

from bascule.broker.errors import ResourceLimit
from bascule.broker.fair_shares import USER_SHARE, Beyond, beyond, of_user_beyond
from bascule.broker.memory import MemoryAccount


class ConnectionRoom:
    """The memory of the connections of all users."""

    __slots__ = ("account", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self.account: Callable[[], MemoryAccount | None] = lambda: None  # None before the state is loaded


class UserRoom:
    """The memory of the connections, sessions and links of one user.

    ``size_bytes`` is kept up to date for what is counted. The rest was measured last: names, frames that are incomplete, attaches that wait
    for the journal, and links and sessions that the broker has ended and the peer has not.
    """

    __slots__ = ("_rest_bytes", "_room", "_user", "size_bytes")

    def __init__(self, user: str, room: ConnectionRoom) -> None:
        self._user = user
        self._room = room
        self.size_bytes = self._rest_bytes = 0

    def add(self, change_bytes: int) -> None:
        """Count memory, or count it no more."""
        self.size_bytes += change_bytes
        self._room.size_bytes += change_bytes

    def measured(self, rest_bytes: int) -> None:
        """Set the memory of the user's connections that is not counted. A user without connections, which may have gone since, has none."""
        if self.size_bytes == self._rest_bytes:
            rest_bytes = 0
        self.add(rest_bytes - self._rest_bytes)
        self._rest_bytes = rest_bytes

    def has_room(self) -> bool:
        """Return True if the user may use more memory."""
        return self._beyond(1) is None

    def check(self, size_bytes: int) -> None:
        """Check that the user may use so much more memory. Raises ResourceLimit."""
        found, account = self._beyond(size_bytes), self._room.account()
        if found is None or account is None:
            return
        whose, used, most = "", self._room.size_bytes, account.connections_max_bytes
        if found is Beyond.SHARE:
            whose, used, most = f" {of_user_beyond(self._user)}", self.size_bytes, int(USER_SHARE * most)
        raise ResourceLimit(f"connections, sessions and links{whose} use {used} bytes of {most} (broker.memory_bytes)")

    def _beyond(self, size_bytes: int) -> Beyond | None:
        account = self._room.account()
        if account is None:
            return None
        return beyond(size_bytes, self.size_bytes, self._room.size_bytes, account.connections_max_bytes)
