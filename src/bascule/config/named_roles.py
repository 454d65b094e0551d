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
    permissions: Sequence[PermissionRule], limits: Sequence[Limit], admin: Admin, roles: Collection[str], of_tokens: Collection[str]
) -> UnknownRole | None:
    """Return the first named role that is not one of ``roles``, which have users, and that no token may give.

    A misspelt role would give its permission to nobody. A limit counts what all clients of a user use, so a role of tokens has none: each
    client has the roles of its own token.
    """
    of_users = dict.fromkeys(roles)
    of_all = dict.fromkeys((*roles, *of_tokens))
    for path, named in _named(permissions, limits, admin):
        is_limit = path[0] == "limit"
        known = of_users if is_limit else of_all
        for role in named:
            if role in known or (role == ANY_ROLE and not is_limit):
                continue
            if role in of_tokens:
                return UnknownRole(path, f"only tokens give the role {role!r}; a limit is for users, or for roles of [broker.roles]")
            others = f"known are {', '.join(known)}" if known else "[broker.roles] defines none"
            return UnknownRole(path, f"there is no role {role!r}; {others}")
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
