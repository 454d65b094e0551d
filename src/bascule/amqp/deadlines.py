"""The times of a connection: how long its peer may take, and when the peer wants to hear of us."""

from __future__ import annotations

from typing import Final

from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, AmqpError, ConnectionFault, LimitExceeded
from bascule.amqp.limits import HEARTBEAT_INTERVAL_S_MIN, ConnectionLimits
from bascule.amqp.states import CLOSING, PEER_NOT_OPEN, ConnectionState

NEVER: Final = float("inf")
#: Heartbeats go three times in the peer's idle timeout: one late timer must not cost the connection.
_HEARTBEATS_PER_TIMEOUT: Final = 3


class Deadlines:
    """Times in seconds of a monotonic clock."""

    __slots__ = ("_close_due_s", "_heartbeat_due_s", "_idle_timeout_s", "_limits", "_received_s", "_started_s", "sent")

    def __init__(self, limits: ConnectionLimits, idle_timeout_s: float | None, started_s: float | None) -> None:
        """``started_s`` None: with the first input or look."""
        self._limits = limits
        self._idle_timeout_s = idle_timeout_s
        self._started_s = started_s
        self._received_s = 0.0
        self._close_due_s: float | None = None
        self._heartbeat_due_s = 0.0
        self.sent = False  # something, since the last heartbeat was due

    def received(self, now_s: float) -> None:
        """The peer has sent something."""
        self._received_s = now_s
        if self._started_s is None:
            self._started_s = now_s

    def look(self, state: ConnectionState, now_s: float) -> tuple[float, AmqpError | None]:
        """Return when to look again, and what the peer has missed. A peer that does not answer a close misses nothing that it is told."""
        if self._started_s is None:
            self._started_s = now_s
        if state in CLOSING:
            if self._close_due_s is None:
                self._close_due_s = now_s + self._limits.close_timeout_s
            return self._close_due_s, None
        due_s, missed = NEVER, ""
        if state in PEER_NOT_OPEN:
            due_s, missed = self._started_s + self._limits.handshake_timeout_s, f"not open after {self._limits.handshake_timeout_s} s"
            return due_s, LimitExceeded(missed) if now_s >= due_s else None
        if self._idle_timeout_s:
            due_s, missed = self._received_s + self._idle_timeout_s, f"nothing heard for {self._idle_timeout_s} s"
        return due_s, ConnectionFault(RESOURCE_LIMIT_EXCEEDED, missed) if now_s >= due_s else None

    def heartbeat(self, idle_time_out_ms: int | None, now_s: float) -> tuple[float, bool]:
        """Return when the next heartbeat is due, and whether one is due now."""
        if not idle_time_out_ms:
            return NEVER, False
        due = False
        if now_s >= self._heartbeat_due_s:
            due, self.sent = not self.sent, False
            self._heartbeat_due_s = now_s + max(idle_time_out_ms / 1000 / _HEARTBEATS_PER_TIMEOUT, HEARTBEAT_INTERVAL_S_MIN)
        return self._heartbeat_due_s, due
