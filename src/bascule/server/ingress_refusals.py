"""Records of messages that the user of an ingress may not send: in the audit, and in the log."""

from __future__ import annotations

from typing import Final

from bascule.core.log import get_log
from bascule.core.permissions import Unauthorized
from bascule.server.audit import AuditTrail

log = get_log(__name__)

#: Where the audit says that a message comes from.
FROM_INGRESS: Final = "ingress"
#: Refusals that are logged once each. The audit and the metric of dead letters count all of them.
LOGGED_MAX: Final = 1_000


class IngressRefusals:
    """Records each refusal in the audit, and the first one of each user, permission and address in the log."""

    def __init__(self, audit: AuditTrail) -> None:
        self._audit = audit
        self._logged: set[tuple[str, str, str]] = set()

    def record(self, refusal: Unauthorized) -> None:
        """Record that a message of an ingress has become a dead letter."""
        user, permission, address = refusal.user, refusal.permission.value, refusal.address
        self._audit.record(permission, address, who=user, peer=FROM_INGRESS, allowed=False, result=str(refusal))
        if (user, permission, address) not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add((user, permission, address))
            log.warning("message of an ingress refused, it is a dead letter", user=user, permission=permission, address=address)
