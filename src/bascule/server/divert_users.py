"""The diverts that act as a user: which ones there are, and what the broker records about a change of its decisions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

from bascule.broker.divert_access import NEEDED, DivertAccess, DivertUser, changed_decisions
from bascule.config.pipeline import Divert
from bascule.core.log import get_log
from bascule.core.permissions import Permissions
from bascule.server.audit import AuditTrail

log = get_log(__name__)

#: Where the audit says that messages go.
FROM_DIVERT: Final = "divert"


class DivertUsers:
    """The users of the diverts in the settings, and the permissions of now."""

    def __init__(self, diverts: Iterable[Divert], permissions: Permissions, audit: AuditTrail) -> None:
        self._configured = {each.name: user_of(each) for each in diverts}
        self._permissions = permissions
        self._audit = audit

    def changes(self, defined: Mapping[str, DivertUser], stored: Mapping[str, DivertAccess]) -> dict[str, DivertAccess | None]:
        """Return the decisions to store. ``defined`` are the diverts that are defined at run time; those of the settings win."""
        named = {name: user for name, user in self._configured.items() if user is not None}
        others = {name: user for name, user in defined.items() if name not in self._configured}
        return changed_decisions({**others, **named}, stored, self._permissions, time.time_ns() // 1_000_000)

    def record(self, name: str, said: DivertAccess, before: DivertAccess | None) -> None:
        """Record a decision that is stored: each refusal, and an approval that follows a refusal."""
        if said.allowed and (before is None or before.allowed):
            return
        self._audit.record(
            NEEDED.value, said.address, who=said.user, peer=FROM_DIVERT, allowed=said.allowed, result=said.reason or "ok", divert=name
        )
        if said.allowed:
            log.info("divert allowed again", divert=name, user=said.user, address=said.address)
        else:
            log.warning("divert refused, its user may not consume", divert=name, user=said.user, address=said.address)


def user_of(divert: Divert) -> DivertUser | None:
    """Return the user of a divert; None if it acts as the owner of the broker."""
    return None if divert.user is None else DivertUser(divert.user, divert.from_address)
