"""Multi-frame messages: their frames are built as the peer's window and the application's transport allow."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

from bascule.amqp.frames import frame_head
from bascule.amqp.limits import FRAME_SIZE_BYTES_MIN
from bascule.amqp.performatives import Transfer

if TYPE_CHECKING:
    from bascule.amqp.link import SenderLink
    from bascule.amqp.session import Session

#: Bytes of one delivery before the other deliveries of its session have their turn.
DELIVERY_TURN_BYTES: Final = 64 * 1024


#: Bytes of a message, possibly without a copy.
Buffer: TypeAlias = bytes | memoryview


class JoinedParts:
    """The parts of a message as one sequence of bytes. Only what is read across two parts is copied."""

    __slots__ = ("_first", "_rest", "size_bytes")

    def __init__(self, parts: tuple[Buffer, ...]) -> None:
        """Join the parts. All but the last one are short."""
        self._first = b"".join(parts[:-1])
        self._rest = memoryview(parts[-1])
        self.size_bytes = len(self._first) + len(self._rest)

    def read(self, start: int, end: int) -> Buffer:
        """Return the bytes from ``start`` up to but not including ``end``."""
        split = len(self._first)
        if start >= split:
            return self._rest[start - split : end - split]
        return self._first[start:end] + self._rest[: max(0, end - split)]


class OutgoingDelivery:
    """A message whose first frame is written; ``rest_bytes`` are unwritten."""

    __slots__ = ("_final", "_final_room_bytes", "_message", "_middle_head", "_middle_room_bytes", "_position", "link")

    def __init__(self, link: SenderLink, message: JoinedParts, written_bytes: int, *, settled: bool | None, frame_bytes: int) -> None:
        """``frame_bytes`` is the maximum frame size. The first ``written_bytes`` of the message are written."""
        self.link = link
        self._message = message
        self._position = written_bytes
        channel = link.session.channel
        self._final = Transfer(link.handle, settled=settled)
        self._final_room_bytes = frame_bytes - len(frame_head(channel, self._final, 0))
        middle = Transfer(link.handle, settled=settled, more=True)
        self._middle_room_bytes = frame_bytes - len(frame_head(channel, middle, 0))
        self._middle_head = frame_head(channel, middle, self._middle_room_bytes)  # of all frames but the last

    @property
    def size_bytes(self) -> int:
        """The size of the message, which is kept in memory until its last frame is written."""
        return self._message.size_bytes

    @property
    def rest_bytes(self) -> int:
        """The number of unwritten bytes."""
        return self._message.size_bytes - self._position

    def next_frame(self) -> tuple[bytes, Buffer]:
        """Return head and payload of the next frame."""
        start, rest_bytes = self._position, self.rest_bytes
        if rest_bytes <= self._final_room_bytes:
            head, self._position = frame_head(self.link.session.channel, self._final, rest_bytes), self._message.size_bytes
        else:
            head, self._position = self._middle_head, start + self._middle_room_bytes
        return head, self._message.read(start, self._position)


class OutgoingMessages:
    """The multi-frame messages of all sessions of a connection.

    ``frame_bytes_max`` is the maximum frame size, ``left_bytes`` the room in the current piece. A message is kept in memory until its last
    frame is written: ``kept_bytes`` is the size of these messages, ``unwritten_bytes`` the unwritten part of it.
    """

    __slots__ = ("frame_bytes_max", "kept_bytes", "left_bytes", "piece_bytes", "sessions", "unwritten_bytes")

    def __init__(self, piece_bytes: int) -> None:
        """``piece_bytes`` is the number of bytes to build before the application writes."""
        self.piece_bytes = self.left_bytes = piece_bytes
        self.frame_bytes_max = FRAME_SIZE_BYTES_MIN
        self.kept_bytes = self.unwritten_bytes = 0
        self.sessions: dict[Session, OutgoingDeliveries] = {}  # sessions that may write more

    def write_more(self) -> None:
        """Write frames of the sessions in turns until the piece is full."""
        for session, deliveries in list(self.sessions.items()):
            if self.left_bytes <= 0:
                break
            self.sessions[session] = self.sessions.pop(session)  # move to the end
            deliveries.write_more()


class OutgoingDeliveries:
    """The deliveries of one session with unwritten frames.

    The deliveries take turns, so a large message delays only the messages of its own link.
    """

    __slots__ = ("_deliveries", "_messages", "_session")

    def __init__(self, session: Session, messages: OutgoingMessages) -> None:
        self._session = session
        self._messages = messages
        self._deliveries: deque[OutgoingDelivery] = deque()

    def __bool__(self) -> bool:
        return bool(self._deliveries)

    def append(self, delivery: OutgoingDelivery) -> None:
        """Store the rest of a message whose first frames are written. Its link shows no credit until all frames are written."""
        self._deliveries.append(delivery)
        self._messages.kept_bytes += delivery.size_bytes
        self._messages.unwritten_bytes += delivery.rest_bytes
        delivery.link.hold()

    def write_more(self) -> None:
        """Write the next frames of the deliveries in turns, as the peer's window and the piece allow."""
        session, messages = self._session, self._messages
        while self._deliveries and session.window_open and messages.left_bytes > 0:
            delivery = self._deliveries.popleft()
            self._forget(delivery)
            session.write_frames(delivery, min(DELIVERY_TURN_BYTES, messages.left_bytes))
            if delivery.rest_bytes:
                self.append(delivery)
            else:
                delivery.link.let_go()
        self.plan()

    def plan(self) -> None:
        """Schedule the next piece if the peer accepts more."""
        if self._deliveries and self._session.window_open:
            self._messages.sessions[self._session] = self
        else:
            self._messages.sessions.pop(self._session, None)

    def drop(self, link: SenderLink | None = None) -> None:
        """Remove the delivery of a link, or all deliveries; write no more of their frames."""
        deliveries, self._deliveries = self._deliveries, deque()
        for delivery in deliveries:
            if link is None or delivery.link is link:
                self._forget(delivery)
                delivery.link.sending = False
            else:
                self._deliveries.append(delivery)
        if not self._deliveries:
            self._messages.sessions.pop(self._session, None)

    def _forget(self, delivery: OutgoingDelivery) -> None:
        self._messages.kept_bytes -= delivery.size_bytes
        self._messages.unwritten_bytes -= delivery.rest_bytes
