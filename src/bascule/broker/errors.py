"""What the broker refuses, each with the AMQP condition a client is told."""

from __future__ import annotations

from bascule.core.errors import BasculeError, Scope
from bascule.core.xa_codes import Code
from bascule.journal.branches import Ending


class ResourceLimit(BasculeError):
    """A limit of the broker or of a queue is reached."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:resource-limit-exceeded"
    http_status = 409


class QueueFull(ResourceLimit):
    """A queue accepts no more messages until consumers have taken some."""

    retriable = True


class RecordTooLarge(ResourceLimit):
    """What must go into one journal record is larger than the journal's topic has room for. Nothing of it was done.

    It may have room later: what a message adds to a record depends on how many subscriptions take it.
    """

    xa_code = Code.XA_RETRY
    xa_rollback_code = Code.XA_RBOTHER


class BodyUnavailable(BasculeError):
    """The body of a message was spilled and cannot be read back. The journal has it: a restart of the broker brings it back."""

    retriable = True
    scope = Scope.OPERATION
    http_status = 503


class RequestFailed(BasculeError):
    """The broker failed to carry out one request; its log says more. The request has changed nothing."""

    retriable = False
    scope = Scope.OPERATION
    xa_code = Code.XAER_RMFAIL


class UnknownAddress(BasculeError):
    """No queue, topic or subscription has this name, and the request must not create one."""

    retriable = False
    scope = Scope.LINK
    condition = "amqp:not-found"
    http_status = 404


class QueueDeleted(BasculeError):
    """The queue that a consumer was attached to is deleted."""

    retriable = False
    scope = Scope.LINK
    condition = "amqp:resource-deleted"
    http_status = 404


class JournalUnavailable(BasculeError):
    """Kafka does not acknowledge appends; the broker accepts nothing persistent."""

    retriable = True
    scope = Scope.OPERATION
    condition = "amqp:resource-limit-exceeded"
    xa_code = Code.XA_RETRY
    xa_rollback_code = Code.XA_RBTRANSIENT
    http_status = 503


class BrokerFault(BasculeError):
    """The broker itself failed. Its state may be wrong: the process ends its epoch and loads the state from the journal."""

    retriable = True
    scope = Scope.EPOCH


class UnknownTransaction(BasculeError):
    """The connection has no such transaction."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:transaction:unknown-id"
    xa_code = Code.XAER_NOTA
    xa_rollback_code = Code.XA_RBCOMMFAIL
    http_status = 404


class UnknownBranch(BasculeError):
    """The broker has no such branch; ``ending`` is its outcome, where the broker still knows it.

    ``forgotten``: the branch may have ended either way, and the broker does not remember.
    """

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:not-found"
    xa_code = Code.XAER_NOTA
    http_status = 404

    def __init__(self, text: str, ending: Ending | None = None, *, forgotten: bool = False) -> None:
        super().__init__(text)
        self.ending = ending
        self.forgotten = forgotten


class BranchExists(BasculeError):
    """A branch with this name exists already."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:not-allowed"
    xa_code = Code.XAER_DUPID
    xa_rollback_code = Code.XAER_DUPID
    http_status = 409


class BranchBusy(BasculeError):
    """The broker is ending the branch with the other outcome at this moment."""

    retriable = True
    scope = Scope.OPERATION
    condition = "amqp:resource-locked"
    xa_code = Code.XA_RETRY
    http_status = 503


class BranchForced(BasculeError):
    """An administrator has ended the branch; ``ending`` is its outcome."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:illegal-state"
    xa_code = Code.XA_HEURHAZ
    http_status = 409

    def __init__(self, text: str, ending: Ending) -> None:
        super().__init__(text)
        self.ending = ending
        self.xa_code = Code.XA_HEURCOM if ending is Ending.FORCED_COMMIT else Code.XA_HEURRB
