"""The share of the memory that connections, sessions and links may use, in total and by user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bascule.broker.errors import ResourceLimit
from bascule.broker.fair_shares import Beyond, beyond
from bascule.broker.memory import MemoryAccount

#: Share of the memory of all connections that those of one user may use while others are connected.
CONNECTIONS_USER_SHARE: Final = 0.5


class ConnectionRoom:
    """The memory of all connections. ``size_bytes`` is kept up to date; the account also measures names, and input that is incomplete."""

    __slots__ = ("account", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self.account: Callable[[], MemoryAccount | None] = lambda: None  # None before the state is loaded


class UserRoom:
    """The memory of the connections, sessions and links of one user."""

    __slots__ = ("_room", "_user", "size_bytes")

    def __init__(self, user: str, room: ConnectionRoom) -> None:
        self._user = user
        self._room = room
        self.size_bytes = 0

    def add(self, change_bytes: int) -> None:
        """Count memory, or count it no more."""
        self.size_bytes += change_bytes
        self._room.size_bytes += change_bytes

    def check(self, size_bytes: int) -> None:
        """Check that the user may use so much more memory. Raises ResourceLimit."""
        account = self._room.account()
        if account is None:
            return
        most, total = account.connections_max_bytes, max(account.connections_bytes, self._room.size_bytes)
        if beyond(size_bytes, self.size_bytes, total, most, 1.0) is Beyond.ALL:
            raise ResourceLimit(f"connections, sessions and links use {total} of their {most} bytes (broker.memory_bytes)")
        if beyond(size_bytes, self.size_bytes, self._room.size_bytes, most, CONNECTIONS_USER_SHARE) is Beyond.SHARE:
            raise ResourceLimit(
                f"connections, sessions and links of user {self._user!r} use {self.size_bytes} bytes; while others are connected,"
                f" they may use {int(CONNECTIONS_USER_SHARE * most)} (broker.memory_bytes)"
            )
