"""The return codes of X/Open XA (section 4.3 and appendix) as errors, and what a transaction tells its application."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import ClassVar

from bascule.core.errors import BasculeError

#: The return codes of success; XA_RDONLY answers a prepare of a branch that had nothing to commit.
XA_OK, XA_RDONLY = 0, 3


class Code(enum.IntEnum):
    """Return codes of failure, by their names and numbers in the specification."""

    XA_RBROLLBACK = 100
    XA_RBCOMMFAIL = 101
    XA_RBDEADLOCK = 102
    XA_RBINTEGRITY = 103
    XA_RBOTHER = 104
    XA_RBPROTO = 105
    XA_RBTIMEOUT = 106
    XA_RBTRANSIENT = 107
    XA_HEURHAZ = 8
    XA_HEURCOM = 7
    XA_HEURRB = 6
    XA_HEURMIX = 5
    XA_RETRY = 4
    XAER_RMERR = -3
    XAER_NOTA = -4
    XAER_INVAL = -5
    XAER_PROTO = -6
    XAER_RMFAIL = -7
    XAER_DUPID = -8
    XAER_OUTSIDE = -9


class XaError(BasculeError):
    """What a resource answers other than success. ``code`` is the specification's."""

    code: Code = Code.XAER_RMERR

    def __init__(self, text: str, code: Code | None = None) -> None:
        self.code = code or type(self).code
        super().__init__(f"{self.code.name}: {text}")


class BranchRolledBack(XaError):
    """XA_RB*: the resource has rolled the branch back; nothing of it is left."""

    code = Code.XA_RBROLLBACK


class BranchHeuristic(XaError):
    """XA_HEUR*: the branch was finished from outside, without asking the manager. The resource remembers it until ``forget``."""

    code = Code.XA_HEURHAZ


class RetryLater(XaError):
    """XA_RETRY: not now; the branch is as it was."""

    code = Code.XA_RETRY


class ResourceError(XaError):
    """XAER_RMERR: the resource is there and cannot do it. In ``prepare`` it means that the branch is not prepared."""

    code = Code.XAER_RMERR


class ResourceFailed(XaError):
    """XAER_RMFAIL: the resource does not answer; whether the call took effect is not known."""

    code = Code.XAER_RMFAIL


class UnknownXid(XaError):
    """XAER_NOTA: the resource has no such branch, or has it no longer."""

    code = Code.XAER_NOTA


class DuplicateXid(XaError):
    """XAER_DUPID: the branch has been started before."""

    code = Code.XAER_DUPID


class OutOfOrder(XaError):
    """XAER_PROTO: the call is not legal in the branch's state."""

    code = Code.XAER_PROTO


class NoTransaction(XaError):
    """XAER_OUTSIDE: there is no transaction in this thread or task."""

    code = Code.XAER_OUTSIDE


class TransactionError(BasculeError):
    """Root of what a transaction tells its application. ``transaction_id`` names it in logs and to ``bascule xa``."""

    def __init__(self, transaction_id: str, text: str) -> None:
        super().__init__(f"transaction {transaction_id} {text}")
        self.transaction_id = transaction_id


class TransactionRolledBack(TransactionError):
    """Nothing of the transaction has happened, nor will it. It may be tried again; the cause says why it failed."""

    condition: ClassVar[str] = "amqp:transaction:rollback"


class TransactionTimedOut(TransactionRolledBack):
    """Rolled back, because it took longer than its ``timeout_s``."""

    condition: ClassVar[str] = "amqp:transaction:timeout"


class TransactionInDoubt(TransactionError):
    """Whether it was committed is not known now. Recovery finishes it, all of it the same way. Do not simply repeat the work."""


class HeuristicOutcome(TransactionError):
    """Somebody finished branches from outside against the decision; recorded until the operator forgets it. ``branches`` names them."""

    def __init__(self, transaction_id: str, text: str, branches: Sequence[str]) -> None:
        super().__init__(transaction_id, text)
        self.branches = tuple(branches)
