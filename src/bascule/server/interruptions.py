"""Clients that come back after their connection broke, as far as a broker can know it.

Qpid JMS says nothing of it: its ``failover:`` opens a connection like any other. What it does then with the transaction that the
interruption fell into is in :mod:`bascule.server.coordinator`.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

#: What Qpid JMS calls itself in its open frame.
PRODUCT: Final = "QpidJMS"
#: After a broker has begun to serve: whoever connects may have been a client of the one before. Longer than a client of Qpid JMS
#: waits between two tries (``failover.maxReconnectDelay``, 30 s).
RETURN_S: Final = 60.0
#: Clients that are remembered: more than come back from one interruption.
REMEMBERED_MAX: Final = 10_000


class Past(enum.Enum):
    """What lies behind a connection."""

    #: No client of Qpid JMS.
    OTHER = enum.auto()
    #: Most likely nothing.
    FRESH = enum.auto()
    #: An interruption, perhaps in the middle of a transaction.
    INTERRUPTED = enum.auto()


class Interruptions:
    """Who lost its connection to this broker, and who may have lost one to another."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """``clock_s`` counts seconds."""
        self._clock_s = clock_s
        self._serves_since_s = clock_s()
        self._lost: dict[str, frozenset[str]] = {}

    def serving(self) -> None:
        """The broker begins to serve."""
        self._serves_since_s = self._clock_s()

    def lost(self, container: str, begun_anew: frozenset[str] = frozenset()) -> None:
        """The connection of a client has ended without its asking for it. ``begun_anew``: coordinator links whose sessions were told so."""
        self._lost.pop(container, None)
        self._lost[container] = begun_anew
        if len(self._lost) > REMEMBERED_MAX:
            del self._lost[next(iter(self._lost))]

    def opened(self, container: str, properties: Mapping[Any, Any] | None) -> tuple[Past, frozenset[str]]:
        """A client opens a connection: what lies behind it, and what ``lost`` was told of coordinator links."""
        begun_anew = self._lost.pop(container, None)
        if (properties or {}).get("product") != PRODUCT:
            return Past.OTHER, frozenset()
        if begun_anew is None:
            recent = self._clock_s() - self._serves_since_s < RETURN_S
            return Past.INTERRUPTED if recent else Past.FRESH, frozenset()
        return Past.INTERRUPTED, begun_anew
