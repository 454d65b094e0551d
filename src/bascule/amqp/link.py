"""Links: one-way routes of messages with credit (part 2, section 2.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from bascule.amqp import hot
from bascule.amqp.errors import (
    INVALID_FIELD,
    MESSAGE_SIZE_EXCEEDED,
    NOT_IMPLEMENTED,
    TRANSFER_LIMIT_EXCEEDED,
    AmqpError,
    DecodeError,
    IllegalUse,
    LinkFault,
    SessionFault,
)
from bascule.amqp.events import Declared, Detached, Discharged, Flowed, Transferred
from bascule.amqp.performatives import (
    UINT_MAX,
    Attach,
    Composite,
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
    from bascule.amqp.session import Session

#: Serial numbers differ by less than half their range (RFC 1982).
SERIAL_HALF: Final = 1 << 31


class Link:
    """One end of a link. ``context`` belongs to the application; ``remote`` is the peer's attach, ``local`` ours."""

    #: Whether we are the link's receiver.
    RECEIVER: ClassVar[bool]

    def __init__(self, session: Session, name: str, handle: int) -> None:
        """Made by the session."""
        self.session = session
        self.name = name
        self.handle = handle
        self.remote_handle: int | None = None
        self.state = LinkState.UNATTACHED
        self.context: Any = None
        self.remote = Attach()
        self.local: Attach | None = None
        self.credit = 0
        self.delivery_count = 0
        self.drain = False
        self._early_flow: Flow | None = None
        self._left_closed = False

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
        """Take a step of the state machine. Raises SessionFault where the peer's step is illegal."""
        state = LINK.get((self.state, step))
        if state is None:
            raise SessionFault("amqp:illegal-state", f"{step.name.lower()} on link {self.name!r:.60} in state {self.state.name.lower()}")
        self.state = state
        return state

    # --- what the application does -----------------------------------------------------------------------------------------------

    def accept(
        self,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        *,
        max_message_size: int = 0,
        offered_capabilities: tuple[str, ...] = (),
        properties: dict[Any, Any] | None = None,
    ) -> None:
        """Answer an Attached event; termini default to the peer's own. ``max_message_size`` in bytes, 0 for the connection's limit."""
        self._answer(source or self.remote.source, target or self.remote.target, max_message_size, offered_capabilities, properties)

    def refuse(self, error: AmqpError) -> None:
        """Answer an Attached event with a null terminus, and detach with the error (part 2, section 2.6.3)."""
        source, target = (self.remote.source, None) if self.RECEIVER else (None, self.remote.target)
        self._answer(source, target, 0, (), None)
        self.detach(error)

    def _answer(self, source: Any, target: Any, max_message_size: int, offered: tuple[str, ...], properties: dict[Any, Any] | None) -> None:
        if self.state not in (LinkState.ATTACH_RECEIVED, LinkState.LEFT):
            if self.state is LinkState.DETACHED:
                return  # the session or connection ended meanwhile
            raise IllegalUse(f"link {self.name!r} in state {self.state.name.lower()} waits for no answer")
        self.local = Attach(
            self.name,
            self.handle,
            self.RECEIVER,
            self.remote.snd_settle_mode,
            0 if self.RECEIVER else self.remote.rcv_settle_mode,
            source,
            target,
            initial_delivery_count=None if self.RECEIVER else 0,
            max_message_size=(max_message_size or self.session.limits.message_size_bytes_max) if self.RECEIVER else 0,
            offered_capabilities=offered,
            properties=properties,
        )
        state = self._move(LinkInput.SEND_ATTACH)
        self.session.send(self.local)
        if state is LinkState.DETACH_RECEIVED:
            self._send_detach(Detach(self.handle, self._left_closed))
        elif self._early_flow is not None:
            self._credit(self._early_flow)

    def detach(self, error: AmqpError | None = None, closed: bool = True) -> None:
        """Detach, for good where ``closed``. Nothing happens on a link that is detached already."""
        if self.state in (LinkState.ATTACHED, LinkState.ATTACH_SENT):
            self._send_detach(Detach(self.handle, closed, Error.of(error)))

    def _send_detach(self, detach: Detach) -> None:
        self.credit = 0
        self.session.flush_settled()
        self.session.send(detach)
        if self._move(LinkInput.SEND_DETACH) is LinkState.DETACHED:
            self.session.forget(self)

    # --- what the peer does ------------------------------------------------------------------------------------------------------

    def on_attach(self, attach: Attach) -> None:
        """The peer's attach: the first word, or the answer to ours."""
        self.remote, self.remote_handle = attach, attach.handle
        self._move(LinkInput.RECV_ATTACH)

    def on_detach(self, detach: Detach) -> None:
        """The peer's detach; our answer follows at once, unless our attach has to come before it."""
        asked = self.state is LinkState.DETACH_SENT
        state = self._move(LinkInput.RECV_DETACH)
        deliveries = self.session.abandon(self)
        if state is LinkState.LEFT:
            self._left_closed = detach.closed
        elif state is LinkState.DETACH_RECEIVED:
            self._send_detach(Detach(self.handle, detach.closed))
        else:
            self.session.forget(self)
        error = detach.error.exception() if detach.error else None
        if not (asked and self._failed):
            self.session.emit(Detached(self, detach.closed, error, deliveries))

    _failed = False

    def fail(self, fault: LinkFault) -> None:
        """Detach for a breach of the protocol by the peer."""
        deliveries = self.session.abandon(self)
        self._failed = True
        self.detach(fault)
        self.session.emit(Detached(self, True, fault, deliveries))

    def on_flow(self, flow: Flow) -> None:
        """The peer's link state."""
        state = self._move(LinkInput.RECV_FLOW)
        if state is LinkState.ATTACH_RECEIVED:
            self._early_flow = flow
            self.drain = flow.drain
        elif state is LinkState.ATTACHED:
            self._credit(flow)
            if flow.echo:
                self.send_flow()
        else:
            return
        self.session.emit(Flowed(self))

    def _credit(self, flow: Flow) -> None:
        raise NotImplementedError

    def send_flow(self, echo: bool = False) -> None:
        """Tell the peer this link's state."""
        if self.state is LinkState.ATTACHED:
            self.session.send_link_flow(self, self._credit_told(), self.available, self.drain, echo)

    available = 0

    def _credit_told(self) -> int:
        return self.credit


