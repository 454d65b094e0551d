"""The ends of pipelines where no broker is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bascule.server.answers import AddressDepth
from bascule.server.status import RetentionHoldStatus


class NoFlowEnds:
    """Knows no queue and no hold."""

    def holds(self) -> Mapping[str, RetentionHoldStatus]:
        """Return nothing."""
        return {}

    def depth(self, address: str) -> AddressDepth | None:
        """Return None."""
        return None


NO_FLOW_ENDS: Final = NoFlowEnds()
