"""Transactions over several resources: X/Open XA with presumed abort, a durable decision log, and recovery."""

from bascule.xa.errors import (
    HeuristicOutcome,
    TransactionError,
    TransactionInDoubt,
    TransactionRolledBack,
    TransactionTimedOut,
)
from bascule.xa.file_log import FileLog
from bascule.xa.manager import TransactionManager
from bascule.xa.propagation import Propagation
from bascule.xa.report import Finding, TransactionReport
from bascule.xa.resource import CommitPriority, Resource, Vote
from bascule.xa.transaction import Transaction
from bascule.xa.xid import Xid

__all__ = [
    "CommitPriority",
    "FileLog",
    "Finding",
    "HeuristicOutcome",
    "Propagation",
    "Resource",
    "Transaction",
    "TransactionError",
    "TransactionInDoubt",
    "TransactionManager",
    "TransactionReport",
    "TransactionRolledBack",
    "TransactionTimedOut",
    "Vote",
    "Xid",
]
