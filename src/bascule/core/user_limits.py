"""The limits on what the clients of one user may use, by user and role.

A rule that names the user decides before a rule that names a role of the user, and both before the limit for all users. Where several rules
of one kind set a limit, the most generous one wins, as permissions of several roles add up. What a user uses is counted for all its clients
together, so a user has the roles of the tokens of all its connected clients, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from bascule.core.caches import peer_cache
from bascule.core.roles import UserRoles

#: The user of a client without a login.
ANONYMOUS: Final = "anonymous"


class UserResource(StrEnum):
    """What a user's clients use. The value is the name of the setting in ``[[limit]]``."""

    CONNECTIONS = "max_connections"
    SESSIONS = "max_sessions"
    LINKS = "max_links"
    TRANSACTIONS = "max_transactions"
    PREPARED_BRANCHES = "max_prepared_branches"
    QUEUES = "max_queues"
    DURABLE_SUBSCRIPTIONS = "max_durable_subscriptions"
    MESSAGE_BYTES = "max_message_bytes"
    MESSAGES_PER_S = "max_messages_per_s"


#: Resources whose limit for all users has a name of its own in ``[broker]``; the others are called ``broker.NAME_per_user``.
_NAMES: Final = {UserResource.MESSAGE_BYTES: "broker.max_message_bytes"}


class UserLimit(NamedTuple):
    """The largest number of one resource, or 0 for no limit, and the setting that says so."""

    most: int
    setting: str


@dataclass(frozen=True, slots=True)
class LimitRule:
    """The limits that users and roles have instead of those for all users."""

    users: frozenset[str]
    roles: frozenset[str]
    most: Mapping[UserResource, int]


class LimitRules:
    """The limits of all users."""

    def __init__(self, defaults: Mapping[UserResource, int], rules: Iterable[LimitRule] = (), roles: UserRoles | None = None) -> None:
        """``roles`` may change at any time: later calls of ``of`` use the new ones."""
        self._defaults = defaults
        self._rules = tuple(rules)
        self._roles = UserRoles({}) if roles is None else roles

    def of(self, user: str, resource: UserResource) -> UserLimit:
        """Return the limit of a user on one resource."""
        return _limit(self, user, resource, self._roles.with_lent(user))

    def find(self, user: str, resource: UserResource, roles: frozenset[str]) -> UserLimit:
        """Return the limit of a user with these roles on one resource from the rules."""
        rules = [rule for rule in self._rules if resource in rule.most]
        of_user = [(rule.most[resource], f"user {user!r}") for rule in rules if user in rule.users]
        of_roles = [(rule.most[resource], f"role {role!r}") for rule in rules for role in sorted(rule.roles & roles)]
        for found in (of_user, of_roles):
            if found:
                most, whose = max(found, key=lambda each: each[0] or float("inf"))
                return UserLimit(most, f"{resource} in [[limit]] of {whose}")
        return UserLimit(self._defaults.get(resource, 0), _NAMES.get(resource, f"broker.{resource}_per_user"))


@peer_cache(entries=10_000, entry_bytes=2048)
def _limit(rules: LimitRules, user: str, resource: UserResource, roles: frozenset[str]) -> UserLimit:
    return rules.find(user, resource, roles)


#: No limits.
UNLIMITED: Final = LimitRules({})
