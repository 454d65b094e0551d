"""The return codes of X/Open XA (section 4.3 and appendix) as errors, and the errors that a transaction reports to its application."""

from __future__ import annotations

from collections.abc import Sequence

from bascule.core.errors import BasculeError, Scope
from bascule.core.errors import TransactionError as TransactionError
from bascule.core.errors import TransactionInDoubt as TransactionInDoubt
from bascule.core.errors import TransactionRolledBack as TransactionRolledBack
from bascule.core.errors import TransactionTimedOut as TransactionTimedOut
from bascule.core.xa_codes import XA_OK as XA_OK
from bascule.core.xa_codes import XA_RDONLY as XA_RDONLY
from bascule.core.xa_codes import Code as Code

#: A branch that was rolled back for one of these reasons can be repeated: a connection or a service failed, not the work.
_PASSING = (Code.XA_RBCOMMFAIL, Code.XA_RBTRANSIENT)


class XaError(BasculeError):
    """An answer of a resource other than success. ``xa_code`` is the specification's code, ``cause`` the resource's own error."""

    retriable = False
    scope = Scope.OPERATION
    xa_code = Code.XAER_RMERR
    http_status = 409

    def __init__(self, text: str, code: Code | None = None, *, cause: BaseException | None = None) -> None:
        self.xa_code = code or type(self).xa_code
        self.cause = cause
        super().__init__(f"{self.xa_code.name}: {text}")


class BranchRolledBack(XaError):
    """XA_RB*: the resource has rolled back the branch. ``retriable`` if a connection or a service failed."""

    xa_code = Code.XA_RBROLLBACK

    def __init__(self, text: str, code: Code | None = None, *, cause: BaseException | None = None) -> None:
        super().__init__(text, code, cause=cause)
        self.retriable = self.xa_code in _PASSING


class BranchHeuristic(XaError):
    """XA_HEUR*: the branch was ended from outside, without its manager. The resource remembers the branch until ``forget``."""

    xa_code = Code.XA_HEURHAZ


class RetryLater(XaError):
    """XA_RETRY: the resource cannot carry out the call now. The branch is unchanged."""

    retriable = True
    xa_code = Code.XA_RETRY
    http_status = 503


class ResourceError(XaError):
    """XAER_RMERR: the resource answers but cannot carry out the call. After ``prepare`` the branch is not prepared."""

    xa_code = Code.XAER_RMERR


class ResourceFailed(XaError):
    """XAER_RMFAIL: the resource does not answer. The call may have taken effect."""

    retriable = True
    xa_code = Code.XAER_RMFAIL
    http_status = 503


class UnknownXid(XaError):
    """XAER_NOTA: the resource has no such branch."""

    xa_code = Code.XAER_NOTA
    http_status = 404


class DuplicateXid(XaError):
    """XAER_DUPID: the branch was started before."""

    xa_code = Code.XAER_DUPID


class OutOfOrder(XaError):
    """XAER_PROTO: the state of the branch does not allow the call."""

    xa_code = Code.XAER_PROTO


class NoTransaction(XaError):
    """XAER_OUTSIDE: this thread or task has no transaction."""

    xa_code = Code.XAER_OUTSIDE


class HeuristicOutcome(TransactionError):
    """Raised if branches, named by ``branches``, were ended from outside against the decision.

    The log keeps them until an operator acts.
    """

    xa_code = Code.XA_HEURMIX

    def __init__(self, text: str, branches: Sequence[str], *, transaction_id: str = "") -> None:
        super().__init__(text, transaction_id=transaction_id)
        self.branches = tuple(branches)
