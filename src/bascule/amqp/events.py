"""The events of a connection, which the application dispatches by type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bascule.amqp.errors import AmqpError
from bascule.amqp.performatives import Open

if TYPE_CHECKING:
    from bascule.amqp.link import Link, ReceiverLink, SenderLink
    from bascule.amqp.session import Session


class Delivery(NamedTuple):
    """A delivery sent to the peer; ``context`` is the application's argument of ``send``."""

    link: SenderLink
    delivery_id: int
    context: Any


class Event:
    """The base class of events."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Opened(Event):
    """The peer sent an open. A server answers with ``connection.open(...)``, followed by ``close(error)`` to refuse."""

    open: Open


@dataclass(slots=True, eq=False)
class ConnectionClosed(Event):
    """The connection ended; reported once. Its sessions, links and deliveries need no answers."""

    error: AmqpError | None
    by_peer: bool


@dataclass(slots=True, eq=False)
class SessionBegun(Event):
    """A session began: the peer began it, and the answer is sent, or the peer confirmed ours."""

    session: Session


@dataclass(slots=True, eq=False)
class SessionEnded(Event):
    """A session ended with its links; ``deliveries`` will not be settled."""

    session: Session
    error: AmqpError | None
    deliveries: list[Delivery]


@dataclass(slots=True, eq=False)
class Attached(Event):
    """The peer attached a link; the application must call ``link.accept(...)`` or ``link.refuse(...)``."""

    link: Link


@dataclass(slots=True, eq=False)
class AttachConfirmed(Event):
    """The peer answered our attach. A null terminus in ``link.remote`` is a refusal; Detached follows."""

    link: Link


@dataclass(slots=True, eq=False)
class Detached(Event):
    """The peer detached a link, and the answer is sent, or the engine detached it after a protocol error.

    ``deliveries`` were sent on the link and will not be settled.
    """

    link: Link
    closed: bool
    error: AmqpError | None
    deliveries: list[Delivery]


@dataclass(slots=True, eq=False)
class Flowed(Event):
    """The credit or drain of a link changed. If ``link.drain`` is set, the application must call ``link.drained()``."""

    link: Link


@dataclass(slots=True, eq=False)
class Transferred(Event):
    """A complete message. If it is ``settled``, it needs no ``link.settle``."""

    link: ReceiverLink
    delivery_id: int
    tag: bytes
    payload: bytes
    message_format: int
    settled: bool
    txn_id: bytes | None


@dataclass(slots=True, eq=False)
class TransferDiscarded(Event):
    """A message of a transaction that is not passed to the application and gets no outcome.

    This end has detached the link, because of this message, with ``error``, or before the message arrived.
    """

    link: ReceiverLink
    txn_id: bytes
    error: AmqpError | None


@dataclass(slots=True, eq=False)
class Dispositioned(Event):
    """A disposition of the peer for deliveries sent to it: an outcome, within a transaction if ``txn_id`` is given.

    The engine has removed ``settled`` deliveries; the others wait for ``session.settle_outgoing``. ``more``: the next event of the session
    has further deliveries of the same range, or none; see Connection.unfinished. ``lost``: the range of a transaction includes deliveries
    whose link had ended before.
    """

    session: Session
    deliveries: list[Delivery]
    state: Any
    settled: bool
    txn_id: bytes | None
    more: bool = False
    lost: bool = False


@dataclass(slots=True, eq=False)
class DeclareReceived(Event):
    """A request to begin a transaction: settle it with ``performatives.Declared(txn_id)``."""

    link: ReceiverLink
    delivery_id: int


@dataclass(slots=True, eq=False)
class Discharged(Event):
    """A request to end a transaction, by rollback if ``fail``: settle it with accepted or rejected."""

    link: ReceiverLink
    delivery_id: int
    txn_id: bytes
    fail: bool
