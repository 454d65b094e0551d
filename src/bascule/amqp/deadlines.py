"""The timeouts of a connection and the heartbeats to the peer."""

from __future__ import annotations

from typing import Final

from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, AmqpError, ConnectionFault, LimitExceeded
from bascule.amqp.limits import HEARTBEAT_INTERVAL_S_MIN, ConnectionLimits
from bascule.amqp.states import CLOSING, PEER_NOT_OPEN, ConnectionState

NEVER: Final = float("inf")
#: Heartbeats per idle timeout of the peer: one late timer must not cause a timeout.
_HEARTBEATS_PER_TIMEOUT: Final = 3


class Deadlines:
    """The deadlines of a connection, in seconds of a monotonic clock."""

    __slots__ = ("_close_due_s", "_heartbeat_due_s", "_idle_timeout_s", "_limits", "_started_s", "received_s", "sent")

    def __init__(self, limits: ConnectionLimits, idle_timeout_s: float | None, started_s: float | None) -> None:
        """Set the times. ``started_s`` None: the handshake starts with the first input or check."""
        self._limits = limits
        self._idle_timeout_s = idle_timeout_s
        self._started_s = started_s
        self.received_s = 0.0
        self._close_due_s: float | None = None
        self._heartbeat_due_s = 0.0
        self.sent = False  # whether something was sent since the last heartbeat was due

    def received(self, now_s: float) -> None:
        """Record input of the peer."""
        self.received_s = now_s
        if self._started_s is None:
            self._started_s = now_s

    def look(self, state: ConnectionState, now_s: float) -> tuple[float, AmqpError | None]:
        """Return the time of the next check, and the error of a missed deadline. A missing answer to a close has no error."""
        if self._started_s is None:
            self._started_s = now_s
        if state in CLOSING:
            if self._close_due_s is None:
                self._close_due_s = now_s + self._limits.close_timeout_s
            return self._close_due_s, None
        due_s, missed = NEVER, ""
        if state in PEER_NOT_OPEN:
            due_s, missed = (
                self._started_s + self._limits.handshake_timeout_s,
                f"handshake not complete after {self._limits.handshake_timeout_s} s",
            )
            return due_s, LimitExceeded(missed) if now_s >= due_s else None
        if self._idle_timeout_s:
            due_s, missed = self.received_s + self._idle_timeout_s, f"the peer sent nothing for {self._idle_timeout_s} s"
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
