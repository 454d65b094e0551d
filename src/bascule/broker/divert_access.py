"""Whether the users of diverts may consume the messages that the diverts take: docs/adr/0029-users-of-pipelines.md.

The active broker has the permissions, and the driver of the pipelines does not. So the broker stores its decision in ``PREFIX.control``,
and the driver runs a divert with a user only if a decision for this user and these addresses allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from bascule.core.permissions import Permission, Permissions, Unauthorized

#: The permission that the user of a divert needs on the addresses of the divert.
NEEDED = Permission.CONSUME


class DivertUser(NamedTuple):
    """The user of a divert, and the pattern of the addresses of the divert."""

    user: str
    address: str


@dataclass(frozen=True, slots=True)
class DivertAccess:
    """The decision of the active broker about a divert with a user. ``reason`` says why it is refused; "" if it is allowed."""

    user: str
    address: str
    reason: str = ""
    at_ms: int = 0

    @property
    def allowed(self) -> bool:
        """Return whether the divert may run."""
        return not self.reason


def refusal_of(divert: DivertUser, said: DivertAccess | None) -> str:
    """Return why a divert may not run by the decision that is stored for its name; "" if it may run."""
    if said is None or (said.user, said.address) != divert:
        return (
            f"no active broker has decided whether user {divert.user!r} may consume from {divert.address!r}: no broker is active, or its"
            " configuration has another divert of this name, or none"
        )
    return said.reason


def changed_decisions(
    diverts: Mapping[str, DivertUser], stored: Mapping[str, DivertAccess], permissions: Permissions, now_ms: int
) -> dict[str, DivertAccess | None]:
    """Return the decisions that are to be stored, by divert; None for one that is to be deleted."""
    found: dict[str, DivertAccess | None] = dict.fromkeys(stored.keys() - diverts.keys())
    for name, divert in diverts.items():
        decision = DivertAccess(*divert, _reason(divert, permissions), now_ms)
        before = stored.get(name)
        if before is None or replace(before, at_ms=now_ms) != decision:
            found[name] = decision
    return found


def _reason(divert: DivertUser, permissions: Permissions) -> str:
    try:
        permissions.authorize(divert.user, NEEDED, divert.address)
    except Unauthorized as error:
        return str(error)
    return ""
