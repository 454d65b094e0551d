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


class Place(enum.Enum):
    """Where a function runs."""

    NEW = "in a new transaction"
    JOINED = "in the transaction of the caller"
    OUTSIDE = "without a transaction"


#: By the propagation: where the function runs if the caller has a transaction, and if not; None is refused.
PLACES: dict[Propagation, tuple[Place | None, Place | None]] = {
    Propagation.REQUIRED: (Place.JOINED, Place.NEW),
    Propagation.REQUIRES_NEW: (Place.NEW, Place.NEW),
    Propagation.MANDATORY: (Place.JOINED, None),
    Propagation.SUPPORTS: (Place.JOINED, Place.OUTSIDE),
    Propagation.NOT_SUPPORTED: (Place.OUTSIDE, Place.OUTSIDE),
    Propagation.NEVER: (None, Place.OUTSIDE),
}