class SenderLink(Link):
    """We send. ``credit`` is what may be sent now; ``available``, for the peer to know, is the application's to set."""

    RECEIVER = False

    def __init__(self, session: Session, name: str, handle: int) -> None:
        """Made by the session."""
        super().__init__(session, name, handle)
        self.withheld = 0  # credit that the session's limit of unsettled deliveries keeps back

    def send(
        self,
        parts: bytes | tuple[bytes, ...],
        *,
        context: Any = None,
        settled: bool = False,
        state: Composite | None = None,
        message_format: int = 0,
    ) -> int:
        """Send a message; ``context`` comes back with its outcome. Returns the delivery id. Raises IllegalUse without credit."""
        if self.credit <= 0 or self.state is not LinkState.ATTACHED:
            raise IllegalUse(f"link {self.name!r} has no credit")
        self.credit -= 1
        self.delivery_count = (self.delivery_count + 1) & UINT_MAX
        return self.session.send_delivery(self, (parts,) if isinstance(parts, bytes) else parts, context, settled, state, message_format)

    def drained(self) -> None:
        """Nothing more to send for this credit: use it up, as the peer asked for by ``drain``."""
        if self.drain and self.state is LinkState.ATTACHED:
            self.delivery_count = (self.delivery_count + self.credit + self.withheld) & UINT_MAX
            self.credit = self.withheld = 0
            self.send_flow()
            self.drain = False

    def _credit(self, flow: Flow) -> None:
        if flow.link_credit is not None:
            # What the receiver granted, less what it has not seen yet of our sends (part 2, section 2.6.7).
            unseen = (self.delivery_count - (flow.delivery_count or 0)) & UINT_MAX
            self.credit = max(flow.link_credit - unseen, 0) if unseen < SERIAL_HALF else 0
            self.withheld = 0
            if self.session.withholding:
                self.withheld, self.credit = self.credit, 0
        self.drain = flow.drain

    def _credit_told(self) -> int:
        return self.credit + self.withheld


