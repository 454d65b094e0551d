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
from bascule.xa.report import TransactionFinding, TransactionReport
from bascule.xa.resource import CommitPriority, Resource, Vote
from bascule.xa.transaction import Transaction
from bascule.xa.xid import Xid

__all__ = [
    "CommitPriority",
    "FileLog",
    "HeuristicOutcome",
    "Propagation",
    "Resource",
    "Transaction",
    "TransactionError",
    "TransactionFinding",
    "TransactionInDoubt",
    "TransactionManager",
    "TransactionReport",
    "TransactionRolledBack",
    "TransactionTimedOut",
    "Vote",
    "Xid",
]
