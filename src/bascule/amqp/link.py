"""Links: one-way message flows with credit (part 2, section 2.6)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Final

from bascule.amqp import hot
from bascule.amqp.composite import Composite
from bascule.amqp.errors import (
    ILLEGAL_STATE,
    INVALID_FIELD,
    MESSAGE_SIZE_EXCEEDED,
    NOT_ALLOWED,
    NOT_IMPLEMENTED,
    RESOURCE_LIMIT_EXCEEDED,
    TRANSFER_LIMIT_EXCEEDED,
    AmqpError,
    DecodeError,
    FrameTooSmall,
    IllegalUse,
    LimitExceeded,
    LinkFault,
    SessionFault,
)
from bascule.amqp.events import DeclareReceived, Detached, Discharged, Flowed, TransferDiscarded, Transferred
from bascule.amqp.hot import TransferTail, TransferTuple
from bascule.amqp.limits import DELIVERY_TAG_SIZE_BYTES_MAX
from bascule.amqp.partials import Partial
from bascule.amqp.performatives import (
    UINT_MAX,
    Attach,
    Coordinator,
    Declare,
    Detach,
    Discharge,
    Error,
    Flow,
    Rejected,
    Source,
    Target,
    TransactionalState,
)
from bascule.amqp.states import LINK, LinkInput, LinkState
from bascule.amqp.transactions import decode_control

if TYPE_CHECKING:
    from bascule.amqp.outgoing import Buffer
    from bascule.amqp.session import Session

#: Serial numbers differ by less than half their range (RFC 1982).
SERIAL_HALF: Final = 1 << 31
#: Enum member of the hot path as a global: an attribute lookup on the class costs as much as a call.
_ATTACHED: Final = LinkState.ATTACHED


class Link:
    """One end of a link. ``context`` belongs to the application; ``remote`` is the peer's attach, ``local`` ours."""

    #: Whether this end is the receiver.
    RECEIVER: ClassVar[bool]

    def __init__(self, session: Session, name: str, handle: int) -> None:
        """Links are created by the session."""
        self.session = session
        self.name = name
        self.handle = handle
        self.remote_handle: int | None = None
        self.state = LinkState.UNATTACHED
        self.context: Any = None
        self.remote = Attach()
        self.attach_bytes = 0  # of the peer's attach, as it was received
        self.local: Attach | None = None
        self.credit = 0
        self.delivery_count = 0
        self.available = 0
        self.drain = False
        self.held: set[int] = set()  # deliveries that await settlement
        self._early_flow: Flow | None = None  # received before our attach; it takes effect then
        self._failed = False

    @property
    def source(self) -> Any:
        """The source in the peer's attach."""
        return self.remote.source

    @property
    def target(self) -> Any:
        """The target in the peer's attach."""
        return self.remote.target

    @property
    def attached(self) -> bool:
        """Whether both ends are attached."""
        return self.state is LinkState.ATTACHED

    def _move(self, step: LinkInput) -> LinkState:
        """Make a transition of the state machine. Raises SessionFault if the peer's step is not allowed."""
        state = LINK.get((self.state, step))
        if state is None:
            raise SessionFault(ILLEGAL_STATE, f"unexpected {step.name.lower()} on link {self.name!r:.60}, state {self.state.name.lower()}")
        self.state = state
        return state

    # --- called by the application -----------------------------------------------------------------------------------------------

    def accept(
        self,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        *,
        max_message_size: int = 0,
        offered_capabilities: tuple[str, ...] = (),
        properties: dict[Any, Any] | None = None,
    ) -> None:
        """Answer an Attached event; termini default to the peer's. ``max_message_size`` is in bytes, 0 for the connection's limit."""
        self._answer(source or self.remote.source, target or self.remote.target, max_message_size, offered_capabilities, properties)

    def refuse(self, error: AmqpError) -> None:
        """Answer an Attached event with a null terminus, and detach with the error (part 2, section 2.6.3)."""
        source, target = (self.remote.source, None) if self.RECEIVER else (None, self.remote.target)
        self._answer(source, target, 0, (), None)
        self.detach(error)  # does nothing if the answer did not fit the peer's frames
        self.forget_attach()

    def forget_attach(self) -> None:
        """Keep only the modes of both attaches, because an attach may be as long as a frame and a peer has thousands of links."""
        self.local = None
        self.remote = Attach(snd_settle_mode=self.remote.snd_settle_mode, rcv_settle_mode=self.remote.rcv_settle_mode)

    def _answer(self, source: Any, target: Any, max_message_size: int, offered: tuple[str, ...], properties: dict[Any, Any] | None) -> None:
        if self.state is LinkState.DETACHED:
            return  # the peer, its session or its connection has already ended
        if self.state not in (LinkState.ATTACH_RECEIVED, LinkState.LEFT):
            raise IllegalUse(f"cannot answer the attach of link {self.name!r} in state {self.state.name.lower()}")
        bare = Attach(
            self.name,
            self.handle,
            self.RECEIVER,
            self.remote.snd_settle_mode,
            0 if self.RECEIVER else self.remote.rcv_settle_mode,
            initial_delivery_count=None if self.RECEIVER else 0,
            max_message_size=max_message_size,
        )
        self.local = dataclasses.replace(bare, source=source, target=target, offered_capabilities=offered, properties=properties)
        state = self._move(LinkInput.SEND_ATTACH)
        try:
            self.session.send(self.local)
        except FrameTooSmall as fault:
            self._refuse_briefly(bare, fault)
            return
        if state is LinkState.ATTACHED and self._early_flow is not None:
            self._take_credit(self._early_flow)
        self._early_flow = None

    def _refuse_briefly(self, bare: Attach, fault: FrameTooSmall) -> None:
        """Refuse with null termini if the answer does not fit a frame of the peer; if these do not fit, end the session."""
        try:
            self.session.send(bare)
        except FrameTooSmall as worse:
            self.session.fail(worse)
        else:
            self.fail(fault)

    def detach(self, error: AmqpError | None = None, closed: bool = True) -> None:
        """Detach, for good if ``closed``. Does nothing on a detached link."""
        if self.state in (LinkState.ATTACHED, LinkState.ATTACH_SENT):
            self._send_detach(Detach(self.handle, closed, Error.of(error)))

    def _send_detach(self, detach: Detach) -> None:
        self.credit = 0
        self.session.flush_settled()
        self.session.send(detach)
        if self._move(LinkInput.SEND_DETACH) is LinkState.DETACHED:
            self.session.forget(self)
        else:
            self.session.connection.link_counts.end()

    # --- input of the peer -------------------------------------------------------------------------------------------------------

    def on_attach(self, attach: Attach) -> None:
        """Handle the peer's attach, which opens the link or answers ours."""
        self.remote, self.remote_handle, self.attach_bytes = attach, attach.handle, self.session.connection.performative_bytes
        self._move(LinkInput.RECV_ATTACH)

    def on_detach(self, detach: Detach) -> None:
        """Answer the peer's detach at once, after an attach that is still due."""
        asked = self.state is LinkState.DETACH_SENT
        state = self._move(LinkInput.RECV_DETACH)
        self.session.connection.link_counts.unanswered -= asked
        deliveries = self.session.abandon(self)
        if state is LinkState.LEFT:
            self._answer(None, None, 0, (), None)
        if state is LinkState.DETACHED:
            self.session.forget(self)
        else:
            self._send_detach(Detach(self.handle, detach.closed))
        error = detach.error.exception() if detach.error else None
        if not (asked and self._failed):
            self.session.emit(Detached(self, detach.closed, error, deliveries))

    def fail(self, fault: AmqpError) -> None:
        """Detach because of a protocol error of the peer."""
        deliveries = self.session.abandon(self)
        self._failed = True
        self.detach(fault)
        self.session.emit(Detached(self, True, fault, deliveries))

    def on_flow(self, flow: Flow) -> None:
        """Handle the peer's link state."""
        state = self._move(LinkInput.RECV_FLOW)
        if state is LinkState.ATTACH_RECEIVED:
            self._early_flow = dataclasses.replace(flow, properties=None)  # which may be as long as a frame
            self.drain = flow.drain
        elif state is LinkState.ATTACHED:
            self._take_credit(flow)
            if flow.echo:
                self.send_flow()
        else:
            return
        self.session.emit(Flowed(self))

    def _take_credit(self, flow: Flow) -> None:
        raise NotImplementedError

    def send_flow(self, echo: bool = False) -> None:
        """Send this link's state to the peer."""
        if self.state is LinkState.ATTACHED:
            self.session.send_link_flow(self, self._credit_told(), self.available, self.drain, echo)

    def _credit_told(self) -> int:
        return self.credit


