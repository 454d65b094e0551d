"""When a change of a setting takes effect while a process runs. Each setting states it with its type: ``port: AtRestart[Port]``."""

from __future__ import annotations

import enum
from typing import Annotated, TypeVar

T = TypeVar("T")


class ReloadEffect(enum.Enum):
    """When a reload of the settings changes a setting. The value is the word of the reference page."""

    #: At once, for all that exists.
    AT_ONCE = "at once"
    #: For connections, logins, transactions and messages that begin after the reload.
    NEW = "new"
    #: Only when the process starts.
    RESTART = "restart"


AtOnce = Annotated[T, ReloadEffect.AT_ONCE]
ForNew = Annotated[T, ReloadEffect.NEW]
AtRestart = Annotated[T, ReloadEffect.RESTART]
