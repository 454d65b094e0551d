"""The errors of the client.

BasculeError
├── Unavailable                  no broker is available, or not yet
│   ├── TimedOut                 no answer before the timeout; the operation may still happen
│   └── ConnectionLost           the connection ended and will not be restored
├── InvalidInput
│   └── Refused                  the broker refused the request; the same request will fail again
│       ├── InvalidDestination   the queue, topic or subscription does not exist
│       ├── InvalidSelector
│       ├── InvalidClientId      another connection uses the client id
│       ├── SecurityDenied       wrong user or password, or no permission
│       └── MessageRefused       the broker refused this message only
├── IllegalState                 the state of the context does not allow the call: an error of the caller
└── TransactionError
    ├── TransactionRolledBack    the transaction had no effect: do the work again
    └── TransactionInDoubt       committed completely or not at all: check before doing the work again
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
    """The broker did not answer before the timeout. The operation may still happen."""


class ConnectionLost(Unavailable):
    """The connection ended. Messages that were sent but not answered may or may not have been stored."""

    scope = Scope.CONNECTION
    xa_rollback_code = Code.XA_RBCOMMFAIL


class Refused(InvalidInput):
    """The broker refused the request."""

    xa_rollback_code = Code.XA_RBOTHER


class InvalidDestination(Refused):
    """The queue, topic or subscription does not exist, or the connection may not consume from it."""

    condition = NOT_FOUND
    http_status = 404


class InvalidSelector(Refused):
    """The selector is invalid; the message of the error has the column."""


class InvalidClientId(Refused):
    """Another connection uses the client id."""

    scope = Scope.CONNECTION
    http_status = 409


class SecurityDenied(Refused):
    """The user or password is wrong, or a permission is missing."""

    condition = UNAUTHORIZED_ACCESS
    http_status = 403


class MessageRefused(Refused):
    """The broker refused the message; other messages are not affected."""


class IllegalState(BasculeError):
    """The state of the context does not allow the call."""

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
    """Return the error of the client for the AMQP error that closed the connection."""
    if error is None:
        return ConnectionLost("the broker closed the connection without an error")
    if error.condition == CONNECTION_FORCED:
        return ConnectionLost(str(error))
    if error.condition == INVALID_FIELD and (error.info or {}).get(Symbol("invalid-field")) == "container-id":
        return InvalidClientId(str(error))
    return _BY_CONDITION.get(error.condition, Refused)(str(error))


def of_link(error: AmqpError | None, *, selector: bool) -> BasculeError:
    """Return the error of the client for the AMQP error that closed a link. ``selector``: an invalid field means an invalid selector."""
    if error is None:
        return ConnectionLost("the broker closed the link without an error")
    if error.condition == INVALID_FIELD and selector:
        return InvalidSelector(str(error))
    return _BY_CONDITION.get(error.condition, Refused)(str(error))
