"""Errors of the broker, each with the AMQP condition that the client gets."""

from __future__ import annotations

from bascule.core.errors import BasculeError, Scope
from bascule.core.xa_codes import Code
from bascule.journal.branches import Ending


class ResourceLimit(BasculeError):
    """Raised when a limit of the broker or of a queue is reached."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:resource-limit-exceeded"
    http_status = 409


class QueueFull(ResourceLimit):
    """Raised when a queue accepts no more messages until consumers have taken some."""

    retriable = True


class MemoryLow(ResourceLimit):
    """Raised when the broker accepts no more messages until consumers have made room."""

    retriable = True


class RecordTooLarge(ResourceLimit):
    """Raised when the entries of one journal record are larger than the journal accepts. Nothing was done.

    A later try may succeed: the size that a message adds to a record depends on the number of subscriptions that take it.
    """

    xa_code = Code.XA_RETRY
    xa_rollback_code = Code.XA_RBOTHER


class BindingsChanged(ResourceLimit):
    """Raised when subscriptions changed again and again while the decisions about many messages were planned. Nothing was done."""

    retriable = True
    xa_code = Code.XA_RETRY
    xa_rollback_code = Code.XA_RBTRANSIENT


class BodyUnavailable(BasculeError):
    """Raised when a spilled message body cannot be read. The journal still has the body: a restart of the broker restores it."""

    retriable = True
    scope = Scope.OPERATION
    http_status = 503


class RequestFailed(BasculeError):
    """Raised when the broker failed to carry out one request. The broker's log has the cause. The request has changed nothing."""

    retriable = False
    scope = Scope.OPERATION
    xa_code = Code.XAER_RMFAIL


class UnknownAddress(BasculeError):
    """Raised when no queue, topic or subscription has this name, and the request must not create one."""

    retriable = False
    scope = Scope.LINK
    condition = "amqp:not-found"
    http_status = 404


class QueueDeleted(BasculeError):
    """Raised when the queue of a consumer is deleted."""

    retriable = False
    scope = Scope.LINK
    condition = "amqp:resource-deleted"
    http_status = 404


class JournalUnavailable(BasculeError):
    """Raised when Kafka does not acknowledge appends: the broker accepts no persistent messages."""

    retriable = True
    scope = Scope.OPERATION
    condition = "amqp:resource-limit-exceeded"
    xa_code = Code.XA_RETRY
    xa_rollback_code = Code.XA_RBTRANSIENT
    http_status = 503


class BrokerFault(BasculeError):
    """Raised when the broker itself failed. Its state may be wrong: the process ends its epoch and loads the state from the journal."""

    retriable = True
    scope = Scope.EPOCH


class UnknownTransaction(BasculeError):
    """Raised when the connection has no such transaction."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:transaction:unknown-id"
    xa_code = Code.XAER_NOTA
    xa_rollback_code = Code.XA_RBCOMMFAIL
    http_status = 404


class UnknownBranch(BasculeError):
    """Raised when the broker has no such branch. ``ending`` is its outcome, if the broker still knows it.

    If ``forgotten`` is true, the branch may have been committed, and the broker no longer remembers its outcome.
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
    """Raised when a branch with this xid exists already."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:not-allowed"
    xa_code = Code.XAER_DUPID
    xa_rollback_code = Code.XAER_DUPID
    http_status = 409


class BranchBusy(BasculeError):
    """Raised when the broker is ending the branch with the other outcome at this moment."""

    retriable = True
    scope = Scope.OPERATION
    condition = "amqp:resource-locked"
    xa_code = Code.XA_RETRY
    http_status = 503


class BranchForced(BasculeError):
    """Raised when an administrator has ended the branch. ``ending`` is its outcome."""

    retriable = False
    scope = Scope.OPERATION
    condition = "amqp:illegal-state"
    xa_code = Code.XA_HEURHAZ
    http_status = 409

    def __init__(self, text: str, ending: Ending) -> None:
        super().__init__(text)
        self.ending = ending
        self.xa_code = Code.XA_HEURCOM if ending is Ending.FORCED_COMMIT else Code.XA_HEURRB
