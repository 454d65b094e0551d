"""Failures of transactions, as the protocols of this package know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bascule.core.errors import BasculeError, Scope, Unavailable


class Refusal(Protocol):
    """Why Kafka refuses a record."""

    def code(self) -> int:
        """Kafka\'s error code."""
        ...

    def str(self) -> str:
        """Return the reason for people."""
        ...


class TransactionFault(BasculeError):
    """A request of a transaction failed. Whether the transaction was committed is not known.

    ``fenced``: another incarnation has the transactional id. ``denied``: Kafka's ACLs do not allow a topic to be written.
    ``refused`` names the records that Kafka refuses for good, by their place among the outputs.
    """

    retriable = True
    scope = Scope.OPERATION

    def __init__(self, reason: str, *, fenced: bool = False, denied: bool = False, refused: Mapping[int, Refusal] | None = None) -> None:
        super().__init__(reason)
        self.fenced = fenced
        self.denied = denied
        self.refused = dict(refused or {})


class PositionMoved(BasculeError):
    """Another writer moved the position: the outputs may have been written by it.

    Retriable: the pipeline starts again from the position as it is then. Where another driver holds that, it finds PositionTaken.
    """

    retriable = True
    scope = Scope.PIPELINE

    def __init__(self, found: Any) -> None:
        super().__init__(f"another writer moved the position to {found}")
        self.found = found


class Unwritable(BasculeError):
    """Kafka refuses records for good, for example because they are too large.

    ``faults`` has the reason by the record's place among the outputs. ``what`` names the records and the remedy, where that is known.
    """

    retriable = False
    scope = Scope.PIPELINE

    def __init__(self, faults: Mapping[int, Refusal], what: str = "") -> None:
        super().__init__(what or "; ".join(f"record {place}: {fault.str()}" for place, fault in list(faults.items())[:3]))
        self.faults = dict(faults)


class WriteDenied(Unavailable):
    """Kafka's ACLs do not allow a topic of the transaction to be written. Kafka does not say which topic."""


class RecordRefused(Unavailable):
    """Kafka refuses a record of a transaction that checks a table. Nothing of the transaction was written."""

    retriable = False


class TransitionMissing(BasculeError):
    """An event came in a state in which the table of transitions does not have it: a defect of Bascule."""

    retriable = False
    scope = Scope.PROCESS
