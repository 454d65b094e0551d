"""The identity of a bridge."""

from __future__ import annotations

from pydantic import Field

from bascule.config.fields import Name, Section
from bascule.config.reload_effect import AtRestart
from bascule.core.topics import BRIDGE_ID


class Bridge(Section):
    """Identity of this bridge."""

    id: AtRestart[Name] = Field(
        default=BRIDGE_ID,
        description="Name of this bridge. It is part of the transactional ids and of the origin header that prevents loops",
    )
