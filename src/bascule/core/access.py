"""Rules that give permissions to roles, by address. The words, and the choice of the rule, are those of Artemis' security settings.

The most specific rule that matches an address decides alone: nothing is inherited from other rules. An address that no rule matches is
denied to everybody. A subscriber of an address with wildcards consumes from all addresses that it matches, so each rule that decides for
one of them must give the permission.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bascule.core.address_index import AddressIndex
from bascule.core.caches import peer_cache
from bascule.core.destination import has_wildcards, specificity
from bascule.core.pattern_relations import covers, overlaps
from bascule.core.permissions import AccessDecision, AllowAll, Permission, Unauthorized
from bascule.core.roles import UserRoles

#: In a rule: all clients, whatever their roles.
ANY_ROLE: Final = "*"
_NO_ROLES: Final[frozenset[str]] = frozenset()
#: Words of a topic with wildcards that a client may subscribe to: it is compared with each rule, word by word.
PATTERN_WORDS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class AccessRule:
    """A pattern of addresses, and the roles that have each permission on them."""

    match: str
    roles: Mapping[Permission, frozenset[str]]


class AccessRules:
    """Gives permissions by rules (``bascule.core.permissions.Permissions``)."""

    def __init__(self, rules: Iterable[AccessRule], roles: UserRoles) -> None:
        """``roles`` may change at any time; the next decision uses the new ones."""
        self._rules = sorted(rules, key=lambda rule: specificity(rule.match))
        self._index = AddressIndex((rule.match, number) for number, rule in enumerate(self._rules))
        self._roles = roles

    def with_roles(self, roles: frozenset[str]) -> ClientAccess:
        """Return the permissions of a client that has roles by its token, besides those of its user."""
        return ClientAccess(self, roles)

    def authorize(self, user: str, permission: Permission, address: str, roles: frozenset[str] = _NO_ROLES) -> None:
        """Raise Unauthorized if ``user`` lacks ``permission`` on ``address``. ``roles`` are those of a token."""
        rules, users_roles = _deciding(self, permission, address), self._roles_of(user, roles)
        if not rules or not all(self._given(rule, permission, users_roles) for rule in rules):
            raise Unauthorized(user, permission, address)

    def owns(self, user: str, owner: str) -> bool:
        """Return whether ``user`` may use a durable subscription or a branch that ``owner`` has made ("" for the broker's owner)."""
        return owner in ("", user)

    def decide(self, user: str, permission: Permission, address: str, roles: frozenset[str] = _NO_ROLES) -> AccessDecision:
        """Return whether ``user`` has ``permission`` on ``address``, and why. ``roles`` are those of a token."""
        rules, users_roles = _deciding(self, permission, address), self._roles_of(user, roles)
        if not rules:
            matched = "each address of" if _is_subscribed_pattern(permission, address) else "address"
            return AccessDecision(False, None, f"no [[permission]] matches {matched} {address!r}, so no client has a permission on it")
        refusing = next((rule for rule in rules if not self._given(rule, permission, users_roles)), None)
        rule = refusing or rules[0]
        has = ", ".join(sorted(users_roles)) or "no role"
        gives = ", ".join(sorted(rule.roles.get(permission, _NO_ROLES))) or "nobody"
        return AccessDecision(
            refusing is None, rule.match, f"[[permission]] {rule.match!r} gives {permission.value!r} to {gives}; user {user!r} has {has}"
        )

    def deciding(self, address: str) -> tuple[AccessRule, ...]:
        """Return the most specific rule that matches an address, or nothing."""
        found = self._index.matching(address)
        return (self._rules[found[-1]],) if found else ()

    def deciding_of_pattern(self, pattern: str) -> tuple[AccessRule, ...]:
        """Return all rules that decide for some address that a pattern matches; nothing if no rule matches all of these addresses.

        Nobody may use a pattern of more than ``PATTERN_WORDS_MAX`` words.
        """
        if pattern.count(".") >= PATTERN_WORDS_MAX:
            return ()
        widest = max((number for number, rule in enumerate(self._rules) if covers(rule.match, pattern)), default=None)
        if widest is None:
            return ()
        # The widest rule need not match addresses that begin with a dot, for which only rules with a leading ``#`` can decide.
        dotted = pattern.startswith("#")
        others = [
            rule for number, rule in enumerate(self._rules)
            if (number > widest or (dotted and number < widest and rule.match.startswith("#."))) and overlaps(rule.match, pattern)
        ]  # fmt: skip
        return (self._rules[widest], *others)

    def _roles_of(self, user: str, roles: frozenset[str]) -> frozenset[str]:
        own = self._roles.of(user)
        return own | roles if roles else own

    def _given(self, rule: AccessRule, permission: Permission, roles: frozenset[str]) -> bool:
        required = rule.roles.get(permission, _NO_ROLES)
        return ANY_ROLE in required or not required.isdisjoint(roles)


class ClientAccess:
    """The permissions of one client, which has roles by its token."""

    def __init__(self, rules: AccessRules, roles: frozenset[str]) -> None:
        self._rules = rules
        self._roles = roles

    def with_roles(self, roles: frozenset[str]) -> ClientAccess:
        """Return the permissions of a client with these roles by its token."""
        return ClientAccess(self._rules, roles)

    def authorize(self, user: str, permission: Permission, address: str) -> None:
        """Raise Unauthorized if ``user`` lacks ``permission`` on ``address``."""
        self._rules.authorize(user, permission, address, self._roles)

    def owns(self, user: str, owner: str) -> bool:
        """Return whether ``user`` may use a durable subscription or a branch that ``owner`` has made ("" for the broker's owner)."""
        return self._rules.owns(user, owner)


class CurrentPermissions:
    """The permissions by the settings, which may change at any time: assign to ``now``."""

    def __init__(self, now: AllowAll | AccessRules) -> None:
        self.now = now

    def with_roles(self, roles: frozenset[str]) -> CurrentAccess:
        """Return the permissions of a client that has roles by its token, besides those of its user."""
        return CurrentAccess(self, roles)

    def authorize(self, user: str, permission: Permission, address: str) -> None:
        """Raise Unauthorized if ``user`` lacks ``permission`` on ``address``."""
        self.now.authorize(user, permission, address)

    def owns(self, user: str, owner: str) -> bool:
        """Return whether ``user`` may use a durable subscription or a branch that ``owner`` has made ("" for the broker's owner)."""
        return self.now.owns(user, owner)


class CurrentAccess(CurrentPermissions):
    """The current permissions of one client, which has roles by its token."""

    def __init__(self, current: CurrentPermissions, roles: frozenset[str]) -> None:
        self._current = current
        self._roles = roles

    @property
    def now(self) -> AllowAll | ClientAccess:  # type: ignore[override]  # follows the permissions of all clients
        """Return the permissions by the rules of this moment."""
        return self._current.now.with_roles(self._roles)


def _is_subscribed_pattern(permission: Permission, address: str) -> bool:
    """Return whether an address stands for several: only topics of consumers have wildcards."""
    return permission is Permission.CONSUME and has_wildcards(address)


def _deciding(rules: AccessRules, permission: Permission, address: str) -> tuple[AccessRule, ...]:
    """Return the rules that must all give a permission on an address."""
    return _of_pattern(rules, address) if _is_subscribed_pattern(permission, address) else _of_address(rules, address)


@peer_cache(entries=10_000, entry_bytes=2048)
def _of_address(rules: AccessRules, address: str) -> tuple[AccessRule, ...]:
    return rules.deciding(address)


@peer_cache(entries=256, entry_bytes=16_384)
def _of_pattern(rules: AccessRules, pattern: str) -> tuple[AccessRule, ...]:
    return rules.deciding_of_pattern(pattern)
