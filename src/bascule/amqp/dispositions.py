"""Dispositions of a peer over ranges of deliveries. A wide range is handled in pieces, before any later frame."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bascule.amqp import hot
from bascule.amqp.errors import INVALID_FIELD, SessionFault
from bascule.amqp.events import Delivery, Dispositioned
from bascule.amqp.link import SERIAL_HALF
from bascule.amqp.performatives import UINT_MAX, Received, TransactionalState
from bascule.amqp.states import SessionInput, SessionState

if TYPE_CHECKING:
    from bascule.amqp.session import Session

#: Enum member of the hot path as a global: an attribute lookup on the class costs as much as a call.
_MAPPED = SessionState.MAPPED


def take_disposition(session: Session, frame: hot.DispositionTuple, *_: Any, begun: bool = False) -> None:
    """Handle a disposition, at most ConnectionLimits.deliveries_per_piece deliveries at once. Raises SessionFault for an invalid range.

    If deliveries may be left, Connection.unfinished continues with them. ``begun``: a part of the range has been handled.
    """
    if session.state is not _MAPPED:
        session.move(SessionInput.RECV_FRAME)
        return
    by_receiver, first, last, settled, state = frame
    width = (last - first) & UINT_MAX
    if width >= SERIAL_HALF:
        raise SessionFault(INVALID_FIELD, f"invalid range of a disposition: deliveries {first} to {last}")
    most = session.limits.deliveries_per_piece
    if not by_receiver:
        found = session.incoming_unsettled.pop_range(first, last, most) if settled else []
        for delivery_id, link in found:
            link.held.discard(delivery_id)
        if len(found) >= most:
            session.connection.unfinished = partial(_go_on, session, frame)
        return
    txn_id = None
    if type(state) is TransactionalState:
        state, txn_id = state.outcome, state.txn_id
    if settled:
        deliveries = session.sent.settle(first, last, most)
        if session.withholding:
            session.give_back_later()
    else:
        undecided = state is None or type(state) is Received
        deliveries = [] if undecided else session.sent.decide(first, last, most)
    more = len(deliveries) >= most
    lost = txn_id is not None and state is not None and not begun and session.sent.lost(first, last)
    separate = begun or lost
    if separate or (deliveries and not (session.connection.events and _continued(session, deliveries, state, settled, txn_id))):
        session.emit(Dispositioned(session, deliveries, state, settled, txn_id, more, lost))
    if more:
        # Deliveries sent before the next piece may have ids of the range, if the range includes ids that the peer has not received.
        last = (first + min(width, session.newest_delivery_id - first & UINT_MAX)) & UINT_MAX
        session.connection.unfinished = partial(_go_on, session, (by_receiver, first, last, settled, frame[-1]))


def _continued(session: Session, deliveries: list[Delivery], state: Any, settled: bool, txn_id: bytes | None) -> bool:
    """Add deliveries to the last event, as if its disposition had a wider range. Return False if they cannot belong to one range.

    Most clients settle each message with its own frame, and many of these frames arrive together.
    """
    last = session.connection.events[-1]
    if not isinstance(last, Dispositioned) or last.session is not session or last.state is not state or last.settled is not settled:
        return False
    before = last.deliveries
    if last.more or last.lost or last.txn_id != txn_id or not before or len(before) + len(deliveries) > session.limits.deliveries_per_piece:
        return False
    (link, newest, _), (next_link, delivery_id, _) = before[-1], deliveries[0]
    if next_link is not link or delivery_id != newest + 1:
        return False
    before += deliveries
    return True


def _go_on(session: Session, frame: hot.DispositionTuple) -> None:
    """Handle the next deliveries of a range, unless the session has ended meanwhile."""
    if session.state is _MAPPED:
        take_disposition(session, frame, begun=True)