class ReceiverLink(Link):
    """We receive. ``credit`` is what the peer may still send; the application tops it up by ``flow``."""

    RECEIVER = True

    def __init__(self, session: Session, name: str, handle: int) -> None:
        """Made by the session."""
        super().__init__(session, name, handle)
        self._partial: list[bytes] | None = None
        self._partial_size = 0
        self._first: hot.TransferFrame | None = None

    @property
    def is_coordinator(self) -> bool:
        """Whether the peer controls transactions by this link."""
        return type(self.remote.target) is Coordinator

    def flow(self, credit: int, *, drain: bool = False, echo: bool = False) -> None:
        """Grant ``credit`` messages from here on (absolute); with ``drain`` the peer sends what it has and gives the rest back."""
        self.credit, self.drain = credit, drain
        self.send_flow(echo)

    def settle(self, delivery_id: int, state: Composite) -> None:
        """Settle a delivery with its outcome. Runs of neighbours with the same state share one frame."""
        self.session.settle_incoming(delivery_id, state)

    def on_attach(self, attach: Attach) -> None:
        """The sender says where its delivery count begins."""
        super().on_attach(attach)
        self.delivery_count = attach.initial_delivery_count or 0

    def _credit(self, flow: Flow) -> None:
        # A sender that drained advances its delivery count past what it sent, and the credit goes with it.
        if flow.delivery_count is not None:
            used = (flow.delivery_count - self.delivery_count) & UINT_MAX
            if 0 < used < SERIAL_HALF:
                self.credit = max(self.credit - used, 0)
                self.delivery_count = flow.delivery_count
        if self.drain and self.credit == 0:
            self.drain = False

    def on_transfer(self, frame: hot.TransferFrame, data: bytes, end: int) -> None:
        """One transfer frame of this link; ``data[frame.payload:end]`` is its part of the message."""
        if self.state is not LinkState.ATTACHED:
            self._move(LinkInput.RECV_TRANSFER)
            return
        if self._partial is not None:
            self._continue(frame, data[frame.payload : end])
            return
        if frame.delivery_id is None or frame.delivery_tag is None:
            raise SessionFault(INVALID_FIELD, f"a delivery on link {self.name!r:.60} begins without id or tag")
        if self.credit <= 0:
            self.fail(LinkFault(TRANSFER_LIMIT_EXCEEDED, "a message without credit"))
            return
        self.credit -= 1
        self.delivery_count = (self.delivery_count + 1) & UINT_MAX
        if frame.more or frame.aborted or frame.resume:
            self._begin(frame, data[frame.payload : end])
        else:
            self._complete(frame, data[frame.payload : end], frame.settled)

    def _begin(self, frame: hot.TransferFrame, payload: bytes) -> None:
        if frame.resume:
            self.fail(LinkFault(NOT_IMPLEMENTED, "deliveries are not resumed"))
        elif not frame.aborted:
            self._first, self._partial, self._partial_size = frame, [payload], len(payload)
            self._check_size(self._partial_size)

    def _continue(self, frame: hot.TransferFrame, payload: bytes) -> None:
        first, parts = self._first, self._partial
        assert first is not None
        assert parts is not None
        if frame.delivery_id is not None and frame.delivery_id != first.delivery_id:
            raise SessionFault(INVALID_FIELD, f"delivery {frame.delivery_id} begins within delivery {first.delivery_id}")
        if frame.aborted:
            self._first = self._partial = None
            return
        parts.append(payload)
        self._partial_size += len(payload)
        if frame.settled and not first.settled:
            first = self._first = first._replace(settled=True)
        if self._check_size(self._partial_size) and not frame.more:
            self._first = self._partial = None
            self._complete(first, b"".join(parts), first.settled)

    def _check_size(self, size_bytes: int) -> bool:
        limit = self.local.max_message_size if self.local else 0
        if not limit or size_bytes <= limit:
            return True
        self._first = self._partial = None
        self.fail(LinkFault(MESSAGE_SIZE_EXCEEDED, f"a message of more than {limit} bytes"))
        return False

    def _complete(self, frame: hot.TransferFrame, payload: bytes, settled: bool) -> None:
        if not self._check_size(len(payload)):
            return
        assert frame.delivery_id is not None
        assert frame.delivery_tag is not None
        if not settled:
            self.session.hold_incoming(frame.delivery_id, self)
        if self.is_coordinator:
            self._control(frame.delivery_id, payload)
            return
        state = frame.state
        txn_id = state.txn_id if type(state) is TransactionalState else None
        self.session.emit(Transferred(self, frame.delivery_id, frame.delivery_tag, payload, frame.message_format or 0, settled, txn_id))

    def _control(self, delivery_id: int, payload: bytes) -> None:
        try:
            control = decode_control(payload)
        except DecodeError as error:
            self.settle(delivery_id, Rejected(Error.of(error)))
            return
        if isinstance(control, Declare):
            self.session.emit(Declared(self, delivery_id))
        elif isinstance(control, Discharge):
            self.session.emit(Discharged(self, delivery_id, control.txn_id, control.fail))
