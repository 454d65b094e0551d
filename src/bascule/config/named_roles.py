"""The roles that the tables ``[[permission]]`` and ``[[limit]]`` name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from bascule.config.limit import Limit
from bascule.config.permission import PermissionRule
from bascule.core.access import ANY_ROLE


class UnknownRole(NamedTuple):
    """A role that no user has, its place, and a text about it."""

    section: str
    position: int
    key: str
    reason: str


def unknown_role(permissions: Sequence[PermissionRule], limits: Sequence[Limit], roles: Collection[str]) -> UnknownRole | None:
    """Return the first named role that is not one of ``roles``, which have users. A misspelt role would give its permission to nobody."""
    for section, position, key, named in _named(permissions, limits):
        for role in named:
            if role not in roles and (role != ANY_ROLE or section == "limit"):
                known = f"known are {', '.join(roles)}" if roles else "[broker.roles] defines none"
                return UnknownRole(section, position, key, f"there is no role {role!r}; {known}")
    return None


def _named(permissions: Sequence[PermissionRule], limits: Sequence[Limit]) -> Iterator[tuple[str, int, str, tuple[str, ...]]]:
    for position, rule in enumerate(permissions):
        for key, roles in rule.given().items():
            yield "permission", position, key, roles
    for position, limit in enumerate(limits):
        yield "limit", position, "roles", limit.roles
