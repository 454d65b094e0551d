"""Errors of transactions, for the protocols of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bascule.core.errors import BasculeError, Scope, Unavailable


class Refusal(Protocol):
    """The reason why Kafka refuses a record."""

    def code(self) -> int:
        """Return Kafka's error code."""
        ...

    def str(self) -> str:
        """Return the reason as text."""
        ...


class TransactionFault(BasculeError):
    """Raised when a request of a transaction failed. Whether the transaction was committed is unknown.

    ``fenced``: another incarnation has the transactional id. ``denied``: Kafka's ACLs do not allow writes to a topic. ``refused`` has the
    records that Kafka refuses permanently, by their place among the outputs.
    """

    retriable = True
    scope = Scope.OPERATION

    def __init__(self, reason: str, *, fenced: bool = False, denied: bool = False, refused: Mapping[int, Refusal] | None = None) -> None:
        super().__init__(reason)
        self.fenced = fenced
        self.denied = denied
        self.refused = dict(refused or {})


class PositionMoved(BasculeError):
    """Raised when another writer has moved the position, and may have written the outputs.

    Retriable: the pipeline restarts from the new position. If another driver holds that position, the restart raises PositionTaken.
    """

    retriable = True
    scope = Scope.PIPELINE

    def __init__(self, found: Any) -> None:
        super().__init__(f"another writer moved the position to {found}")
        self.found = found


class Unwritable(BasculeError):
    """Raised when Kafka permanently refuses records, for example because they are too large.

    ``faults`` has the reason by the record's place among the outputs. ``what`` names the records and the remedy, if known.
    """

    retriable = False
    scope = Scope.PIPELINE

    def __init__(self, faults: Mapping[int, Refusal], what: str = "") -> None:
        super().__init__(what or "; ".join(f"record {place}: {fault.str()}" for place, fault in list(faults.items())[:3]))
        self.faults = dict(faults)


class WriteDenied(Unavailable):
    """Raised when Kafka's ACLs do not allow writes to a topic of the transaction. Kafka does not say which topic."""


class RecordRefused(Unavailable):
    """Raised when Kafka refuses a record of a transaction that checks a table. Nothing of the transaction was written."""

    retriable = False


class TransitionMissing(BasculeError):
    """Raised when an event is not allowed in the current state of a state machine. This is a defect of Bascule."""

    retriable = False
    scope = Scope.PROCESS
