"""Sessions: windows, handles, and unsettled deliveries (part 2, section 2.5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from bascule.amqp import hot
from bascule.amqp.composite import Composite
from bascule.amqp.dispositions import take_disposition
from bascule.amqp.errors import (
    ERRANT_LINK,
    FRAMING_ERROR,
    HANDLE_IN_USE,
    ILLEGAL_STATE,
    INVALID_FIELD,
    RESOURCE_LIMIT_EXCEEDED,
    UNATTACHED_HANDLE,
    WINDOW_VIOLATION,
    AmqpError,
    ConnectionFault,
    IllegalUse,
    SessionFault,
)  # fmt: skip
from bascule.amqp.events import AttachConfirmed, Attached, Delivery, Flowed, SessionBegun, SessionEnded
from bascule.amqp.frames import frame_head, shortened_state
from bascule.amqp.limits import LINK_NAME_LENGTH_MAX
from bascule.amqp.link import SERIAL_HALF, Link, ReceiverLink, SenderLink
from bascule.amqp.outgoing import Buffer, JoinedParts, OutgoingDeliveries, OutgoingDelivery
from bascule.amqp.performatives import UINT_MAX, Attach, Begin, Coordinator, Detach, Disposition, End, Error, Flow, Source, Target, Transfer
from bascule.amqp.states import SESSION, LinkState, SessionInput, SessionState
from bascule.amqp.unsettled import SETTLED_LISTED_MAX, SentDeliveries, Unsettled

if TYPE_CHECKING:
    from bascule.amqp.connection import Connection

#: Our announced outgoing window: the engine sends whatever the peer's window allows.
OUTGOING_WINDOW: Final = 0x7FFFFFFF
#: Enum member of the hot path as a global: an attribute lookup on the class costs as much as a call.
_MAPPED: Final = SessionState.MAPPED
_new: Final = tuple.__new__  # makes a Delivery at less cost than Delivery(...)


class Session:
    """A session of a connection. ``context`` belongs to the application."""

    def __init__(self, connection: Connection, channel: int) -> None:
        """Sessions are created by the connection."""
        self.connection = connection
        self.limits = connection.limits
        self.channel = channel
        self.remote_channel: int | None = None
        self.state = SessionState.UNMAPPED
        self.context: Any = None
        self.remote = Begin()
        self.links: dict[int, Link] = {}  # by our handle
        self._failed = self.withholding = False
        self.sent = SentDeliveries()
        self._by_remote_handle: dict[int, Link] = {}
        self.incoming_unsettled: Unsettled[ReceiverLink] = Unsettled()  # unsettled deliveries of the peer
        self._next_handle = 0
        self._free_handles: list[int] = []
        self._next_delivery_id = self._next_outgoing_id = self._next_incoming_id = 0
        self._incoming_window = self.limits.incoming_window_frames
        self._window_low = self._incoming_window >> 1
        self._outgoing_window = 0  # the unused part of the peer's incoming window
        self._outgoing = OutgoingDeliveries(self, connection.outgoing)  # deliveries with unwritten frames
        self._settled_ids: list[int] = []
        self._settled_state: Composite | None = None
        self._out = connection.out
        self.emit = connection.emit

    def move(self, step: SessionInput) -> SessionState:
        """Make a transition of the state machine; return the new state. Raises ConnectionFault if the peer's step is not allowed."""
        state = SESSION.get((self.state, step))
        if state is None:
            raise ConnectionFault(
                ILLEGAL_STATE, f"unexpected {step.name.lower()} on channel {self.channel}, state {self.state.name.lower()}"
            )
        self.state = state
        return state

    # --- called by the application -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Send a begin, or answer the peer's; called by the connection."""
        answer = self.state is SessionState.BEGIN_RECEIVED
        self.move(SessionInput.SEND_BEGIN)
        self.send(
            Begin(
                self.remote_channel if answer else None,
                self._next_outgoing_id,
                self._incoming_window,
                OUTGOING_WINDOW,
                self.limits.handle_max,
            )
        )

    def end(self, error: AmqpError | None = None) -> None:
        """End the session and all its links. Does nothing if the session has ended."""
        if self.state in (SessionState.MAPPED, SessionState.BEGIN_SENT):
            self._send_end(error)

    def attach_sender(self, name: str, source: Source, target: Target | Coordinator, **options: Any) -> SenderLink:
        """Attach a sending link; ``options`` are further fields of Attach. AttachConfirmed follows."""
        link = SenderLink(self, name, self._take_handle())
        self._attach(link, Attach(name, link.handle, False, source=source, target=target, initial_delivery_count=0, **options))
        return link

    def attach_receiver(self, name: str, source: Source | None, target: Target, **options: Any) -> ReceiverLink:
        """Attach a receiving link; ``options`` are further fields of Attach. AttachConfirmed follows; then grant credit."""
        link = ReceiverLink(self, name, self._take_handle())
        self._attach(link, Attach(name, link.handle, True, source=source, target=target, **options))
        return link

    def _attach(self, link: Link, attach: Attach) -> None:
        if self.state not in (SessionState.MAPPED, SessionState.BEGIN_SENT):
            raise IllegalUse(f"cannot attach a link to a session in state {self.state.name.lower()}")
        link.local = attach
        link.state = LinkState.ATTACH_SENT
        self.links[link.handle] = link
        self.connection.link_counts.add(link)
        self.send(attach)

    def settle_outgoing(self, delivery_id: int, state: Composite | None = None) -> None:
        """Settle a sent delivery to which the peer gave an outcome without settling it."""
        if self.sent.pop(delivery_id) is not None:
            encoded = self._state_bytes(state) if state is not None else b""
            self._out.append(hot.disposition(self.channel, False, delivery_id, delivery_id, True, encoded))
            self.give_back()

    # --- sending -----------------------------------------------------------------------------------------------------------------

    def send(self, performative: Composite) -> None:
        """Write a frame on this session's channel."""
        self.connection.send(self.channel, performative)

    def send_delivery(
        self, link: SenderLink, parts: tuple[Buffer, ...], context: Any, settled: bool, state: Composite | None, message_format: int
    ) -> int:
        """Write a message; the rest of a large one waits for the peer's window and for Connection.send_more.

        Without a window no credit is shown, so the first frame is always written at once. Each delivery id taken is therefore sent: a gap
        would end the connection of a peer that counts them (Qpid JMS).
        """
        delivery_id = self._next_delivery_id
        self._next_delivery_id = (delivery_id + 1) & UINT_MAX
        if not settled and self.sent.add(_new(Delivery, (link, delivery_id, context))) >= self.limits.unsettled_per_session_max:
            self._withhold()
        size = len(parts[0])
        for part in parts[1:]:
            size += len(part)
        if state is not None or message_format or size + hot.TRANSFER_HEAD_SIZE > self.connection.outgoing.frame_bytes_max:
            transfer = Transfer(link.handle, delivery_id, delivery_id.to_bytes(4, "big"), message_format, settled, state=state)
            self._send_frames(link, parts, size, transfer)
            return delivery_id
        end, size = hot.SETTLED if settled else hot.UNSETTLED, size + hot.TRANSFER_HEAD_SIZE
        self._out.append(hot.pack_delivery(size, link.delivery_start, delivery_id, hot.TAG_START, delivery_id, end))
        self._out.extend(parts)
        self._next_outgoing_id = (self._next_outgoing_id + 1) & UINT_MAX
        self._outgoing_window -= 1
        if self._outgoing_window <= 0:
            self._withhold()
        return delivery_id

    def _send_frames(self, link: SenderLink, parts: tuple[Buffer, ...], total: int, transfer: Transfer) -> None:
        """Write the rare forms: a multi-frame message, a transfer with a state.

        The last part of a large message is not copied, since a copy of 64 MiB takes 50 ms.
        """
        room = self.connection.outgoing.frame_bytes_max
        if len(frame_head(self.channel, transfer, 0)) + total <= room:
            self._write_frame(frame_head(self.channel, transfer, total), b"".join(parts))
            return
        transfer.more = True
        size = room - len(frame_head(self.channel, transfer, 0))
        message = JoinedParts(parts)
        self._write_frame(frame_head(self.channel, transfer, size), message.read(0, size))
        delivery = OutgoingDelivery(link, message, size, settled=transfer.settled, frame_bytes=room)
        if not self._outgoing:
            self.write_frames(delivery, self.connection.outgoing.left_bytes)
        if delivery.rest_bytes:
            self._outgoing.append(delivery)
            self._outgoing.plan()

    def _write_frame(self, head: bytes, payload: Buffer) -> None:
        self._out.append(head)
        self._out.append(payload)
        self.connection.outgoing.left_bytes -= len(head) + len(payload)
        self._next_outgoing_id = (self._next_outgoing_id + 1) & UINT_MAX
        self._outgoing_window -= 1
        if self._outgoing_window <= 0:
            self._withhold()

    def write_frames(self, delivery: OutgoingDelivery, size_bytes: int) -> None:
        """Write frames of a delivery, of ``size_bytes`` and up to a frame more, as far as the peer's window allows."""
        outgoing = self.connection.outgoing
        enough_bytes = outgoing.left_bytes - size_bytes
        while self._outgoing_window > 0 and outgoing.left_bytes > enough_bytes and delivery.rest_bytes:
            self._write_frame(*delivery.next_frame())

    @property
    def window_open(self) -> bool:
        """Whether the peer accepts more transfer frames."""
        return self._outgoing_window > 0

    def _windows(self) -> tuple[int, int, int, int]:
        return self._next_incoming_id, self._incoming_window, self._next_outgoing_id, OUTGOING_WINDOW

    def send_link_flow(self, link: Link, credit: int, available: int, drain: bool, echo: bool) -> None:
        """Write a flow frame of a link, which also renews our window."""
        self._incoming_window = self.limits.incoming_window_frames
        self._out.append(hot.link_flow(self.channel, self._windows(), link.handle, link.delivery_count, credit, available, drain, echo))

    def send_flow(self) -> None:
        """Write a flow frame of the session only, with a full window."""
        self._incoming_window = self.limits.incoming_window_frames
        self._out.append(hot.session_flow(self.channel, *self._windows()))

    # --- settlement --------------------------------------------------------------------------------------------------------------

    def settle_incoming(self, delivery_id: int, state: Composite) -> bool:
        """Settle a delivery at the next flush; deliveries with the same state are combined. Return True if it is the first of them."""
        link = self.incoming_unsettled.by_id.pop(delivery_id, None)
        if link is None:
            return False  # sent settled, or its link or session has ended
        link.held.discard(delivery_id)
        before = self._settled_state
        if state is not before and (type(state) is not type(before) or state != before):  # a comparison of two kinds costs two calls
            self.flush_settled()
            self._settled_state = state
        first = not self._settled_ids
        if first:
            self.connection.unflushed.append(self)
        self._settled_ids.append(delivery_id)
        return first

    def hold_incoming(self, delivery_id: int, link: ReceiverLink) -> None:
        """Store an unsettled delivery of the peer. Raises SessionFault."""
        incoming = self.incoming_unsettled
        by_id, ids = incoming.by_id, incoming.ids
        if delivery_id in by_id:
            raise SessionFault(INVALID_FIELD, f"delivery {delivery_id} is already unsettled")
        if ids and ids[-1] < delivery_id and len(ids) <= SETTLED_LISTED_MAX:
            ids.append(delivery_id)
            by_id[delivery_id] = link
        else:
            incoming.add(delivery_id, link)
        link.held.add(delivery_id)
        if len(by_id) > self.limits.unsettled_per_session_max:
            raise SessionFault(RESOURCE_LIMIT_EXCEEDED, f"more than {self.limits.unsettled_per_session_max} unsettled deliveries")

    def flush_settled(self) -> None:
        """Write the collected dispositions, one for each run of adjacent deliveries."""
        ids = self._settled_ids
        if not ids or self._settled_state is None:
            return
        self._settled_ids = []
        if self.state not in (SessionState.MAPPED, SessionState.END_RECEIVED):
            return
        encoded = self._state_bytes(self._settled_state)
        ids.sort()
        first = last = ids[0]
        for delivery_id in ids[1:]:
            if delivery_id != last + 1:
                self._out.append(hot.disposition(self.channel, True, first, last, True, encoded))
                first = delivery_id
            last = delivery_id
        self._out.append(hot.disposition(self.channel, True, first, last, True, encoded))

    def _state_bytes(self, state: Composite) -> bytes:
        """Return the encoding of a state, with the error's description shortened to the peer's frame size."""
        encoded = hot.state_bytes(state)
        room = self.connection.remote_max_frame_size - hot.DISPOSITION_HEAD_SIZE
        return encoded if len(encoded) <= room else hot.state_bytes(shortened_state(state, room))

    @property
    def newest_delivery_id(self) -> int:
        """The id of the last delivery sent."""
        return (self._next_delivery_id - 1) & UINT_MAX

    @property
    def unsettled(self) -> dict[int, Delivery]:
        """Sent deliveries that the peer has not settled, by id."""
        return self.sent.by_id()

    @property
    def incoming(self) -> dict[int, ReceiverLink]:
        """Links of the peer's unsettled deliveries, by id."""
        return self.incoming_unsettled.by_id

    def _withhold(self) -> None:
        """Hide the credit while the peer's window is closed or too many of our deliveries are unsettled."""
        if self.withholding:
            return
        self.withholding = True
        for link in self.links.values():
            if isinstance(link, SenderLink):
                link.withhold()

    def give_back(self) -> None:
        """Show the withheld credit if the peer's window is open and enough deliveries are settled."""
        if not self.withholding or self._outgoing_window <= 0 or len(self.sent) >= self.limits.unsettled_per_session_max:
            return
        self.withholding = False
        for link in self.links.values():
            if isinstance(link, SenderLink) and link.withheld and not link.sending:
                link.give_back()
                self.emit(Flowed(link))

    def give_back_later(self) -> None:
        """Show the withheld credit after all received frames, because a peer may open and close its window many times in them."""
        if self.withholding:
            self.connection.withholding[self] = None

    # --- input of the peer -------------------------------------------------------------------------------------------------------

    def on_begin(self, begin: Begin, remote_channel: int) -> None:
        """Handle the peer's begin: answer it, or take it as the answer to ours."""
        # Keep only the numbers: the other fields may be as long as a frame, and a peer has a thousand sessions.
        self.remote = dataclasses.replace(begin, offered_capabilities=(), desired_capabilities=(), properties=None)
        self.remote_channel = remote_channel
        self._next_incoming_id = begin.next_outgoing_id
        self._outgoing_window = begin.incoming_window
        self.withholding = not begin.incoming_window
        state = self.move(SessionInput.RECV_BEGIN)
        if state is SessionState.BEGIN_RECEIVED:
            self.begin()
        if state is not SessionState.END_SENT:
            self.emit(SessionBegun(self))

    def on_end(self, end: End) -> None:
        """Handle the peer's end."""
        asked = self.state is SessionState.END_SENT
        self.move(SessionInput.RECV_END)
        self.connection.link_counts.unanswered -= asked
        if not asked:
            self._send_end(None)
        self.connection.forget(self)
        if not (asked and self._failed):
            self.emit(SessionEnded(self, end.error.exception() if end.error else None, self._close_links()))

    def fail(self, fault: AmqpError) -> None:
        """End because of a protocol error of the peer."""
        if self.state is SessionState.MAPPED:
            self._failed = True
            self._send_end(fault)
            self.emit(SessionEnded(self, fault, self._close_links()))

    def _send_end(self, error: AmqpError | None) -> None:
        self.flush_settled()
        self.drop_outgoing()
        self.send(End(Error.of(error)))
        if self.move(SessionInput.SEND_END) is SessionState.END_SENT:
            self.connection.link_counts.end()

    def on_connection_end(self) -> None:
        """End with the connection; later calls of the application do nothing. ``forget_deliveries`` releases the rest."""
        self.state = SessionState.ENDED
        self._detach_links()

    def forget_deliveries(self) -> list[Delivery]:
        """Release the unsettled deliveries after the end; return those that were sent."""
        self.incoming_unsettled.clear()
        return self.sent.clear()

    def _close_links(self) -> list[Delivery]:
        self._detach_links()
        return self.forget_deliveries()

    def _detach_links(self) -> None:
        for link in self.links.values():
            self.connection.link_counts.remove(link)
            link.state, link.credit = LinkState.DETACHED, 0
            if isinstance(link, ReceiverLink):
                link.drop_partial()
        self.links.clear()
        self._by_remote_handle.clear()
        self.drop_outgoing()

    def on_performative(self, performative: Composite) -> None:
        """Handle attach, flow, disposition and detach from the general decoder."""
        if self.move(SessionInput.RECV_FRAME) is not SessionState.MAPPED:
            return
        if isinstance(performative, Attach):
            self._on_attach(performative)
        elif isinstance(performative, Detach):
            self._by_handle(performative.handle).on_detach(performative)
        elif isinstance(performative, Flow):
            self.on_flow(performative)
        elif isinstance(performative, Disposition):
            take_disposition(self, hot.disposition_frame(performative))

    def _by_handle(self, handle: int) -> Link:
        link = self._by_remote_handle.get(handle)
        if link is None:
            raise SessionFault(UNATTACHED_HANDLE, f"handle {handle} is not attached")
        return link

    def _on_attach(self, attach: Attach) -> None:
        if attach.handle > self.limits.handle_max:
            raise ConnectionFault(FRAMING_ERROR, f"handle {attach.handle} exceeds handle-max {self.limits.handle_max}")
        if len(attach.name) > LINK_NAME_LENGTH_MAX:
            raise SessionFault(INVALID_FIELD, f"link name {attach.name[:60]!r}… exceeds the limit of {LINK_NAME_LENGTH_MAX} characters")
        if attach.handle in self._by_remote_handle:
            raise SessionFault(HANDLE_IN_USE, f"handle {attach.handle} is already attached")
        for link in self.links.values():
            if link.name == attach.name and link.RECEIVER is not attach.role and link.remote_handle is None:
                self._by_remote_handle[attach.handle] = link
                link.on_attach(attach)
                if link.state is LinkState.ATTACHED:
                    self.emit(AttachConfirmed(link))
                return
        self.connection.link_counts.check(self.limits.links_max)
        link = (SenderLink if attach.role else ReceiverLink)(self, attach.name, self._take_handle())
        self.links[link.handle] = self._by_remote_handle[attach.handle] = link
        self.connection.link_counts.add(link)
        link.on_attach(attach)
        self.emit(Attached(link))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """End the session if the peer violates the protocol within the block."""
        try:
            yield
        except SessionFault as fault:
            self.fail(fault)

    def on_transfer(self, frame: hot.TransferTuple, data: bytes, end: int) -> None:
        """Handle a transfer frame."""
        if self.state is not _MAPPED:
            self.move(SessionInput.RECV_FRAME)
            return
        if self._incoming_window <= 0:
            raise SessionFault(WINDOW_VIOLATION, "a transfer exceeds the session's incoming window")
        self._incoming_window -= 1
        self._next_incoming_id = (self._next_incoming_id + 1) & UINT_MAX
        link = self._by_remote_handle.get(frame[0])
        if not isinstance(link, ReceiverLink):
            link = self._by_handle(frame[0])
            raise SessionFault(ERRANT_LINK, f"a transfer on link {link.name!r:.60}, whose sender is this end")
        link.on_transfer(frame, data, end)
        if self._incoming_window <= self._window_low and self.state is SessionState.MAPPED:
            self.send_flow()

    def on_flow(self, flow: Flow, *_: Any) -> None:
        """Handle a flow frame: windows, and the credit of a link."""
        if self.state is not _MAPPED:
            self.move(SessionInput.RECV_FRAME)
            return
        unseen = (self._next_outgoing_id - (flow.next_incoming_id or 0)) & UINT_MAX
        self._outgoing_window = max(flow.incoming_window - unseen, 0) if unseen < SERIAL_HALF else 0
        if self._outgoing_window <= 0:
            self._withhold()
        elif self._outgoing:
            self._outgoing.write_more()
        self.give_back_later()
        if flow.handle is not None:
            self._by_handle(flow.handle).on_flow(flow)
        elif flow.echo:
            self.send_flow()

    # --- links -------------------------------------------------------------------------------------------------------------------

    def _take_handle(self) -> int:
        if self._free_handles:
            return self._free_handles.pop()
        if self._next_handle > self.remote.handle_max:
            raise SessionFault(RESOURCE_LIMIT_EXCEEDED, f"the peer allows at most {self.remote.handle_max + 1} links")
        self._next_handle += 1
        return self._next_handle - 1

    def abandon(self, link: Link) -> list[Delivery]:
        """Drop the deliveries of a link in flight; return our deliveries, which will not be settled."""
        deliveries: list[Delivery] = []
        if isinstance(link, ReceiverLink):
            link.drop_partial()
            for delivery_id in link.held:
                self.incoming_unsettled.pop(delivery_id)
        elif isinstance(link, SenderLink):
            deliveries = self.sent.pop_link(link)
            link.credit = link.withheld = 0
            self.give_back_later()
        link.held.clear()
        return deliveries

    def drop_outgoing(self, link: SenderLink | None = None) -> None:
        """Send nothing more for a link that is about to detach, or a session that is about to end."""
        if self._outgoing:
            self._outgoing.drop(link)

    def forget(self, link: Link) -> None:
        """Free the handles of a link that both ends have detached."""
        if self.links.pop(link.handle, None) is not None:
            self._free_handles.append(link.handle)
            self.connection.link_counts.remove(link)
        if link.remote_handle is not None:
            self._by_remote_handle.pop(link.remote_handle, None)
