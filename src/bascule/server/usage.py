"""The resources that clients use, counted by user, by address and in total, with the limits on them.

A user is the name of a login; all anonymous clients are one user.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Final, TypeVar

from bascule.broker.errors import ResourceLimit
from bascule.core.roles import UserRoles
from bascule.core.user_limits import UNLIMITED, LimitRules, UserLimit, UserResource
from bascule.server.allowance import SendAllowance
from bascule.server.connection_room import ConnectionRoom, UserRoom
from bascule.server.memory import CONNECTION_BYTES, LINK_BYTES, SESSION_BYTES

K = TypeVar("K")
V = TypeVar("V")

#: Allowances of users without clients that are kept.
ALLOWANCES_MAX: Final = 10_000
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

    __slots__ = ("_most", "_room", "_setting", "_unit_bytes", "_what", "count")

    def __init__(self, most: int, what: str, setting: str, room: UserRoom | None = None, unit_bytes: int = 0) -> None:
        """With ``room``, each resource also uses ``unit_bytes`` of memory."""
        self.count = 0
        self._room, self._unit_bytes = room, unit_bytes
        self._most = most
        self._what = what
        self._setting = setting

    def change(self, limit: UserLimit) -> None:
        """Set another limit. Resources beyond it stay."""
        self._most, self._setting = limit

    def check(self) -> None:
        """Check that one more resource is within the limit. Raises ResourceLimit."""
        if self._most and self.count >= self._most:
            raise ResourceLimit(f"the limit of {self._most} {self._what} is reached ({self._setting})")
        if self._room is not None:
            self._room.check(self._unit_bytes)

    def add(self, change: int) -> None:
        """Count resources, or count them no more."""
        self.count += change
        if self._room is not None:
            self._room.add(change * self._unit_bytes)


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
            self.tally.add(1)
        self.held[key] = value

    def __delitem__(self, key: K) -> None:
        del self.held[key]
        self.tally.add(-1)

    def uncount(self) -> None:
        """Count the resources towards no limit, because their client has left; they are released later."""
        self.tally.add(-len(self.held))
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

    def __init__(self, user: str, limits: LimitRules, room: ConnectionRoom, sending: SendAllowance | None = None) -> None:
        """Begin without resources. ``sending`` is the allowance that the user had when its last client left, if that is known."""
        self.user = user
        self._limits = limits
        of, self.room = f"of user {user!r}", UserRoom(user, room)
        self.connections = Tally(0, f"connections {of}", "", self.room, CONNECTION_BYTES)
        self.sessions = Tally(0, f"sessions {of}", "", self.room, SESSION_BYTES)
        self.links = Tally(0, f"links {of}", "", self.room, LINK_BYTES)
        self.transactions = Tally(0, f"open transactions {of}", "")
        self.message_bytes_max = 0  # 0: no limit
        self.sending = sending or SendAllowance(limits.of(user, UserResource.MESSAGES_PER_S).most)
        self.refresh()

    def refresh(self, limits: LimitRules | None = None) -> None:
        """Set the limits of the user as its roles are now, perhaps by other rules."""
        limits, user = limits or self._limits, self.user
        self._limits = limits
        self.connections.change(limits.of(user, UserResource.CONNECTIONS))
        self.sessions.change(limits.of(user, UserResource.SESSIONS))
        self.links.change(limits.of(user, UserResource.LINKS))
        self.transactions.change(limits.of(user, UserResource.TRANSACTIONS))
        self.message_bytes_max = limits.of(user, UserResource.MESSAGE_BYTES).most
        self.sending.change(limits.of(user, UserResource.MESSAGES_PER_S).most)


class Usage:
    """The resources that all clients use."""

    def __init__(self, limits: UsageLimits, roles: UserRoles | None = None) -> None:
        """``roles`` are those of the rules in ``limits``."""
        self.refused = 0  # refused connections
        self.room = ConnectionRoom()
        self.users: dict[str, UserUsage] = {}  # the connected users
        self.connections = Tally(limits.connections, "connections", limits.connections_setting)
        self._limits = limits
        self._roles = UserRoles({}) if roles is None else roles
        self._addresses: dict[str, Tally] = {}
        #: By user: a client that connects for each message must not get a new allowance each time.
        self._allowances: OrderedDict[str, SendAllowance] = OrderedDict()

    def change(self, limits: UsageLimits) -> None:
        """Set other limits; those of connected users follow with ``refresh``."""
        self._limits = limits
        self.connections.change(UserLimit(limits.connections, limits.connections_setting))

    def refresh(self) -> Iterator[None]:
        """Set the limits of all connected users as their roles are now, user by user, and those of all addresses."""
        for usage in list(self.users.values()):
            usage.refresh(self._limits.of_users)
            yield
        for of_address in list(self._addresses.values()):
            of_address.change(UserLimit(self._limits.connections_per_address, CONNECTIONS_PER_ADDRESS))
            yield

    def connect(self, user: str, address: str, token_roles: frozenset[str] = frozenset()) -> UserUsage:
        """Count a connection that has logged in, perhaps with a token, and return the usage of its user. Raises ResourceLimit."""
        self._roles.lend(user, token_roles)
        usage = self.users.get(user)
        if usage is None:
            usage = UserUsage(user, self._limits.of_users, self.room, self._allowances.get(user))
        elif token_roles:
            usage.refresh()
        of_address = self._addresses.get(address) or Tally(
            self._limits.connections_per_address, f"connections from address {address}", CONNECTIONS_PER_ADDRESS
        )
        counts = (self.connections, of_address, usage.connections)
        try:
            for tally in counts:
                tally.check()
        except ResourceLimit:
            self.refused += 1
            self._take_back(usage, user, token_roles)
            raise
        self.users[user], self._addresses[address] = usage, of_address
        for tally in counts:
            tally.add(1)
        return usage

    def disconnect(self, user: str, address: str, token_roles: frozenset[str] = frozenset()) -> None:
        """Count down a connection that has ended, with its user, address and the roles of its token."""
        usage, of_address = self.users[user], self._addresses[address]
        self._take_back(usage, user, token_roles)
        for tally in (self.connections, of_address, usage.connections):
            tally.add(-1)
        if not usage.connections.count:
            usage.room.measured(0)
            del self.users[user]
            self._keep(user, usage.sending)
        if not of_address.count:
            del self._addresses[address]

    def _keep(self, user: str, allowance: SendAllowance) -> None:
        """Keep the allowance of a user without clients; if too many are kept, forget the one that was left longest ago."""
        self._allowances.pop(user, None)
        if allowance.limited:
            self._allowances[user] = allowance
            if len(self._allowances) > ALLOWANCES_MAX:
                self._allowances.popitem(last=False)

    def _take_back(self, usage: UserUsage, user: str, token_roles: frozenset[str]) -> None:
        if token_roles:
            self._roles.take_back(user, token_roles)
            usage.refresh()
