"""Rules that give permissions to roles, by address. The words, and the choice of the rule, are those of Artemis' security settings.

The most specific rule that matches an address decides alone: nothing is inherited from other rules. An address that no rule matches is
denied to everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bascule.core.address_index import AddressIndex
from bascule.core.caches import peer_cache
from bascule.core.destination import specificity
from bascule.core.permissions import AccessDecision, Permission, Unauthorized
from bascule.core.roles import UserRoles

#: In a rule: all clients, whatever their roles.
ANY_ROLE: Final = "*"


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

    def authorize(self, user: str, permission: Permission, address: str) -> None:
        """Raise Unauthorized if ``user`` lacks ``permission`` on ``address``."""
        rule = _deciding(self, address)
        if rule is None or not self._given(rule, user, permission):
            raise Unauthorized(user, permission, address)

    def owns(self, user: str, owner: str) -> bool:
        """Return whether ``user`` may use a durable subscription or a branch that ``owner`` has made ("" for the broker's owner)."""
        return owner in ("", user)

    def decide(self, user: str, permission: Permission, address: str) -> AccessDecision:
        """Return whether ``user`` has ``permission`` on ``address``, and why."""
        rule = _deciding(self, address)
        if rule is None:
            return AccessDecision(False, None, f"no [[permission]] matches address {address!r}, so nobody has any permission on it")
        roles = rule.roles.get(permission, frozenset())
        has = ", ".join(sorted(self._roles.of(user))) or "no role"
        gives = ", ".join(sorted(roles)) or "nobody"
        allowed = self._given(rule, user, permission)
        return AccessDecision(
            allowed, rule.match, f"[[permission]] {rule.match!r} gives {permission.value!r} to {gives}; user {user!r} has {has}"
        )

    def matching(self, address: str) -> AccessRule | None:
        """Return the most specific rule that matches an address."""
        found = self._index.matching(address)
        return self._rules[found[-1]] if found else None

    def _given(self, rule: AccessRule, user: str, permission: Permission) -> bool:
        roles = rule.roles.get(permission, frozenset())
        return ANY_ROLE in roles or not roles.isdisjoint(self._roles.of(user))


@peer_cache(entries=10_000, entry_bytes=2048)
def _deciding(rules: AccessRules, address: str) -> AccessRule | None:
    return rules.matching(address)
