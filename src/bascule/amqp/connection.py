"""A connection without IO: bytes in and events out, calls in and bytes out (part 2, section 2.4).

A shell gives what it read to ``receive``, answers the events by methods of connection, sessions and links, then writes
``data_to_send``, and closes its socket where ``closed`` is true; it calls ``tick`` at the latest when the last one said.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from bascule.amqp import frames, hot
from bascule.amqp.composite import Composite, decode_composite
from bascule.amqp.deadlines import NEVER, Deadlines
from bascule.amqp.errors import FRAMING_ERROR, ILLEGAL_STATE, NOT_ALLOWED, AmqpError, ConnectionFault, IllegalUse, LimitExceeded
from bascule.amqp.events import ConnectionClosed, Event, Flowed, Opened
from bascule.amqp.hot_frames import HOT_FRAMES
from bascule.amqp.limits import (
    DELIVERY_FRAME_SIZE_BYTES_MAX,
    FRAME_SIZE_BYTES_DEFAULT,
    FRAME_SIZE_BYTES_MIN,
    PERFORMATIVE_SIZE_BYTES_MAX,
    PRE_OPEN_FRAME_SIZE_BYTES_MAX,
    SASL_FRAME_SIZE_BYTES_MAX,
    ConnectionLimits,
)  # fmt: skip
from bascule.amqp.outgoing import OutgoingMessages
from bascule.amqp.partials import PartialBudget
from bascule.amqp.performatives import Attach, Begin, Close, Detach, Disposition, End, Error, Flow, Open, Role, Transfer
from bascule.amqp.sasl import SaslClient, SaslServer
from bascule.amqp.session import Session
from bascule.amqp.states import CLOSING, CONNECTION, HEADER_DUE, PEER_NOT_OPEN, SPEECHLESS, ConnectionInput, ConnectionState

#: An enum member of the hot path: a class attribute costs as much as a call.
_OPENED: Final = ConnectionState.OPENED
_AMQP_FRAME, _FRAME_HEADER_SIZE, _frame_header_from = frames.AMQP_FRAME, frames.FRAME_HEADER_SIZE, frames.FRAME_HEADER.unpack_from


class Connection:
    """One AMQP connection, as a server or a client.

    ``max_frame_size`` in bytes, ``idle_timeout_s`` is how long the peer may be silent (None: for ever). ``closed`` says that nothing
    more will come or go, once ``data_to_send`` has been sent; ``error`` then says why, where there was a reason. ``login_check`` is
    the check of a password that the peer waits for, or None: call it beside the event loop, and give its result to ``login_checked``.
    """

    def __init__(
        self, role: Role, *, container_id: str, sasl: SaslServer | SaslClient | None = None,
        max_frame_size: int = FRAME_SIZE_BYTES_DEFAULT, idle_timeout_s: float | None = 60.0, limits: ConnectionLimits | None = None,
        require_sasl: bool = False, started_s: float | None = None, in_steps: bool = False,
    ) -> None:  # fmt: skip
        """A client speaks first: fetch ``data_to_send``. ``started_s``: when the handshake began; None: with the first input or tick.

        ``in_steps``: a detach, end, close or breach of the protocol waits until the application has handled the events before it.
        """
        self.role = role
        self.container_id = container_id
        self.limits = limits or ConnectionLimits()
        self.state = ConnectionState.START
        self.remote_open = Open()
        self.remote_max_frame_size = FRAME_SIZE_BYTES_MIN
        self.user: str | None = None
        self.error: AmqpError | None = None
        self.context: Any = None
        self.login_check: Callable[[], bool] | None = None
        #: Goes on with a disposition over more than ConnectionLimits.deliveries_per_piece, or what waits ``in_steps``, before all frames.
        self.unfinished: Callable[[], None] | None = None
        self.out: list[bytes] = []
        self.partial_bytes = 0  # of messages whose last frame has not come
        self.partials = PartialBudget()  # or one that connections share
        self.outgoing = OutgoingMessages(self.limits.frames_per_piece_bytes)
        self.unflushed: list[Session] = []  # sessions with dispositions to write
        self.withholding: dict[Session, None] = {}  # sessions that may give back credit, once all that came is taken
        self.sessions: dict[int, Session] = {}  # by the peer's channel
        self._own_channels: dict[int, Session] = {}
        self._sasl = sasl
        self._require_sasl = require_sasl
        self._in_steps = in_steps
        self._max_frame_size = max(max_frame_size, FRAME_SIZE_BYTES_MIN)
        self._frame_limit = PRE_OPEN_FRAME_SIZE_BYTES_MAX
        self._idle_timeout_s = idle_timeout_s
        self._events: list[Event] = []
        self.emit = self._events.append
        self._held: list[bytes] = []  # frames that wait for our open, which comes before all others
        self._open: Open | None = None
        self._open_sent = False
        self.buffer = frames.FrameBuffer()
        self._needed_bytes = frames.PROTOCOL_HEADER_SIZE
        self._pre_open_bytes = 0
        self._deadlines = Deadlines(self.limits, idle_timeout_s, started_s)
        if role is Role.CLIENT:
            self.out.append(frames.SASL_HEADER if sasl else frames.AMQP_HEADER)

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""
        return self.state is ConnectionState.ENDED

    # --- what the application does -----------------------------------------------------------------------------------------------

    def open(
        self, *, hostname: str | None = None, offered_capabilities: tuple[str, ...] = (), desired_capabilities: tuple[str, ...] = (),
        properties: dict[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        """Open, or answer Opened. A client may call it at once. Nothing happens where the peer is gone already."""
        if self.closed:
            return
        if self._open is not None:
            raise IllegalUse("the connection was opened before")
        self._open = Open(
            self.container_id, hostname, self._max_frame_size, self.limits.channel_max,
            # Half of what we bear, as the standard advises: a peer that is just in time must not be cut off.
            int(self._idle_timeout_s * 500) if self._idle_timeout_s else None,
            offered_capabilities=offered_capabilities, desired_capabilities=desired_capabilities, properties=properties,
        )  # fmt: skip
        if self.state not in SPEECHLESS:
            self._send_open(self._open)

    def login_checked(self, proven: bool) -> list[Event]:
        """Take the result of ``login_check``; returns the events of what has arrived meanwhile."""
        self.login_check = None
        if isinstance(self._sasl, SaslServer) and not self.closed:
            try:
                self._answer_sasl(self._sasl, self._sasl.checked(proven))
                self._consume(self.buffer.take())
            except AmqpError as fault:
                self._fail(fault)
        return self._take_events()

    def begin(self) -> Session:
        """Begin a session; SessionBegun follows. Raises IllegalUse where the peer allows no more."""
        session = self._new_session(None)
        session.begin()
        return session

    def close(self, error: AmqpError | None = None) -> None:
        """Close in order: ConnectionClosed follows when the peer answers. Nothing happens where a close was sent before."""
        if self.closed or self.state in CLOSING:
            return
        if self.state in SPEECHLESS:
            self._end(error, by_peer=False)
            return
        self.error = error
        self._send_close(error)

    def data_to_send(self, *, take_more: bool = True) -> bytes:
        """All bytes due, b"" for none. ``take_more``: the transport has room for another piece of messages in many frames."""
        if take_more:
            self.outgoing.begin_piece()
        self._flush_settled()
        if not self.out:
            return b""
        self._deadlines.sent = True
        data = b"".join(self.out)
        self.out.clear()
        return data

    def send_more(self) -> list[Flowed]:
        """Make the next piece of the messages in many frames, once the transport has room. Returns the links that have credit again."""
        before = len(self._events)
        self.outgoing.write_more()
        flowed, self._events[before:] = self._events[before:], []
        return [event for event in flowed if isinstance(event, Flowed)]

    def tick(self, now_s: float, *, unread: bool = False) -> float:
        """Heartbeats and timeouts; may end the connection. Returns when to call again. ``unread``: what the peer sends is not read now."""
        if self.closed:
            return NEVER
        if unread:
            self._deadlines.received(now_s)
        due_s, fault = self._deadlines.look(self.state, now_s)
        if fault is not None:
            self._fail(fault)
        elif now_s >= due_s:
            self._end(self.error, by_peer=False)  # our close is not answered
        if self.closed:
            return NEVER
        beat_due_s, beats = self._deadlines.heartbeat(self.remote_open.idle_time_out if self._open_sent else None, now_s)
        if beats and not self.out:
            self.out.append(frames.EMPTY_FRAME)
        return min(due_s, beat_due_s)

    # --- what the peer does ------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, now_s: float) -> list[Event]:
        """Take bytes; returns what they mean to the application. Whatever the peer does wrong becomes a close, end or detach."""
        self._deadlines.received(now_s)
        if not self.closed and data:
            self._take_in(data)
        return self._take_events()

    def go_on(self) -> list[Event]:
        """Go on with what is ``unfinished``, and then with the frames behind it; as ``receive``, which must not be called before."""
        unfinished, self.unfinished = self.unfinished, None
        if unfinished is not None and not self.closed:
            try:
                unfinished()
            except AmqpError as fault:
                self._fail(fault)
            if self.unfinished is None:
                self._take_in(b"")
        return self._take_events()

    def _take_in(self, data: bytes) -> None:
        try:
            if self.state is not _OPENED:
                self._receive_before_open(data)
            elif data := self.buffer.join(data):
                self._consume(data)
        except AmqpError as fault:
            self._after_events(partial(self._fail, fault))
        for session in self.withholding:
            session.give_back()
        self.withholding.clear()

    def _receive_before_open(self, data: bytes) -> None:
        """Take what arrives in any state but the usual one. Raises LimitExceeded for a peer that says too much before it opens."""
        if self.state in PEER_NOT_OPEN:
            self._pre_open_bytes += len(data)
        if data := self.buffer.join(data):
            self._consume(data)
        if self._pre_open_bytes > self.limits.pre_open_bytes_max and self.state in PEER_NOT_OPEN:
            raise LimitExceeded(f"more than {self.limits.pre_open_bytes_max} bytes before the open")

    def _after_events(self, action: Callable[[], None]) -> None:
        """Do what ends something, once the application has handled the events before it: see ``in_steps``."""
        if self._in_steps and self._events:
            self.unfinished = action
        else:
            action()

    def _take_events(self) -> list[Event]:
        events = self._events.copy()
        self._events.clear()
        return events

    def _consume(self, data: bytes) -> None:
        position, size = 0, len(data)
        while not self.closed and self.login_check is None:
            if self.state in HEADER_DUE:
                if not self._take_header(data[position : position + frames.PROTOCOL_HEADER_SIZE]):
                    self._needed_bytes = frames.PROTOCOL_HEADER_SIZE
                    break
                position += frames.PROTOCOL_HEADER_SIZE
            else:
                position = self._take_frames(data, position, size)
                if self.state not in HEADER_DUE:
                    break
        if position < size and not self.closed:
            # What comes behind a password waits for the outcome of the login: its sender may be nobody.
            needed_bytes = self._needed_bytes if self.login_check is None else self.limits.pre_open_bytes_max
            self.buffer.keep(data[position:], needed_bytes)

    def _take_header(self, header: bytes) -> bool:
        """Take a protocol header, False while it is not whole. Raises ConnectionFault on any but the one that is due."""
        allowed: tuple[bytes, ...] = (frames.AMQP_HEADER,)
        if self.state is ConnectionState.START and self._sasl is not None:
            sasl_only = self.role is Role.CLIENT or self._require_sasl
            allowed = (frames.SASL_HEADER,) if sasl_only else (frames.SASL_HEADER, frames.AMQP_HEADER)
        if header not in allowed:
            if any(known.startswith(header) for known in allowed):
                return False
            if self.role is Role.SERVER:
                self.out.append(allowed[0])  # says what would be right (part 2, section 2.2)
            raise ConnectionFault(FRAMING_ERROR, f"the peer began with {header!r}, not with {allowed[0]!r}")
        if self.role is Role.SERVER:
            self.out.append(header)
        if header == frames.SASL_HEADER:
            self._move(ConnectionInput.SASL_HEADER)
            self._frame_limit = SASL_FRAME_SIZE_BYTES_MAX
            sasl = self._sasl_layer()
            self._answer_sasl(sasl, sasl.first())
        else:
            self._move(ConnectionInput.AMQP_HEADER)
            if self._open is not None:
                self._send_open(self._open)
        return True

    def _take_frames(self, data: bytes, position: int, size: int) -> int:
        """Take the whole frames from ``position`` on; returns where they end."""
        sessions = self.sessions
        while size - position >= _FRAME_HEADER_SIZE:
            length, offset, kind, channel = _frame_header_from(data, position)
            if length > self._frame_limit:
                raise ConnectionFault(FRAMING_ERROR, f"frame of {length} bytes, at most {self._frame_limit} are taken")
            if offset < 2 or length < offset << 2:
                breach = f"frame of {length} bytes whose body begins at byte {offset << 2}: it must begin within the frame, at 8 or later"
                raise ConnectionFault(FRAMING_ERROR, breach)
            end = position + length
            if end > size:
                self._needed_bytes = length
                return position
            start = position + (offset << 2)
            position = end
            if kind == _AMQP_FRAME and self.state is _OPENED:
                # Transfer, flow and disposition in their usual encodings; what is left goes to the general decoder.
                hot_frame, session = HOT_FRAMES.get(data[start : start + 3]), sessions.get(channel)
                if hot_frame is not None and session is not None and hot_frame(session, data, start + 3, end):
                    if self.unfinished is None:
                        continue
                    break
            self._take_frame(data[start:end], kind, channel)
            if self.closed or self.state in HEADER_DUE or self.login_check is not None:
                return position
            if self.unfinished is not None:
                break
        self._needed_bytes = frames.FRAME_HEADER_SIZE
        return position

    def _take_frame(self, body: bytes, kind: int, channel: int) -> None:
        """Any frame, in any state."""
        if kind == (frames.SASL_FRAME if self.state is ConnectionState.SASL else frames.AMQP_FRAME):
            if kind == frames.SASL_FRAME:
                self._take_sasl(body)
            elif body:  # an empty frame is a heartbeat
                self._take_performative(body, channel)
        else:
            raise ConnectionFault(FRAMING_ERROR, f"frame of type {kind} in state {self.state.name.lower()}")

    def _take_performative(self, body: bytes, channel: int) -> None:
        performative, payload = decode_composite(body, size_bytes_max=PERFORMATIVE_SIZE_BYTES_MAX)
        handler = _HANDLERS.get(type(performative))
        if handler is None:
            raise ConnectionFault(NOT_ALLOWED, f"{performative.SYMBOL} is no frame")
        if type(performative) in (Detach, End, Close):
            self._after_events(partial(self._take_decoded, performative, handler, channel, body, payload))
        else:
            self._take_decoded(performative, handler, channel, body, payload)

    def _take_decoded(self, performative: Composite, handler: Any, channel: int, body: bytes, payload: int) -> None:
        step = _STEPS.get(type(performative), ConnectionInput.RECV_FRAME)
        before = self._move(step)
        if before in CLOSING and step is ConnectionInput.RECV_FRAME:
            return
        if type(performative) is Transfer:
            self._on_transfer(performative, channel, body, payload)
        elif payload == len(body):
            handler(self, performative, channel)
        else:
            raise ConnectionFault(FRAMING_ERROR, f"{performative.SYMBOL} followed by {len(body) - payload} more bytes")

    def _session(self, channel: int, performative: Composite) -> Session:
        session = self.sessions.get(channel)
        if session is None:
            raise ConnectionFault(NOT_ALLOWED, f"{performative.SYMBOL} on channel {channel}, which has no session")
        return session

    def _on_open(self, opened: Open, _channel: int) -> None:
        opened.check()
        self.remote_open = opened
        self.remote_max_frame_size = opened.max_frame_size
        self.outgoing.frame_bytes_max = min(opened.max_frame_size, DELIVERY_FRAME_SIZE_BYTES_MAX)
        if self.state is not ConnectionState.CLOSE_SENT:
            self.emit(Opened(opened))

    def _on_begin(self, begin: Begin, channel: int) -> None:
        if channel > self.limits.channel_max:
            raise ConnectionFault(FRAMING_ERROR, f"channel {channel} beyond the agreed {self.limits.channel_max}")
        if channel in self.sessions:
            raise ConnectionFault(NOT_ALLOWED, f"channel {channel} has a session")
        if begin.remote_channel is None:
            session = self._new_session(channel)
        else:
            own = self._own_channels.get(begin.remote_channel)
            if own is None or own.remote_channel is not None:
                raise ConnectionFault(NOT_ALLOWED, f"begin answers channel {begin.remote_channel}, which asked nothing")
            session = own
        self.sessions[channel] = session
        session.on_begin(begin, channel)

    def _on_transfer(self, transfer: Transfer, channel: int, body: bytes, payload: int) -> None:
        session = self._session(channel, transfer)
        with session.guarded():
            session.on_transfer(hot.transfer_frame(transfer, payload), body, len(body))

    def _on_session_frame(self, performative: Composite, channel: int) -> None:
        session = self._session(channel, performative)
        with session.guarded():
            session.on_performative(performative)

    def _on_end(self, end: End, channel: int) -> None:
        self._session(channel, end).on_end(end)

    def _on_close(self, close: Close, _channel: int) -> None:
        error = close.error.exception() if close.error else None
        asked = self.state is ConnectionState.ENDED
        if not asked:
            self._send_close(None)
        self._end(error or (self.error if asked else None), by_peer=not asked)

    def _take_sasl(self, body: bytes) -> None:
        sasl = self._sasl_layer()
        frame, _ = decode_composite(body, size_bytes_max=PERFORMATIVE_SIZE_BYTES_MAX)
        self._answer_sasl(sasl, sasl.receive(frame))

    def _answer_sasl(self, sasl: SaslClient | SaslServer, answer: Composite | None) -> None:
        if answer is not None:
            self.out.append(frames.performative_frame(0, answer, frames.SASL_FRAME))
        if isinstance(sasl, SaslServer):
            self.login_check = sasl.check
        if not sasl.done:
            return
        if sasl.error is not None:
            raise sasl.error
        self.user = sasl.user
        self._frame_limit = PRE_OPEN_FRAME_SIZE_BYTES_MAX
        self._move(ConnectionInput.SASL_DONE)
        if self.role is Role.CLIENT:
            self.out.append(frames.AMQP_HEADER)

    # --- inside ------------------------------------------------------------------------------------------------------------------

    def _move(self, step: ConnectionInput) -> ConnectionState:
        """Take a step of the state machine; returns the state before it."""
        before = self.state
        after = CONNECTION.get((before, step))
        if after is None:
            raise ConnectionFault(ILLEGAL_STATE, f"{step.name.lower()} in state {before.name.lower()}")
        self.state = after
        return before

    def send(self, channel: int, performative: Composite) -> None:
        """Write a frame; frames before our open wait for it. Raises FrameTooSmall."""
        if not self.closed:
            (self.out if self._open_sent else self._held).append(self._frame(channel, performative))

    def _frame(self, channel: int, performative: Composite) -> bytes:
        """A frame that the peer takes, as far as it has said what that is. Raises FrameTooSmall."""
        if self.state in PEER_NOT_OPEN:
            return frames.performative_frame(channel, performative)
        return frames.fitting_frame(channel, performative, self.remote_max_frame_size)

    def _flush_settled(self) -> None:
        for session in self.unflushed:
            session.flush_settled()
        self.unflushed.clear()

    def _sasl_layer(self) -> SaslClient | SaslServer:
        if self._sasl is None:
            raise ConnectionFault(ILLEGAL_STATE, "a SASL frame on a connection without a SASL layer")
        return self._sasl

    def _send_open(self, opening: Open) -> None:
        self._move(ConnectionInput.SEND_OPEN)
        self._open_sent = True
        self._frame_limit = self._max_frame_size
        self.out.append(self._frame(0, opening))
        self.out.extend(self._held)
        self._held.clear()

    def _send_close(self, error: AmqpError | None) -> None:
        if not self._open_sent:
            self.open()  # a close comes after an open, whatever happens
        self._flush_settled()
        for session in self._own_channels.values():
            session.drop_outgoing()
        self.send(0, Close(Error.of(error)))
        self._move(ConnectionInput.SEND_CLOSE)

    def _fail(self, fault: AmqpError) -> None:
        """End for a breach of the protocol by the peer, and say so where it can hear it."""
        if self.state not in SPEECHLESS and self.state not in CLOSING and not self.closed:
            self._send_close(fault)
        self._end(fault, by_peer=False)

    def _end(self, error: AmqpError | None, by_peer: bool) -> None:
        self.state = ConnectionState.ENDED
        self.error = error
        self.buffer.clear()
        for session in self._own_channels.values():
            session.on_connection_end()
        self.sessions.clear()
        self._own_channels.clear()
        self.emit(ConnectionClosed(error, by_peer))

    def _new_session(self, channel: int | None) -> Session:
        """A session on our channel of the same number as the peer's, or on the first that is free."""
        own = self._own_channels
        if channel is None or channel in own:
            channel = next(number for number in range(len(own) + 1) if number not in own)
        if channel > self.remote_open.channel_max:
            raise ConnectionFault(NOT_ALLOWED, f"the peer takes no more than {self.remote_open.channel_max + 1} sessions")
        own[channel] = session = Session(self, channel)
        return session

    def forget(self, session: Session) -> None:
        """Both ends of the session ended: its channels are free."""
        self._own_channels.pop(session.channel, None)
        if session.remote_channel is not None:
            self.sessions.pop(session.remote_channel, None)


_STEPS: Final[dict[type[Composite], ConnectionInput]] = {Open: ConnectionInput.RECV_OPEN, Close: ConnectionInput.RECV_CLOSE}
_HANDLERS: Final[dict[type[Composite], Any]] = {
    Open: Connection._on_open, Begin: Connection._on_begin, End: Connection._on_end, Close: Connection._on_close,
    **dict.fromkeys((Attach, Flow, Transfer, Disposition, Detach), Connection._on_session_frame),
}  # fmt: skip
