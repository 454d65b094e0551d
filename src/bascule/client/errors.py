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

from bascule.amqp.errors import (
    CONNECTION_FORCED,
    INVALID_FIELD,
    NOT_FOUND,
    UNAUTHORIZED_ACCESS,
    AmqpError,
)
from bascule.amqp.types import Symbol
from bascule.core.errors import BasculeError, InvalidInput, Scope, Unavailable
from bascule.core.errors import TransactionError as TransactionError
from bascule.core.errors import TransactionInDoubt as TransactionInDoubt
from bascule.core.errors import TransactionRolledBack as TransactionRolledBack
from bascule.core.xa_codes import Code

RESOURCE_DELETED = "amqp:resource-deleted"


class TimedOut(Unavailable):
    """The broker did not answer in time. What was asked for may still happen."""


class ConnectionLost(Unavailable):
    """The connection ended; what was sent and not answered may or may not have been taken."""

    scope = Scope.CONNECTION
    xa_rollback_code = Code.XA_RBCOMMFAIL


class Refused(InvalidInput):
    """The broker said no."""

    xa_rollback_code = Code.XA_RBOTHER


class InvalidDestination(Refused):
    """There is no such queue, topic or subscription, or it is not this connection's to consume from."""

    condition = NOT_FOUND
    http_status = 404


class InvalidSelector(Refused):
    """The selector is not one; the text has the column."""


class InvalidClientId(Refused):
    """Somebody else is connected under this client id."""

    scope = Scope.CONNECTION
    http_status = 409


class SecurityDenied(Refused):
    """User, password or permission."""

    condition = UNAUTHORIZED_ACCESS
    http_status = 403


class MessageRefused(Refused):
    """The broker did not take this message; others are not touched by it."""


class IllegalState(BasculeError):
    """The context does not allow this call now."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:illegal-state"
    xa_code = Code.XAER_PROTO
    http_status = 409


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
