"""How a transactional function relates to the transaction of its caller, in the terms of Jakarta Transactions."""

from __future__ import annotations

import enum


class Propagation(enum.Enum):
    """How a transactional function is called."""

    #: In the caller's transaction, or in a new transaction if there is none.
    REQUIRED = "required"
    #: In a new transaction; the caller's is suspended.
    REQUIRES_NEW = "requires new"
    #: In the caller's transaction. Raises NoTransaction if there is none.
    MANDATORY = "mandatory"
    #: In the caller's transaction if there is one.
    SUPPORTS = "supports"
    #: Without a transaction; the caller's is suspended.
    NOT_SUPPORTED = "not supported"
    #: Without a transaction. Raises OutOfOrder if the caller has one.
    NEVER = "never"


class TransactionUse(enum.Enum):
    """Where a function runs."""

    NEW = "in a new transaction"
    JOINED = "in the transaction of the caller"
    OUTSIDE = "without a transaction"


#: By propagation: where the function runs with and without a transaction of the caller. None means that the call is refused.
USES: dict[Propagation, tuple[TransactionUse | None, TransactionUse | None]] = {
    Propagation.REQUIRED: (TransactionUse.JOINED, TransactionUse.NEW),
    Propagation.REQUIRES_NEW: (TransactionUse.NEW, TransactionUse.NEW),
    Propagation.MANDATORY: (TransactionUse.JOINED, None),
    Propagation.SUPPORTS: (TransactionUse.JOINED, TransactionUse.OUTSIDE),
    Propagation.NOT_SUPPORTED: (TransactionUse.OUTSIDE, TransactionUse.OUTSIDE),
    Propagation.NEVER: (None, TransactionUse.OUTSIDE),
}
#: Work with these propagations does not depend on the transaction of the caller.
APART = frozenset({Propagation.REQUIRES_NEW, Propagation.NOT_SUPPORTED})
