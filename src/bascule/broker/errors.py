"""What the broker refuses, each with the AMQP condition a client is told."""

from __future__ import annotations

from typing import ClassVar

from bascule.core.errors import BasculeError
from bascule.journal.branches import Ending


class ResourceLimit(BasculeError):
    """A limit is reached."""

    condition: ClassVar[str] = "amqp:resource-limit-exceeded"


class QueueFull(ResourceLimit):
    """A queue takes no more messages until some have gone."""


class UnknownAddress(BasculeError):
    """Nothing of that name is there, and nothing may be made by asking for it."""

    condition: ClassVar[str] = "amqp:not-found"


class QueueDeleted(BasculeError):
    """The queue that a consumer was attached to is gone."""

    condition: ClassVar[str] = "amqp:resource-deleted"


class JournalUnavailable(BasculeError):
    """Kafka does not acknowledge appends: nothing persistent can be accepted."""

    condition: ClassVar[str] = "amqp:resource-limit-exceeded"


class BrokerFault(BasculeError):
    """A fault of the broker itself: what it decided last is not to be trusted, and it begins anew from the journal."""


class UnknownTransaction(BasculeError):
    """No such transaction on this connection."""

    condition: ClassVar[str] = "amqp:transaction:unknown-id"


class TransactionTimedOut(BasculeError):
    """The transaction held something for too long."""

    condition: ClassVar[str] = "amqp:transaction:timeout"


class TransactionRolledBack(BasculeError):
    """The transaction was not committed, surely, and has been rolled back.

    The condition is its cause's: Qpid JMS takes ``amqp:transaction:rollback`` in answer to a commit for a transaction in doubt.
    """

    def __init__(self, cause: BasculeError) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.condition = cause.condition  # type: ignore[misc]


class UnknownBranch(BasculeError):
    """No such branch; ``ending`` is what became of it, as far as that is remembered."""

    condition: ClassVar[str] = "amqp:not-found"

    def __init__(self, text: str, ending: Ending | None = None) -> None:
        super().__init__(text)
        self.ending = ending


class BranchExists(BasculeError):
    """A branch of that name is there already."""

    condition: ClassVar[str] = "amqp:not-allowed"


class BranchBusy(BasculeError):
    """The branch is just being ended otherwise than asked for: not now."""

    condition: ClassVar[str] = "amqp:resource-locked"


class BranchForced(BasculeError):
    """An administrator has ended the branch; ``ending`` says how."""

    condition: ClassVar[str] = "amqp:illegal-state"

    def __init__(self, text: str, ending: Ending) -> None:
        super().__init__(text)
        self.ending = ending
