"""Clients that come back after their connection broke, as far as a broker can know it.

Qpid JMS says nothing of it: its ``failover:`` opens a connection like any other. What it does then with the transaction that the
interruption fell into is in :mod:`bascule.server.connection_reset`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: What Qpid JMS calls itself in its open frame.
PRODUCT: Final = "QpidJMS"
#: After a broker has begun to serve: whoever connects may have been a client of the one before. Longer than a client of Qpid JMS
#: waits between two tries (``failover.maxReconnectDelay``, 30 s).
RETURN_S: Final = 60.0
#: So long a client may stay away: networks that are mended by hand.
REMEMBERED_S: Final = 3600.0
#: Maximum number of clients that are remembered: more than reconnect after one interruption.
REMEMBERED_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class ConnectionHistory:
    """What lies behind a connection of Qpid JMS."""

    #: When it was interrupted, by the clock of the broker; None: most likely never.
    interrupted_s: float | None = None
    #: Coordinator links of sessions that were waiting for an answer then.
    waited: frozenset[str] = frozenset()
    #: How often the broker has reset it since.
    resets: int = 0


class Interruptions:
    """Who lost its connection to this broker, and who may have lost one to another."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """``clock_s`` counts seconds."""
        self._clock_s = clock_s
        self._serves_since_s = clock_s()
        self._lost: dict[str, ConnectionHistory] = {}

    def serving(self) -> None:
        """The broker begins to serve."""
        self._serves_since_s = self._clock_s()

    def lost(self, container: str, history: ConnectionHistory, waited: frozenset[str] | None = None) -> None:
        """The connection of a client, with this history, has ended without its asking for it. ``waited``: it was reset."""
        told = ConnectionHistory(self._clock_s())
        if waited is not None:
            since_s = told.interrupted_s if history.interrupted_s is None else history.interrupted_s
            told = ConnectionHistory(since_s, waited, history.resets + 1)
        self._lost.pop(container, None)
        self._lost[container] = told
        if len(self._lost) > REMEMBERED_MAX:
            del self._lost[next(iter(self._lost))]

    def opened(self, container: str, properties: Mapping[Any, Any] | None) -> ConnectionHistory | None:
        """A client opens a connection. None: it is not Qpid JMS."""
        if (properties or {}).get("product") != PRODUCT:
            return None
        now_s = self._clock_s()
        history = self._lost.pop(container, None)
        if history is not None and history.interrupted_s is not None and now_s - history.interrupted_s < REMEMBERED_S:
            return history
        return ConnectionHistory(now_s if now_s - self._serves_since_s < RETURN_S else None)
