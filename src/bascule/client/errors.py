"""What can go wrong for an application, and what it can do about it.

BasculeError
├── Unavailable                  the broker is not there (yet, or any more)
│   ├── TimedOut                 no answer in time; what was asked for may or may not happen
│   └── ConnectionLost           the connection ended and is not made again
├── InvalidInput
│   └── Refused                  the broker said no: the same again will fail again
│       ├── InvalidDestination   there is no such queue, topic or subscription
│       ├── InvalidSelector
│       ├── InvalidClientId      somebody else is connected under it
│       ├── SecurityDenied       user, password or permission
│       └── MessageRefused       this message, not the others
├── IllegalState                 a call that the state of the context does not allow: a bug of the caller
└── TransactionError
    ├── TransactionRolledBack    nothing of it happened: do the work again
    └── TransactionInDoubt       all of it happened or nothing: look before doing it again
"""

from __future__ import annotations

from typing import ClassVar

from bascule.amqp.errors import (
    CONNECTION_FORCED,
    INVALID_FIELD,
    NOT_FOUND,
    UNAUTHORIZED_ACCESS,
    AmqpError,
)
from bascule.amqp.types import Symbol
from bascule.core.errors import BasculeError, InvalidInput, Unavailable

RESOURCE_DELETED = "amqp:resource-deleted"


class TimedOut(Unavailable):
    """The broker did not answer in time. What was asked for may still happen."""


class ConnectionLost(Unavailable):
    """The connection ended; what was sent and not answered may or may not have been taken."""


class Refused(InvalidInput):
    """The broker said no."""


class InvalidDestination(Refused):
    """There is no such queue, topic or subscription, or it is not this connection's to consume from."""


class InvalidSelector(Refused):
    """The selector is not one; the text has the column."""


class InvalidClientId(Refused):
    """Somebody else is connected under this client id."""


class SecurityDenied(Refused):
    """User, password or permission."""


class MessageRefused(Refused):
    """The broker did not take this message; others are not touched by it."""


class IllegalState(BasculeError):
    """The context does not allow this call now."""

    condition: ClassVar[str] = "amqp:illegal-state"


class TransactionError(BasculeError):
    """A transaction did not end as asked for."""

    condition: ClassVar[str] = "amqp:transaction:rollback"


class TransactionRolledBack(TransactionError):
    """Nothing of the transaction happened: its sends are gone, what it received comes again. Do the work again."""


class TransactionInDoubt(TransactionError):
    """The connection was lost, or time ran out, between a commit and its answer: all of it happened, or nothing.

    It is never repeated. Look at what the transaction should have done, or do it again with ``_AMQ_DUPL_ID`` set on its messages.
    """


_BY_CONDITION: dict[str, type[Refused]] = {
    NOT_FOUND: InvalidDestination,
    RESOURCE_DELETED: InvalidDestination,
    UNAUTHORIZED_ACCESS: SecurityDenied,
}


def of_connection(error: AmqpError | None) -> BasculeError:
    """Why a connection ended, in an application's terms."""
    if error is None:
        return ConnectionLost("the connection is closed")
    if error.condition == CONNECTION_FORCED:
        return ConnectionLost(str(error))
    if error.condition == INVALID_FIELD and (error.info or {}).get(Symbol("invalid-field")) == "container-id":
        return InvalidClientId(str(error))
    return _BY_CONDITION.get(error.condition, Refused)(str(error))


def of_link(error: AmqpError | None, *, selector: bool) -> BasculeError:
    """Why a link was refused or closed. ``selector``: it has one, which is what an invalid field means then."""
    if error is None:
        return ConnectionLost("the broker closed the link")
    if error.condition == INVALID_FIELD and selector:
        return InvalidSelector(str(error))
    return _BY_CONDITION.get(error.condition, Refused)(str(error))
