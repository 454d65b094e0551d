"""Retries of transactional functions: only an attempt that was certainly rolled back is repeated."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Collection
from typing import Protocol

from bascule.core.log import get_log
from bascule.xa.callables import name_of
from bascule.xa.errors import BranchRolledBack, HeuristicOutcome, TransactionInDoubt, TransactionRolledBack
from bascule.xa.transaction_states import TransactionStatus

#: Pause before a retry, in seconds, multiplied by a random number up to 1 and doubled each time, so that conflicting transactions separate.
RETRY_PAUSE_S = 0.05

_log = get_log("bascule.xa")


class RetryViolation(enum.StrEnum):
    """Rules of retries that a test breaks."""

    #: A transaction in doubt, which may have been committed, is repeated.
    IN_DOUBT_IS_REPEATED = "retry-in-doubt-is-repeated"


class HasStatus(Protocol):
    """A transaction."""

    @property
    def status(self) -> TransactionStatus:
        """Its state."""


class Attempts:
    """Counts the attempts of one call of a transactional function."""

    def __init__(
        self,
        function: Callable[..., object],
        attempts: int,
        retry_on: tuple[type[Exception], ...],
        *,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """Allow ``attempts`` attempts in all. ``retry_on`` are errors that are retried in addition to a rollback."""
        self._function = function
        self._attempts = attempts
        self._retry_on = (TransactionRolledBack, BranchRolledBack, *retry_on)
        self._failed = 0
        self._violations = violations

    def retries(self, error: Exception, transaction: HasStatus | None) -> bool:
        """Count a failed attempt, and return True if the function is called again.

        ``transaction`` is None if the attempt did not begin one. An attempt is repeated only if its transaction was rolled back, and if
        ``error`` leaves no outcome open: an inner transaction may be in doubt.
        """
        self._failed += 1
        status = None if transaction is None else transaction.status
        repeatable = may_repeat(error, status, violations=self._violations) and isinstance(error, self._retry_on)
        if not repeatable or self._failed >= self._attempts:
            return False
        _log.info("transaction retried", function=name_of(self._function), attempt=self._failed, error=error)
        return True

    @property
    def pause_s(self) -> float:
        """The number of seconds to wait before the next attempt."""
        return random.random() * RETRY_PAUSE_S * 2.0**self._failed


def may_repeat(
    error: BaseException, status: TransactionStatus | None, *, violations: Collection[enum.StrEnum] = frozenset()
) -> bool:  # fmt: skip
    """Return True if repeating an attempt that ended with ``error`` cannot do its work twice."""
    if RetryViolation.IN_DOUBT_IS_REPEATED in violations and isinstance(error, TransactionInDoubt):
        return True
    if isinstance(error, TransactionInDoubt | HeuristicOutcome):
        return False
    return status is None or status is TransactionStatus.ROLLED_BACK
