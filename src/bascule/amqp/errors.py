"""AMQP error conditions, and exceptions that name the endpoint they end (AMQP 1.0 part 2, sections 2.8.14 to 2.8.18)."""

from __future__ import annotations

from typing import Any, Final

from bascule.core.errors import BasculeError, Scope

INTERNAL_ERROR: Final = "amqp:internal-error"
NOT_FOUND: Final = "amqp:not-found"
UNAUTHORIZED_ACCESS: Final = "amqp:unauthorized-access"
DECODE_ERROR: Final = "amqp:decode-error"
RESOURCE_LIMIT_EXCEEDED: Final = "amqp:resource-limit-exceeded"
NOT_ALLOWED: Final = "amqp:not-allowed"
INVALID_FIELD: Final = "amqp:invalid-field"
NOT_IMPLEMENTED: Final = "amqp:not-implemented"
ILLEGAL_STATE: Final = "amqp:illegal-state"
FRAME_SIZE_TOO_SMALL: Final = "amqp:frame-size-too-small"
CONNECTION_FORCED: Final = "amqp:connection:forced"
FRAMING_ERROR: Final = "amqp:connection:framing-error"
WINDOW_VIOLATION: Final = "amqp:session:window-violation"
ERRANT_LINK: Final = "amqp:session:errant-link"
HANDLE_IN_USE: Final = "amqp:session:handle-in-use"
UNATTACHED_HANDLE: Final = "amqp:session:unattached-handle"
DETACH_FORCED: Final = "amqp:link:detach-forced"
TRANSFER_LIMIT_EXCEEDED: Final = "amqp:link:transfer-limit-exceeded"
MESSAGE_SIZE_EXCEEDED: Final = "amqp:link:message-size-exceeded"
TRANSACTION_UNKNOWN_ID: Final = "amqp:transaction:unknown-id"
TRANSACTION_ROLLBACK: Final = "amqp:transaction:rollback"


class AmqpError(BasculeError):
    """An AMQP error; ``info`` is the error's map of details."""

    retriable = False
    scope = Scope.OPERATION

    def __init__(self, condition: str, description: str = "", info: dict[Any, Any] | None = None) -> None:
        super().__init__(f"{condition}: {description}" if description else condition)
        self.condition = condition
        self.description = description
        self.info = info


def amqp_error(error: BasculeError) -> AmqpError:
    """Return an error as a peer gets it, with its condition once."""
    return error if isinstance(error, AmqpError) else AmqpError(error.condition, str(error))


class ConnectionFault(AmqpError):
    """A protocol error that ends the connection."""

    scope = Scope.CONNECTION


class SessionFault(AmqpError):
    """A protocol error that ends its session."""

    scope = Scope.SESSION


class LinkFault(AmqpError):
    """A protocol error that detaches its link."""

    scope = Scope.LINK


class IllegalUse(AmqpError):
    """The application made a call that the endpoint's state does not allow: a bug of the application, never of the peer."""

    condition = ILLEGAL_STATE

    def __init__(self, description: str) -> None:
        super().__init__(self.condition, description)


class DecodeError(ConnectionFault):
    """Bytes that are not an AMQP value, or not the expected value."""

    condition = DECODE_ERROR

    def __init__(self, description: str) -> None:
        super().__init__(self.condition, description)


class EncodeError(AmqpError):
    """A Python value that cannot be encoded in the requested AMQP type."""

    def __init__(self, description: str) -> None:
        super().__init__(INTERNAL_ERROR, description)


class LimitExceeded(ConnectionFault):
    """A peer exceeded a limit of ``limits.py``."""

    condition = RESOURCE_LIMIT_EXCEEDED

    def __init__(self, description: str) -> None:
        super().__init__(self.condition, description)


class FrameTooSmall(SessionFault):
    """A frame to send is larger than the peer's max-frame-size."""

    condition = FRAME_SIZE_TOO_SMALL

    def __init__(self, description: str) -> None:
        super().__init__(self.condition, description)