class SenderLink(Link):
    """The sending end. ``credit`` is the number of messages that may be sent now; the application sets ``available`` for the peer."""

    RECEIVER = False

    def __init__(self, session: Session, name: str, handle: int) -> None:
        """Links are created by the session."""
        super().__init__(session, name, handle)
        self.withheld = 0  # credit hidden while the window is closed, too much is unsettled, or a message has unwritten frames
        self.sending = False  # whether a message has unwritten frames
        self.delivery_start = hot.delivery_start(session.channel, handle)
        self._flow_due = False

    def _send_detach(self, detach: Detach) -> None:
        self.withheld = 0
        self.session.drop_outgoing(self)
        super()._send_detach(detach)

    def withhold(self) -> None:
        """Show no credit until ``give_back``."""
        self.withheld += self.credit
        self.credit = 0

    def give_back(self) -> None:
        """Show the credit that was withheld."""
        self.credit, self.withheld = self.credit + self.withheld, 0

    def hold(self) -> None:
        """Hide the credit and send no link state until the last frame of the current message is written."""
        self.sending = True
        self.withhold()

    def let_go(self) -> None:
        """Show the credit again after all frames of a message are written."""
        self.sending = False
        if not self.session.withholding:
            self.give_back()
        if self._flow_due:
            self.send_flow()
        if self.drain and not self.credit and not self.withheld:
            self.drained()
        if self.credit:
            self.session.emit(Flowed(self))

    def send_flow(self, echo: bool = False) -> None:
        """Send this link's state, but not between two frames of a message: the peer would count the message as received."""
        self._flow_due = self.sending
        if not self.sending:
            super().send_flow(echo)

    def send(
        self,
        parts: bytes | tuple[Buffer, ...],
        context: Any = None,
        settled: bool = False,
        *,
        state: Composite | None = None,
        message_format: int = 0,
    ) -> int:
        """Send a message and return its delivery id; ``context`` is returned with its outcome. Raises IllegalUse without credit."""
        if self.credit <= 0 or self.state is not _ATTACHED:
            raise IllegalUse(f"link {self.name!r} has no credit")
        self.credit -= 1
        self.delivery_count = (self.delivery_count + 1) & UINT_MAX
        return self.session.send_delivery(self, parts if isinstance(parts, tuple) else (parts,), context, settled, state, message_format)

    def drained(self) -> None:
        """Use up the remaining credit if the peer requested a ``drain``; the application has nothing more to send."""
        if self.drain and self.state is LinkState.ATTACHED and not self.sending:
            self.delivery_count = (self.delivery_count + self.credit + self.withheld) & UINT_MAX
            self.credit = self.withheld = 0
            self.send_flow()
            self.drain = False

    def _take_credit(self, flow: Flow) -> None:
        if flow.link_credit is not None:
            # The receiver's credit minus the sends that it has not seen yet (part 2, section 2.6.7).
            unseen = (self.delivery_count - (flow.delivery_count or 0)) & UINT_MAX
            self.credit = max(flow.link_credit - unseen, 0) if unseen < SERIAL_HALF else 0
            self.withheld = 0
            if self.session.withholding or self.sending:
                self.withheld, self.credit = self.credit, 0
        self.drain = flow.drain
        if self.drain and not self.credit and not self.withheld:
            self.drained()  # no credit to return

    def _credit_told(self) -> int:
        return self.credit + self.withheld


