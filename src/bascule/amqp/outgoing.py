"""Messages in many frames: their frames are made as the peer's window and the application's transport take them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from bascule.amqp.frames import frame_head
from bascule.amqp.performatives import Transfer

if TYPE_CHECKING:
    from bascule.amqp.connection import Connection
    from bascule.amqp.link import SenderLink


class OutgoingDelivery:
    """A message whose first frame is written; ``rest_bytes`` of it are not."""

    __slots__ = ("_final", "_final_room_bytes", "_message", "_middle_head", "_middle_room_bytes", "_position", "link")

    def __init__(self, link: SenderLink, message: bytes, written_bytes: int, *, settled: bool | None, frame_bytes: int) -> None:
        """``frame_bytes`` is the size of a frame at most. The first ``written_bytes`` of the message are written."""
        self.link = link
        self._message = message
        self._position = written_bytes
        channel = link.session.channel
        self._final = Transfer(link.handle, settled=settled)
        self._final_room_bytes = frame_bytes - len(frame_head(channel, self._final, 0))
        middle = Transfer(link.handle, settled=settled, more=True)
        self._middle_room_bytes = frame_bytes - len(frame_head(channel, middle, 0))
        self._middle_head = frame_head(channel, middle, self._middle_room_bytes)  # the same of all but the last

    @property
    def size_bytes(self) -> int:
        """The size of the message, which is kept until its last frame is written."""
        return len(self._message)

    @property
    def rest_bytes(self) -> int:
        """What is not written yet."""
        return len(self._message) - self._position

    def next_frame(self) -> tuple[bytes, bytes]:
        """Return head and payload of the next frame."""
        start, rest_bytes = self._position, self.rest_bytes
        if rest_bytes <= self._final_room_bytes:
            head, self._position = frame_head(self.link.session.channel, self._final, rest_bytes), len(self._message)
        else:
            head, self._position = self._middle_head, start + self._middle_room_bytes
        return head, self._message[start : self._position]


class OutgoingDeliveries:
    """The deliveries of one session whose frames are not all written; the connection knows the size of those of all its sessions.

    They take turns: a large message holds up the messages of its own link only.
    """

    __slots__ = ("_connection", "_deliveries")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._deliveries: deque[OutgoingDelivery] = deque()

    def __bool__(self) -> bool:
        return bool(self._deliveries)

    def append(self, delivery: OutgoingDelivery) -> None:
        """Keep the rest of a message whose first frames are written. Its link shows no credit until all are written."""
        self._deliveries.append(delivery)
        self._connection.queued_bytes += delivery.size_bytes
        self._connection.unwritten_bytes += delivery.rest_bytes
        delivery.link.hold()

    def take(self) -> OutgoingDelivery:
        """Take out the delivery whose turn it is."""
        delivery = self._deliveries.popleft()
        self._forget(delivery)
        return delivery

    def drop(self, link: SenderLink | None = None) -> None:
        """Forget the delivery of a link, or all: no more frames of it are written."""
        deliveries, self._deliveries = self._deliveries, deque()
        for delivery in deliveries:
            if link is None or delivery.link is link:
                self._forget(delivery)
                delivery.link.sending = False
            else:
                self._deliveries.append(delivery)

    def _forget(self, delivery: OutgoingDelivery) -> None:
        self._connection.queued_bytes -= delivery.size_bytes
        self._connection.unwritten_bytes -= delivery.rest_bytes
