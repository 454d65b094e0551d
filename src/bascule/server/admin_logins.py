"""The credentials of the admin server by the settings: tokens, users, and the token of the broker's owner in the data directory."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from bascule.config import Settings
from bascule.config.admin import Admin
from bascule.config.private_file import replace_private
from bascule.core.access import ANY_ROLE
from bascule.core.defaults import OWNER_TOKEN_FILE
from bascule.core.roles import UserRoles
from bascule.server.admin_access import AdminAccess, AdminRole
from bascule.server.audit import NO_AUDIT, AuditTrail
from bascule.server.logins import LoginChecks
from bascule.server.user_directory import UserDirectory

OWNER_TOKEN_BYTES: Final = 32


def admin_access(
    settings: Settings, users: UserDirectory, logins: LoginChecks, audit: AuditTrail = NO_AUDIT, before: AdminAccess | None = None
) -> AdminAccess:
    """Return who may use the admin server. Without users and tokens, every process of this machine may.

    With users or tokens, write a token for commands on this machine into a file that only the user of this process can read. ``logins``
    also checks the passwords and tokens of AMQP clients, so guesses at one port count at the other. The token of ``before`` stays.
    Raises OSError.
    """
    admin, broker = settings.admin, settings.broker
    path = Path(settings.embedded.data_dir) / OWNER_TOKEN_FILE
    restricted = admin.restricted or broker.has_logins
    hosts = (admin.host, socket.gethostname(), *admin.hosts)
    if not restricted:
        path.unlink(missing_ok=True)
        return AdminAccess(hosts=hosts, audit=audit, public_metrics=admin.public_metrics)
    kept = None if before is None else before.tokens.get("owner")
    tokens = {"owner": kept or (_write_owner_token(path), AdminRole.MANAGE)}
    for setting, role in (("view_token", AdminRole.VIEW), ("edit_token", AdminRole.EDIT), ("token", AdminRole.MANAGE)):
        if (token := getattr(admin, setting)) is not None:
            tokens[f"admin.{setting}"] = token.get_secret_value(), role
    return AdminAccess(
        restricted=True, tokens=tokens, role_of=partial(_role, admin, users.roles), check=_password_check(users, logins),
        identify=logins.identify if broker.oidc.enabled else None, knows=users.knows if admin.tls.only_known_users else lambda _: True,
        password_of=users.password_of, hosts=hosts, audit=audit, public_metrics=admin.public_metrics,
        insecure=broker.allow_insecure,
    )  # fmt: skip


def _role(admin: Admin, roles: UserRoles, user: str, of_token: frozenset[str]) -> AdminRole | None:
    """Return the highest role of a user, by the roles that the user has now and those of the user's token."""
    held = {ANY_ROLE, *roles.of(user), *of_token}
    return max((role for role in AdminRole if not held.isdisjoint(getattr(admin, role.word))), default=None)


def _password_check(users: UserDirectory, logins: LoginChecks) -> Callable[[str, str, str], Awaitable[bool]]:
    """Return a check of a user's password beside the event loop."""

    async def check(user: str, password: str, address: str) -> bool:
        return await logins.check(partial(users.check, user, password), user, address)

    return check


def _write_owner_token(path: Path) -> str:
    """Write a new token, so that a reader finds the whole token or none."""
    token = secrets.token_urlsafe(OWNER_TOKEN_BYTES)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a link is not followed
    replace_private(path, token.encode())
    return token
