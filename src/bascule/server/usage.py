"""The resources that clients use, counted by user, by address and in total, with the limits on them.

A user is the name of a login; all anonymous clients are one user.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Final, TypeVar

from bascule.broker.errors import ResourceLimit
from bascule.core.user_limits import UNLIMITED, LimitRules, UserResource
from bascule.server.allowance import SendAllowance

K = TypeVar("K")
V = TypeVar("V")

CONNECTIONS: Final = "broker.max_connections"
CONNECTIONS_PER_ADDRESS: Final = "broker.max_connections_per_address"


@dataclass(frozen=True, slots=True)
class UsageLimits:
    """The limits on the resources of clients. 0: no limit. ``connections_setting`` is the setting that limits the connections."""

    connections: int = 0
    connections_per_address: int = 0
    connections_setting: str = CONNECTIONS
    of_users: LimitRules = UNLIMITED


class Tally:
    """The number of used resources of one kind, and its limit."""

    __slots__ = ("_most", "_setting", "_what", "count")

    def __init__(self, most: int, what: str, setting: str) -> None:
        self.count = 0
        self._most = most
        self._what = what
        self._setting = setting

    def check(self) -> None:
        """Check that one more resource is within the limit. Raises ResourceLimit."""
        if self._most and self.count >= self._most:
            raise ResourceLimit(f"the limit of {self._most} {self._what} is reached ({self._setting})")


class Holdings(MutableMapping[K, V]):
    """The resources of one kind that a client uses. They count towards a tally, which may be replaced while there are none."""

    __slots__ = ("held", "tally")

    def __init__(self) -> None:
        self.tally = Tally(0, "", "")
        self.held: dict[K, V] = {}  # for fast reading only

    def __getitem__(self, key: K) -> V:
        return self.held[key]

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self.held:
            self.tally.count += 1
        self.held[key] = value

    def __delitem__(self, key: K) -> None:
        del self.held[key]
        self.tally.count -= 1

    def uncount(self) -> None:
        """Count the resources towards no limit, because their client has left; they are released later."""
        self.tally.count -= len(self.held)
        self.tally = Tally(0, "", "")
        self.tally.count = len(self.held)

    def __contains__(self, key: object) -> bool:
        return key in self.held

    def __iter__(self) -> Iterator[K]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class UserUsage:
    """The resources that the clients of one user use."""

    def __init__(self, user: str, limits: LimitRules) -> None:
        def tally(resource: UserResource, what: str) -> Tally:
            most, setting = limits.of(user, resource)
            return Tally(most, f"{what} of user {user!r}", setting)

        self.connections = tally(UserResource.CONNECTIONS, "connections")
        self.sessions = tally(UserResource.SESSIONS, "sessions")
        self.links = tally(UserResource.LINKS, "links")
        self.transactions = tally(UserResource.TRANSACTIONS, "open transactions")
        self.message_bytes_max = limits.of(user, UserResource.MESSAGE_BYTES).most
        self.sending = SendAllowance(limits.of(user, UserResource.MESSAGES_PER_S).most)


class Usage:
    """The resources that all clients use."""

    def __init__(self, limits: UsageLimits) -> None:
        self.refused = 0  # refused connections
        self.users: dict[str, UserUsage] = {}  # the connected users
        self.connections = Tally(limits.connections, "connections", limits.connections_setting)
        self._limits = limits
        self._addresses: dict[str, Tally] = {}

    def connect(self, user: str, address: str) -> UserUsage:
        """Count a connection that has logged in, and return the usage of its user. Raises ResourceLimit."""
        usage = self.users.get(user) or UserUsage(user, self._limits.of_users)
        of_address = self._addresses.get(address) or Tally(
            self._limits.connections_per_address, f"connections from address {address}", CONNECTIONS_PER_ADDRESS
        )
        counts = (self.connections, of_address, usage.connections)
        try:
            for tally in counts:
                tally.check()
        except ResourceLimit:
            self.refused += 1
            raise
        self.users[user], self._addresses[address] = usage, of_address
        for tally in counts:
            tally.count += 1
        return usage

    def disconnect(self, user: str, address: str) -> None:
        """Count down a connection that has ended, with its user and address."""
        usage, of_address = self.users[user], self._addresses[address]
        for tally in (self.connections, of_address, usage.connections):
            tally.count -= 1
        if not usage.connections.count:
            del self.users[user]
        if not of_address.count:
            del self._addresses[address]
