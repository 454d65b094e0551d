"""Frames of large messages that wait for the peer's window."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.amqp.connection import Connection
    from bascule.amqp.link import Link


class OutgoingFrames:
    """The frames of one session that its window holds back, in order; the connection knows what those of all its sessions take."""

    __slots__ = ("_connection", "_frames")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._frames: deque[tuple[Link, bytes, bytes]] = deque()

    def __bool__(self) -> bool:
        return bool(self._frames)

    def append(self, link: Link, head: bytes, payload: bytes) -> None:
        """A frame of a message on ``link``."""
        self._frames.append((link, head, payload))
        self._connection.queued_bytes += len(head) + len(payload)

    def pop(self) -> tuple[bytes, bytes]:
        """Take out the next frame: head and payload."""
        _, head, payload = self._frames.popleft()
        self._connection.queued_bytes -= len(head) + len(payload)
        return head, payload

    def drop(self, link: Link | None = None) -> None:
        """Forget the frames of a link, or all."""
        frames, self._frames = self._frames, deque()
        for owner, head, payload in frames:
            if link is None or owner is link:
                self._connection.queued_bytes -= len(head) + len(payload)
            else:
                self._frames.append((owner, head, payload))
