"""The diverts that act as a user: which ones there are, and what the broker records about a change of its decisions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

from bascule.broker.divert_access import NEEDED, DivertAccess, DivertUser, changed_decisions
from bascule.config.pipeline import Divert
from bascule.config.settings import Settings
from bascule.core.log import get_log
from bascule.core.permissions import Permission, Permissions, Unauthorized
from bascule.jms.record import destination
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


def refused_pipelines(settings: Settings, permissions: Permissions) -> list[str]:
    """Return what the permissions of these settings refuse to the users of pipelines, as far as it is known before a pipeline runs."""
    diverts = {each.name: user for each in settings.divert if (user := user_of(each)) is not None}
    found = [
        f"divert {name!r} will be stopped: {said.reason}"
        for name, said in changed_decisions(diverts, {}, permissions, 0).items()
        if said is not None and not said.allowed
    ]
    for ingress in settings.ingress:
        address, _ = destination(ingress.to)
        if ingress.user is not None and "${" not in address:
            try:
                permissions.authorize(ingress.user, Permission.SEND, address)
            except Unauthorized as error:
                found.append(f"messages of ingress {ingress.name!r} will be dead letters: {error}")
    return found


def pipelines_of(settings: Settings, user: str) -> list[str]:
    """Return the pipelines in the settings that act as a user."""
    return [
        f"{kind} {each.name}" for kind, pipelines in (("divert", settings.divert), ("ingress", settings.ingress))
        for each in pipelines if each.user == user
    ]  # fmt: skip
