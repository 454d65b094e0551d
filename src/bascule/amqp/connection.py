"""A connection without IO: it converts received bytes to events, and calls to bytes to send (part 2, section 2.4).

A driver passes received bytes to ``receive``, answers the events with methods of connection, sessions and links, writes
``data_to_send``, and closes its socket if ``closed`` is true. It calls ``tick`` at the latest at the time that the last call returned.
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
from bascule.amqp.hot_frames import take_frames
from bascule.amqp.limits import (
    DELIVERY_FRAME_SIZE_BYTES_MAX,
    FRAME_SIZE_BYTES_DEFAULT,
    FRAME_SIZE_BYTES_MIN,
    PERFORMATIVE_SIZE_BYTES_MAX,
    PRE_OPEN_FRAME_SIZE_BYTES_MAX,
    ConnectionLimits,
)  # fmt: skip
from bascule.amqp.link_counts import LinkCounts
from bascule.amqp.outgoing import Buffer, OutgoingMessages
from bascule.amqp.partials import PartialBudget
from bascule.amqp.performatives import Attach, Begin, Close, Detach, Disposition, End, Error, Flow, Open, Role, Transfer
from bascule.amqp.sasl import SaslClient, SaslServer
from bascule.amqp.session import Session
from bascule.amqp.states import CLOSING, CONNECTION, HEADER_DUE, PEER_NOT_OPEN, SPEECHLESS, ConnectionInput, ConnectionState

#: Enum member of the hot path as a global: an attribute lookup on the class costs as much as a call.
_OPENED: Final = ConnectionState.OPENED
_ENDED: Final = ConnectionState.ENDED
_NOTHING: Callable[[], None] | None = None  # the type of None would hold until the next assignment, whatever a call changes


class Connection:
    """An AMQP connection, as a server or a client.

    ``max_frame_size`` is in bytes. ``idle_timeout_s``: maximum silence of the peer (None: unlimited). ``started_s``: start of the handshake
    (None: first input). If ``closed`` is true, the connection ends once ``data_to_send`` is written; ``error`` has the reason, if any.
    ``login_check`` is the pending password check, or None: call it off the event loop, and pass its result to ``login_checked``.
    """

    def __init__(
        self, role: Role, *, container_id: str, sasl: SaslServer | SaslClient | None = None,
        max_frame_size: int = FRAME_SIZE_BYTES_DEFAULT, idle_timeout_s: float | None = 60.0, limits: ConnectionLimits | None = None,
        require_sasl: bool = False, started_s: float | None = None, in_steps: bool = False,
    ) -> None:  # fmt: skip
        """``in_steps``: a detach, end, close or protocol error waits until the application has handled the earlier events.

        Then the application also calls ``forget_deliveries`` for each of the ``ended_sessions``, which may have very many.
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
        #: Continues a disposition over more than ConnectionLimits.deliveries_per_piece deliveries, input of more than
        #: ConnectionLimits.input_steps_per_piece, or an action delayed by ``in_steps``.
        self.unfinished: Callable[[], None] | None = None
        self.out: list[Buffer] = []
        self._out_end: int | None = None  # the end of our close in ``out``, once it is sent; nothing may follow (part 2, section 2.4.6)
        self.partial_bytes = 0  # bytes of incomplete messages
        self.partials = PartialBudget()  # of this connection, or shared by connections
        self.outgoing = OutgoingMessages(self.limits.frames_per_piece_bytes)
        self.unflushed: list[Session] = []  # sessions with unwritten dispositions
        self.withholding: dict[Session, None] = {}  # sessions that may show withheld credit again after all received frames
        self.sessions: dict[int, Session] = {}  # by the channel of the peer
        self.link_counts = LinkCounts()  # of all sessions
        self._own_channels: dict[int, Session] = {}
        self.ended_sessions: list[Session] = []  # with the connection; see ``in_steps``
        self._sasl = sasl
        self._require_sasl = require_sasl
        self._in_steps = in_steps
        self._max_frame_size = max(max_frame_size, FRAME_SIZE_BYTES_MIN)
        self.frame_limit = PRE_OPEN_FRAME_SIZE_BYTES_MAX
        self._idle_timeout_s = idle_timeout_s
        self.events: list[Event] = []  # for the application, not returned to it yet
        self.emit = self.events.append
        self._held: list[bytes] = []  # frames that wait for our open, which must be sent first
        self._open: Open | None = None
        self._open_sent = False
        self.buffer = frames.FrameBuffer()
        self.needed_bytes = frames.PROTOCOL_HEADER_SIZE
        self.steps_left = 0  # of the current piece of input
        self.performative_bytes = 0  # of the last performative from the general decoder
        self._pre_open_bytes = 0
        self._deadlines = Deadlines(self.limits, idle_timeout_s, started_s)
        if role is Role.CLIENT:
            self.out.append(frames.SASL_HEADER if sasl else frames.AMQP_HEADER)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self.state is _ENDED

    @property
    def has_output(self) -> bool:
        """Whether ``data_to_send`` may have something to do, or the connection has ended."""
        return bool(self.out or self.unflushed or self.outgoing.sessions) or self.state is _ENDED

    # --- called by the application -----------------------------------------------------------------------------------------------

    def open(
        self, *, hostname: str | None = None, offered_capabilities: tuple[str, ...] = (), desired_capabilities: tuple[str, ...] = (),
        properties: dict[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        """Send the open; a server does so to answer Opened, a client at once. Does nothing if the peer has already closed."""
        if self.closed:
            return
        if self._open is not None:
            raise IllegalUse("the connection is already open")
        self._open = Open(
            self.container_id, hostname, self._max_frame_size, self.limits.channel_max,
            # Announce half of our timeout, as the specification advises, so that a heartbeat that is just in time is not too late.
            int(self._idle_timeout_s * 500) if self._idle_timeout_s else None,
            offered_capabilities=offered_capabilities, desired_capabilities=desired_capabilities, properties=properties,
        )  # fmt: skip
        if self.state not in SPEECHLESS:
            self._send_open(self._open)

    def login_checked(self, proven: bool) -> list[Event]:
        """Handle the result of ``login_check``; return the events of the frames received meanwhile."""
        self.login_check = None
        if isinstance(self._sasl, SaslServer) and not self.closed:
            try:
                self._answer_sasl(self._sasl, self._sasl.checked(proven))
                self._consume(self.buffer.take())
            except AmqpError as fault:
                self._fail(fault)
        return self._take_events()

    def begin(self) -> Session:
        """Begin a session; SessionBegun follows. Raises IllegalUse if the peer allows no more sessions."""
        session = self._new_session(None)
        session.begin()
        return session

    def close(self, error: AmqpError | None = None) -> None:
        """Send a close; ConnectionClosed follows when the peer answers. Does nothing after the first call."""
        if self.closed or self.state in CLOSING:
            return
        if self.state in SPEECHLESS:
            self._end(error, by_peer=False)
            return
        self.error = error
        self._send_close(error)

    def data_to_send(self, *, take_more: bool = True) -> bytes:
        """Return the bytes to send, b"" for none. ``take_more``: the transport has room for more frames of multi-frame messages."""
        if take_more:
            self.outgoing.left_bytes = self.outgoing.piece_bytes
        if self.unflushed:
            self._flush_settled()
        if self._out_end is not None:
            del self.out[self._out_end :]
            self._out_end = 0
        if not self.out:
            return b""
        self._deadlines.sent = True
        data = b"".join(self.out)
        self.out.clear()
        return data

    def send_more(self) -> list[Flowed]:
        """Write more frames of multi-frame messages after the transport has room. Return the links whose credit is shown again."""
        before = len(self.events)
        self.outgoing.write_more()
        flowed, self.events[before:] = self.events[before:], []
        return [event for event in flowed if isinstance(event, Flowed)]

    def tick(self, now_s: float, *, unread: bool = False) -> float:
        """Check heartbeats and timeouts; return the time of the next call. ``unread``: the application does not read from the peer now."""
        if self.closed:
            return NEVER
        if unread:
            self._deadlines.received(now_s)
        due_s, fault = self._deadlines.look(self.state, now_s)
        if fault is not None:
            self._fail(fault)
        elif now_s >= due_s:
            self._end(self.error, by_peer=False)  # the peer did not answer our close
        if self.closed:
            return NEVER
        beat_due_s, beats = self._deadlines.heartbeat(self.remote_open.idle_time_out if self._open_sent else None, now_s)
        if beats and not self.out:
            self.out.append(frames.EMPTY_FRAME)
        return min(due_s, beat_due_s)

    # --- input of the peer -------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, now_s: float) -> list[Event]:
        """Handle received bytes and return the events. A protocol error of the peer causes a close, end or detach."""
        if self.state is _OPENED:
            self._deadlines.received_s = now_s
        else:
            self._deadlines.received(now_s)
        if data and self.state is not _ENDED:
            self._take_in(data)
        events = self.events[:]
        self.events.clear()
        return events

    def go_on(self) -> list[Event]:
        """Continue ``unfinished`` work and then the frames after it. ``receive`` must not be called while work is unfinished."""
        unfinished, self.unfinished = self.unfinished, _NOTHING
        if unfinished is not None and not self.closed:
            try:
                unfinished()
            except AmqpError as fault:
                self._fail(fault)
            if self.unfinished is None:
                self._take_in(b"")
        return self._take_events()

    def _take_in(self, data: bytes) -> None:
        self.steps_left = self.limits.input_steps_per_piece
        try:
            if self.state is not _OPENED:
                self._receive_before_open(data)
            elif not self.buffer.kept or (data := self.buffer.join(data)):
                position = take_frames(self, data, 0)
                if position < len(data) and not self.closed:
                    self.buffer.keep(data[position:], self.needed_bytes)
        except AmqpError as fault:
            self._after_events(partial(self._fail, fault))
        if self.withholding:
            for session in self.withholding:
                session.give_back()
            self.withholding.clear()

    def _receive_before_open(self, data: bytes) -> None:
        """Handle input before the open state. Raises LimitExceeded if the peer sends too much before its open."""
        if self.state in PEER_NOT_OPEN:
            self._pre_open_bytes += len(data)
        if data := self.buffer.join(data):
            self._consume(data)
        if self._pre_open_bytes > self.limits.pre_open_bytes_max and self.state in PEER_NOT_OPEN:
            raise LimitExceeded(f"the peer sent more than {self.limits.pre_open_bytes_max} bytes before its open")

    def _after_events(self, action: Callable[[], None]) -> None:
        """Run an action that ends something after the application has handled the earlier events: see ``in_steps``."""
        if self._in_steps and self.events:
            self.unfinished = action
        else:
            action()

    def _take_events(self) -> list[Event]:
        events, self.events[:] = self.events[:], []
        return events

    def _consume(self, data: bytes) -> None:
        position, size = 0, len(data)
        while not self.closed and self.login_check is None:
            if self.state in HEADER_DUE:
                if not self._take_header(data[position : position + frames.PROTOCOL_HEADER_SIZE]):
                    self.needed_bytes = frames.PROTOCOL_HEADER_SIZE
                    break
                position += frames.PROTOCOL_HEADER_SIZE
            else:
                position = take_frames(self, data, position)
                if self.state not in HEADER_DUE:
                    break
        if position < size and not self.closed:
            # Frames after a password wait for the result of the login; the peer is not authenticated yet.
            needed_bytes = self.needed_bytes if self.login_check is None else self.limits.pre_open_bytes_max
            self.buffer.keep(data[position:], needed_bytes)

    def _take_header(self, header: bytes) -> bool:
        """Handle a protocol header; return False if it is incomplete. Raises ConnectionFault for an unexpected header."""
        allowed: tuple[bytes, ...] = (frames.AMQP_HEADER,)
        if self.state is ConnectionState.START and self._sasl is not None:
            sasl_only = self.role is Role.CLIENT or self._require_sasl
            allowed = (frames.SASL_HEADER,) if sasl_only else (frames.SASL_HEADER, frames.AMQP_HEADER)
        if header not in allowed:
            if any(known.startswith(header) for known in allowed):
                return False
            if self.role is Role.SERVER:
                self.out.append(allowed[0])  # tells the peer the supported version (part 2, section 2.2)
            raise ConnectionFault(FRAMING_ERROR, f"invalid protocol header {header!r}; {allowed[0]!r} is expected")
        if self.role is Role.SERVER:
            self.out.append(header)
        if header == frames.SASL_HEADER:
            self._move(ConnectionInput.SASL_HEADER)
            self.frame_limit = self.limits.sasl_frame_size_bytes_max
            sasl = self._sasl_layer()
            self._answer_sasl(sasl, sasl.first())
        else:
            self._move(ConnectionInput.AMQP_HEADER)
            if self._open is not None:
                self._send_open(self._open)
        return True

    def continue_input(self) -> None:
        """Begin the next piece of input: ``go_on`` takes the rest of the received frames from the buffer."""

    def take_frame(self, body: bytes, kind: int, channel: int) -> None:
        """Handle a frame in any state."""
        if kind == (frames.SASL_FRAME if self.state is ConnectionState.SASL else frames.AMQP_FRAME):
            if kind == frames.SASL_FRAME:
                self._take_sasl(body)
            elif body:  # an empty frame is a heartbeat
                self._take_performative(body, channel)
        else:
            raise ConnectionFault(FRAMING_ERROR, f"unexpected frame of type {kind} in state {self.state.name.lower()}")

    def _take_performative(self, body: bytes, channel: int) -> None:
        performative, payload = decode_composite(body, size_bytes_max=PERFORMATIVE_SIZE_BYTES_MAX)
        self.performative_bytes = payload
        handler = _HANDLERS.get(type(performative))
        if handler is None:
            raise ConnectionFault(NOT_ALLOWED, f"{performative.SYMBOL} is not a frame body")
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
            raise ConnectionFault(FRAMING_ERROR, f"{performative.SYMBOL} is followed by {len(body) - payload} unexpected bytes")

    def _session(self, channel: int, performative: Composite) -> Session:
        session = self.sessions.get(channel)
        if session is None:
            raise ConnectionFault(NOT_ALLOWED, f"{performative.SYMBOL} on channel {channel}: the channel has no session")
        return session

    def _on_open(self, opened: Open, _channel: int) -> None:
        opened.check()
        self.remote_open = opened.without_lists() if self.role is Role.SERVER else opened
        self.remote_max_frame_size = opened.max_frame_size
        self.outgoing.frame_bytes_max = min(opened.max_frame_size, DELIVERY_FRAME_SIZE_BYTES_MAX)
        if self.state is not ConnectionState.CLOSE_SENT:
            self.emit(Opened(opened))

    def _on_begin(self, begin: Begin, channel: int) -> None:
        if channel > self.limits.channel_max:
            raise ConnectionFault(FRAMING_ERROR, f"channel {channel} exceeds channel-max {self.limits.channel_max}")
        if channel in self.sessions:
            raise ConnectionFault(NOT_ALLOWED, f"begin on channel {channel}: the channel already has a session")
        if begin.remote_channel is None:
            session = self._new_session(channel)
        else:
            own = self._own_channels.get(begin.remote_channel)
            if own is None or own.remote_channel is not None:
                raise ConnectionFault(NOT_ALLOWED, f"begin answers channel {begin.remote_channel}, which has no pending begin")
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
        self.frame_limit = PRE_OPEN_FRAME_SIZE_BYTES_MAX
        self._move(ConnectionInput.SASL_DONE)
        if self.role is Role.CLIENT:
            self.out.append(frames.AMQP_HEADER)

    # --- internal ----------------------------------------------------------------------------------------------------------------

    def _move(self, step: ConnectionInput) -> ConnectionState:
        """Make a transition of the state machine; return the previous state."""
        before = self.state
        after = CONNECTION.get((before, step))
        if after is None:
            raise ConnectionFault(ILLEGAL_STATE, f"unexpected {step.name.lower()} in state {before.name.lower()}")
        self.state = after
        return before

    def send(self, channel: int, performative: Composite) -> None:
        """Write a frame; frames before our open are queued. Raises FrameTooSmall."""
        if not self.closed:
            (self.out if self._open_sent else self._held).append(self._frame(channel, performative))

    def _frame(self, channel: int, performative: Composite) -> bytes:
        """Return a frame that fits the peer's max-frame-size. Raises FrameTooSmall."""
        if self.state in PEER_NOT_OPEN:
            return frames.performative_frame(channel, performative)
        return frames.fitting_frame(channel, performative, self.remote_max_frame_size)

    def _flush_settled(self) -> None:
        for session in self.unflushed:
            session.flush_settled()
        self.unflushed.clear()

    def _sasl_layer(self) -> SaslClient | SaslServer:
        if self._sasl is None:
            raise ConnectionFault(ILLEGAL_STATE, "unexpected SASL frame on a connection without a SASL layer")
        return self._sasl

    def _send_open(self, opening: Open) -> None:
        self._move(ConnectionInput.SEND_OPEN)
        self._open_sent = True
        self.frame_limit = self._max_frame_size
        self.out.append(self._frame(0, opening))
        self.out.extend(self._held)
        self._held.clear()

    def _send_close(self, error: AmqpError | None) -> None:
        if not self._open_sent:
            self.open()  # an open must precede a close
        self._flush_settled()
        for session in self._own_channels.values():
            session.drop_outgoing()
        self.send(0, Close(Error.of(error)))
        self._out_end = len(self.out)
        self._move(ConnectionInput.SEND_CLOSE)

    def _fail(self, fault: AmqpError) -> None:
        """End the connection because of a protocol error of the peer, and send the error if possible."""
        if self.state not in SPEECHLESS and self.state not in CLOSING and not self.closed:
            self._send_close(fault)
        self._end(fault, by_peer=False)

    def _end(self, error: AmqpError | None, by_peer: bool) -> None:
        self.state = ConnectionState.ENDED
        self.error = error
        self.buffer.clear()
        for session in self._own_channels.values():
            session.on_connection_end()
        self.ended_sessions += self._own_channels.values()
        self.sessions.clear()
        self._own_channels.clear()
        if not self._in_steps:
            for session in self.ended_sessions:
                session.forget_deliveries()
        self.emit(ConnectionClosed(error, by_peer))

    def _new_session(self, channel: int | None) -> Session:
        """Return a new session on our channel with the peer's number if that is free, otherwise on the first free one."""
        own = self._own_channels
        if channel is None or channel in own:
            channel = next(number for number in range(len(own) + 1) if number not in own)
        if channel > self.remote_open.channel_max:
            raise ConnectionFault(NOT_ALLOWED, f"the peer allows at most {self.remote_open.channel_max + 1} sessions")
        own[channel] = session = Session(self, channel)
        return session

    def forget(self, session: Session) -> None:
        """Free the channels of a session that both ends have ended."""
        self._own_channels.pop(session.channel, None)
        if session.remote_channel is not None:
            self.sessions.pop(session.remote_channel, None)


_STEPS: Final[dict[type[Composite], ConnectionInput]] = {Open: ConnectionInput.RECV_OPEN, Close: ConnectionInput.RECV_CLOSE}
_HANDLERS: Final[dict[type[Composite], Any]] = {
    Open: Connection._on_open, Begin: Connection._on_begin, End: Connection._on_end, Close: Connection._on_close,
    **dict.fromkeys((Attach, Flow, Transfer, Disposition, Detach), Connection._on_session_frame),
}  # fmt: skip
