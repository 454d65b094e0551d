"""The roles that the settings name: in ``[[permission]]``, ``[[limit]]`` and ``[admin]``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from bascule.config.admin import Admin
from bascule.config.limit import Limit
from bascule.config.permission import PermissionRule
from bascule.core.access import ANY_ROLE


class UnknownRole(NamedTuple):
    """A role that no user has: where the settings name it, and a text about it."""

    path: tuple[str | int, ...]
    reason: str


def unknown_role(
    permissions: Sequence[PermissionRule], limits: Sequence[Limit], admin: Admin, roles: Collection[str]
) -> UnknownRole | None:
    """Return the first named role that is not one of ``roles``, which have users. A misspelt role would give its permission to nobody."""
    for path, named in _named(permissions, limits, admin):
        for role in named:
            if role not in roles and (role != ANY_ROLE or path[0] == "limit"):
                known = f"known are {', '.join(roles)}" if roles else "[broker.roles] defines none"
                return UnknownRole(path, f"there is no role {role!r}; {known}")
    return None


def _named(
    permissions: Sequence[PermissionRule], limits: Sequence[Limit], admin: Admin
) -> Iterator[tuple[tuple[str | int, ...], tuple[str, ...]]]:
    for position, rule in enumerate(permissions):
        for key, roles in rule.given().items():
            yield ("permission", position, key), roles
    for position, limit in enumerate(limits):
        yield ("limit", position, "roles"), limit.roles
    for key in ("view", "edit", "manage"):
        yield ("admin", key), getattr(admin, key)
