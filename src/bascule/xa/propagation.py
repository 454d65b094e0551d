"""What a transactional function does with the transaction that its caller has, or has not: the words are those of Jakarta Transactions."""

from __future__ import annotations

import enum


class Propagation(enum.Enum):
    """How a function is called that is marked as transactional."""

    #: In the caller's transaction, or in a new one if there is none.
    REQUIRED = "required"
    #: In a new transaction; the caller's is set aside.
    REQUIRES_NEW = "requires new"
    #: In the caller's transaction; NoTransaction is raised if there is none.
    MANDATORY = "mandatory"
    #: In the caller's transaction if there is one.
    SUPPORTS = "supports"
    #: Without a transaction; the caller's is set aside.
    NOT_SUPPORTED = "not supported"
    #: Without a transaction; OutOfOrder is raised if the caller has one.
    NEVER = "never"


class TransactionUse(enum.Enum):
    """Where a function runs."""

    NEW = "in a new transaction"
    JOINED = "in the transaction of the caller"
    OUTSIDE = "without a transaction"


#: By the propagation: where the function runs if the caller has a transaction, and if not; None is refused.
USES: dict[Propagation, tuple[TransactionUse | None, TransactionUse | None]] = {
    Propagation.REQUIRED: (TransactionUse.JOINED, TransactionUse.NEW),
    Propagation.REQUIRES_NEW: (TransactionUse.NEW, TransactionUse.NEW),
    Propagation.MANDATORY: (TransactionUse.JOINED, None),
    Propagation.SUPPORTS: (TransactionUse.JOINED, TransactionUse.OUTSIDE),
    Propagation.NOT_SUPPORTED: (TransactionUse.OUTSIDE, TransactionUse.OUTSIDE),
    Propagation.NEVER: (None, TransactionUse.OUTSIDE),
}