class ReceiverLink(Link):
    """The receiving end. ``credit`` is the number of messages the peer may still send; the application adds credit with ``flow``."""

    RECEIVER = True

    def __init__(self, session: Session, name: str, handle: int) -> None:
        """Links are created by the session."""
        super().__init__(session, name, handle)
        self.is_coordinator = False  # whether the peer controls transactions with this link
        self._partial: Partial | None = None
        self._size_bytes_max = session.limits.message_size_bytes_max

    def flow(self, credit: int, *, drain: bool = False, echo: bool = False) -> None:
        """Set the credit to ``credit`` messages from now on.

        With ``drain``, the peer sends the messages that it has and returns the rest.
        """
        self.credit, self.drain = credit, drain
        self.send_flow(echo)

    def settle(self, delivery_id: int, state: Composite) -> None:
        """Settle a delivery with its outcome. Runs of adjacent deliveries with the same state share one frame."""
        self.session.settle_incoming(delivery_id, state)

    def on_attach(self, attach: Attach) -> None:
        """Handle the sender's attach, which has its initial delivery count."""
        super().on_attach(attach)
        self.delivery_count = attach.initial_delivery_count or 0
        self.is_coordinator = type(attach.target) is Coordinator

    def _answer(self, source: Any, target: Any, max_message_size: int, offered: tuple[str, ...], properties: dict[Any, Any] | None) -> None:
        self._size_bytes_max = max_message_size or self._size_bytes_max
        super()._answer(source, target, self._size_bytes_max, offered, properties)

    def _take_credit(self, flow: Flow) -> None:
        # A sender that drained advances its delivery count beyond its sends, which uses up the credit.
        if flow.delivery_count is not None:
            used = (flow.delivery_count - self.delivery_count) & UINT_MAX
            if 0 < used < SERIAL_HALF:
                self.credit = max(self.credit - used, 0)
                self.delivery_count = flow.delivery_count
        if self.drain and self.credit == 0:
            self.drain = False

    def on_transfer(self, frame: TransferTuple, data: bytes, end: int) -> None:
        """Handle a transfer frame of this link; its payload ends at ``end``."""
        _, delivery_id, tag, payload, tail = frame
        if self.state is not _ATTACHED:
            self._move(LinkInput.RECV_TRANSFER)
            if not tail.aborted:
                self._discard(tail)
            return
        if (partial := self._partial) is not None:
            self._continue(partial, frame, data[payload:end])
            return
        if delivery_id is None or tag is None:
            raise SessionFault(INVALID_FIELD, f"first transfer of a delivery on link {self.name!r:.60} has no id or tag")
        if len(tag) > DELIVERY_TAG_SIZE_BYTES_MAX:
            raise SessionFault(INVALID_FIELD, f"delivery-tag of {len(tag)} bytes exceeds the limit of {DELIVERY_TAG_SIZE_BYTES_MAX}")
        if self.credit <= 0:
            self._refuse(tail, LinkFault(TRANSFER_LIMIT_EXCEEDED, "the peer sent a message without credit"))
            return
        self.credit -= 1
        self.delivery_count = (self.delivery_count + 1) & UINT_MAX
        if tail[7]:  # complete in one frame; by index, because this is the hot path
            if end - payload > self._size_bytes_max:
                self._too_large(tail)
            else:
                self._complete(delivery_id, tag, data[payload:end], tail)
        elif tail.resume:
            self._refuse(tail, LinkFault(NOT_IMPLEMENTED, "resuming deliveries is not supported"))
        elif tail.aborted:
            self._aborted()
        else:
            self._partial = Partial(delivery_id, tag, tail)
            self._gather(self._partial, data[payload:end])

    def _continue(self, partial: Partial, frame: TransferTuple, payload: bytes) -> None:
        _, delivery_id, tag, _, tail = frame
        if delivery_id is not None and delivery_id != partial.delivery_id:
            raise SessionFault(INVALID_FIELD, f"delivery {delivery_id} begins before delivery {partial.delivery_id} is complete")
        if (tag is not None and tag != partial.tag) or not partial.goes_on_with(tail):
            what = f"a transfer of delivery {partial.delivery_id} differs from its first one in delivery-tag, message-format or transaction"
            raise SessionFault(INVALID_FIELD, what)
        if tail.aborted:
            self._aborted()
            return
        if tail.settled:
            partial.tail = partial.tail._replace(settled=True)
        if self._gather(partial, payload) and not tail.more:
            self.drop_partial()
            self._complete(partial.delivery_id, partial.tag, partial.octets.getvalue(), partial.tail)

    def _gather(self, partial: Partial, payload: bytes) -> bool:
        partial.octets.write(payload)
        partial.size_bytes += len(payload)
        connection = self.session.connection
        connection.partial_bytes += len(payload)
        connection.partials.grow(self, len(payload))
        if connection.partial_bytes > connection.limits.partial_bytes_max:
            raise LimitExceeded(f"incomplete messages exceed {connection.limits.partial_bytes_max} bytes in total")
        if partial.size_bytes > self._size_bytes_max:
            self._too_large(partial.tail)
            return False
        return self._partial is not None

    def drop_partial(self) -> None:
        """Drop the partial message, which is complete or abandoned."""
        if self._partial is not None:
            connection = self.session.connection
            connection.partial_bytes -= self._partial.size_bytes
            connection.partials.drop(self, self._partial.size_bytes)
            self._partial = None

    def give_way(self, size_bytes_max: int) -> None:
        """Detach to free the memory of the partial message for other links."""
        fault = LinkFault(RESOURCE_LIMIT_EXCEEDED, f"incomplete messages exceed {size_bytes_max} bytes in total; send this message again")
        if self._partial is not None:
            self._refuse(self._partial.tail, fault)

    def _aborted(self) -> None:
        """Handle an aborted message. It has used credit, so the application gets Flowed."""
        self.drop_partial()
        self.session.emit(Flowed(self))

    def _too_large(self, tail: TransferTail) -> None:
        self._refuse(tail, LinkFault(MESSAGE_SIZE_EXCEEDED, f"the message exceeds the limit of {self._size_bytes_max} bytes"))

    def _refuse(self, tail: TransferTail, fault: AmqpError) -> None:
        """Detach because of a message; ``tail`` is the tail of its first frame."""
        self.drop_partial()
        self._discard(tail, fault)
        self.fail(fault)

    def _discard(self, tail: TransferTail, fault: AmqpError | None = None) -> None:
        """Report a message of a transaction that is not passed to the application."""
        if type(tail.state) is TransactionalState:
            self.session.emit(TransferDiscarded(self, tail.state.txn_id, fault))

    def _send_detach(self, detach: Detach) -> None:
        if (partial := self._partial) is not None:  # its further frames are discarded
            self.drop_partial()
            self._discard(partial.tail)
        super()._send_detach(detach)

    def _complete(self, delivery_id: int, tag: bytes, payload: bytes, tail: TransferTail) -> None:
        _, message_format, settled, _, state, _, _, _ = tail
        if self.drain and not self.credit:
            self.drain = False  # only after the whole message has arrived
        session = self.session
        if not settled:
            session.hold_incoming(delivery_id, self)
        if self.is_coordinator:
            if settled:  # a settled message gets no outcome (part 4, sections 4.2 and 4.3)
                self.fail(LinkFault(NOT_ALLOWED, "a declare or discharge must not be sent settled"))
                return
            self._control(delivery_id, payload)
        else:
            txn_id = state.txn_id if type(state) is TransactionalState else None
            session.emit(Transferred(self, delivery_id, tag, payload, message_format, settled, txn_id))

    def _control(self, delivery_id: int, payload: bytes) -> None:
        try:
            control = decode_control(payload)
        except DecodeError as error:
            self.settle(delivery_id, Rejected(Error.of(error)))
            return
        if isinstance(control, Declare):
            self.session.emit(DeclareReceived(self, delivery_id))
        elif isinstance(control, Discharge):
            self.session.emit(Discharged(self, delivery_id, control.txn_id, control.fail))
