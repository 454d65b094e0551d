"""What a connection tells its application, dispatched by type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bascule.amqp.errors import AmqpError
from bascule.amqp.performatives import Open

if TYPE_CHECKING:
    from bascule.amqp.link import Link, ReceiverLink, SenderLink
    from bascule.amqp.session import Session


class Delivery(NamedTuple):
    """A delivery that we sent; ``context`` is what the application gave ``send``."""

    link: SenderLink
    delivery_id: int
    context: Any


class Event:
    """Root of the events."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Opened(Event):
    """The peer opened. A server answers with ``connection.open(...)``, and with ``close(error)`` right after it to refuse."""

    open: Open


@dataclass(slots=True, eq=False)
class ConnectionClosed(Event):
    """The connection's end, told once. What it held needs no answers."""

    error: AmqpError | None
    by_peer: bool


@dataclass(slots=True, eq=False)
class SessionBegun(Event):
    """A session is there: the peer began it (the answer is given already), or confirmed ours."""

    session: Session


@dataclass(slots=True, eq=False)
class SessionEnded(Event):
    """A session's end, with its links and ``deliveries`` that nobody will settle any more."""

    session: Session
    error: AmqpError | None
    deliveries: list[Delivery]


@dataclass(slots=True, eq=False)
class Attached(Event):
    """The peer attached a link: ``link.accept(...)`` or ``link.refuse(...)`` is due."""

    link: Link


@dataclass(slots=True, eq=False)
class AttachConfirmed(Event):
    """The peer answered our attach. A null terminus in ``link.remote`` means that it refuses: Detached follows."""

    link: Link


@dataclass(slots=True, eq=False)
class Detached(Event):
    """The peer detached a link (the answer is given already), or the engine did for a breach of the protocol.

    ``deliveries`` are those we sent on it that nobody will settle any more.
    """

    link: Link
    closed: bool
    error: AmqpError | None
    deliveries: list[Delivery]


@dataclass(slots=True, eq=False)
class Flowed(Event):
    """Credit or drain of a link changed. After ``link.drain`` the application owes ``link.drained()``."""

    link: Link


@dataclass(slots=True, eq=False)
class Transferred(Event):
    """A whole message. ``settled`` ones need no ``link.settle``."""

    link: ReceiverLink
    delivery_id: int
    tag: bytes
    payload: bytes
    message_format: int
    settled: bool
    txn_id: bytes | None


@dataclass(slots=True, eq=False)
class TransferDiscarded(Event):
    """A message of a transaction that the application does not get, and for which no outcome is sent.

    This end has detached the link: because of this message, which is ``error``, or before the message came.
    """

    link: ReceiverLink
    txn_id: bytes
    error: AmqpError | None


@dataclass(slots=True, eq=False)
class Dispositioned(Event):
    """The peer's word about deliveries that we sent: an outcome, within a transaction where ``txn_id`` is given.

    ``settled`` ones are forgotten by the engine; the others wait for ``session.settle_outgoing``. ``more``: the next event of the session
    is about further deliveries of the same range, or about none; see Connection.unfinished.
    """

    session: Session
    deliveries: list[Delivery]
    state: Any
    settled: bool
    txn_id: bytes | None
    more: bool = False


@dataclass(slots=True, eq=False)
class DeclareReceived(Event):
    """A transaction is asked for: settle with ``performatives.Declared(txn_id)``."""

    link: ReceiverLink
    delivery_id: int


@dataclass(slots=True, eq=False)
class Discharged(Event):
    """A transaction is to end, rolled back where ``fail``: settle with accepted or rejected."""

    link: ReceiverLink
    delivery_id: int
    txn_id: bytes
    fail: bool
