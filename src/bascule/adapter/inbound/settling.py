"""Decides what follows a try: done, another try after a pause, the retry or dead-letter topic, or nothing. Without IO.

No Kafka, no threads, no clock: the effects of a try are performed by ``delivering``, or by the simulation.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Protocol

from bascule.adapter.inbound.log_protocol import Superseded
from bascule.adapter.inbound.spec import Backoff
from bascule.adapter.inbound.state import Flights, Ref
from bascule.core import crash
from bascule.core.errors import BasculeError, Scope, TooLarge, TransactionInDoubt, TransactionRolledBack, Unavailable
from bascule.xa.errors import HeuristicOutcome, ResourceFailed, XaError

#: The pause, in seconds, before a retry if Kafka, the database or the decision log is unavailable. This does not count as a failure.
AWAY_PAUSE_S: Final = 1.0
#: The pauses of a record that does not fit into the dead-letter topic: an operator must raise the limit.
REFUSED: Final = Backoff()
#: Interval, in seconds, at which a transaction in doubt is checked.
DOUBT_PAUSE_S: Final = 0.2


class NotNow(BasculeError):
    """Raised when something that a try needs is unavailable. The record is unchanged."""

    retriable = True
    scope = Scope.OPERATION


class Late(BasculeError):
    """Raised when an endpoint returns after it was given up: its result does not count."""

    retriable = False
    scope = Scope.OPERATION


class SettlingViolation(enum.StrEnum):
    """Rules of settling that a test may break."""

    AWAY_IS_FAILURE = "an attempt that failed because a system is unavailable counts as a failure of the record"
    DONE_BEFORE_MOVED = "a record is marked done before it is in the retry or dead-letter topic"
    DEAD_LETTER_FORGOTTEN = "a record that has failed too often is dropped without a dead letter"


class TryVerdict(enum.Enum):
    """The meaning of an error for its record."""

    FAILED = "the endpoint failed; count one more failure of the record"
    AWAY = "a system is unavailable, or the record may be done; retry, and count no failure"
    SUPERSEDED = "the record is done, or another member handles it; do nothing"
    LATE = "the timeout of the endpoint had expired; ignore the result, and end the worker"


class MoveTarget(enum.Enum):
    """Where a record that has failed is moved, and which parts of it."""

    RETRY = "the retry topic"
    DEAD_LETTER = "the dead-letter topic"
    WITHOUT_VALUE = "the dead-letter topic, without value and headers"
    WITHOUT_KEY = "the dead-letter topic, without key, value and headers"


class SettlingEvent(enum.Enum):
    """An event of a record, for log and counts."""

    DELIVERED = "the endpoint has returned, and the record is done"
    FAILED = "the endpoint has failed"
    RETRIED = "the record will be retried"
    RETRY_REFUSED = "the record is too large for the retry topic"
    LETTER_REFUSED = "the complete dead letter is too large for the dead-letter topic"
    DEAD_LETTERED = "the dead letter is written"
    REFUSED = "even the smallest dead letter is too large for the dead-letter topic"
    SUPERSEDED = "the record is done, or another member handles it"
    AWAY = "a system is unavailable"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a record is retried after the first try, and when. ``in_place``: by this member, without the retry topic."""

    retries: int
    backoff: Backoff
    in_place: bool
    away_s: float = AWAY_PAUSE_S


class Tried(Protocol):
    """A record, as its tries see it."""

    failure: BaseException | None
    refusals: int

    @property
    def failures(self) -> int:
        """Return how often the record has failed before."""


class TryEffects(Protocol):
    """The effects of a try."""

    async def deliver(self) -> None:
        """Call the endpoint, and store that the record is done.

        Raises Superseded, NotNow, Late, or the error of the endpoint; the record then stays in flight.
        """

    def settling(self) -> bool:
        """Return True if the endpoint has returned."""

    def settle(self) -> None:
        """Note that the endpoint has returned or raised. Raises Late if it was given up before."""

    async def keep(self, failures: int) -> None:
        """Store how often the record has failed. Raises Unavailable."""

    async def move(self, target: MoveTarget, error: BaseException, pause_s: float, refused: TooLarge | None) -> None:
        """Store the record in another topic, with its next try ``pause_s`` from now at the earliest, and then that it is done.

        Raises the errors of ``deliver``, and TooLarge if the topic has no room. ``refused`` is the error of an earlier attempt with more
        parts.
        """

    def note(self, event: SettlingEvent, error: BaseException | None = None, pause_s: float = 0.0) -> None:
        """Log and count an event."""


class DoubtEffects(Protocol):
    """The effects of waiting for the end of a transaction in doubt."""

    async def flights(self) -> Flights:
        """Return the records in flight of the record's partition. Raises Unavailable."""

    def stopping(self) -> bool:
        """Return True if nobody waits any longer."""

    async def sleep(self, pause_s: float) -> None:
        """Wait."""

    def note_doubt(self, error: BaseException) -> None:
        """Log why the outcome is not known yet."""


def verdict_on(error: BaseException, *, settling: bool, violations: Collection[enum.StrEnum] = ()) -> TryVerdict:
    """Return the meaning of an error for its record. ``settling``: the endpoint has returned."""
    if isinstance(error, Late):
        return TryVerdict.LATE
    if isinstance(error, Superseded):
        return TryVerdict.SUPERSEDED
    if isinstance(error, NotNow) and SettlingViolation.AWAY_IS_FAILURE not in violations:
        return TryVerdict.AWAY
    # sys.exit() and a cancelled task end an endpoint, too. During settling they say nothing about the record, which may be done.
    return TryVerdict.AWAY if settling and (isinstance(error, Unavailable) or not isinstance(error, Exception)) else TryVerdict.FAILED


def meaning_of(error: BasculeError, transaction_id: str) -> BaseException | None:
    """Return the error to raise for the record of a failed transaction, or None if only the log can tell the outcome."""
    if isinstance(error, ResourceFailed):
        return NotNow(str(error))
    if not isinstance(error, (TransactionRolledBack, TransactionInDoubt, HeuristicOutcome)) or error.transaction_id != transaction_id:
        return error  # for example of the endpoint's own transaction
    if not isinstance(error, TransactionRolledBack):
        return None
    reason = error.cause
    if isinstance(reason, Superseded):
        return reason
    if isinstance(reason, XaError):
        if isinstance(reason.cause, TooLarge):
            return reason.cause
        if reason.retriable:
            return NotNow(str(error))
    return error


async def resolve(ref: Ref, error: BasculeError, effects: DoubtEffects) -> BaseException | None:
    """Wait for the outcome of a transaction that is in doubt or heuristic.

    Return None if its record is done, otherwise the error to raise.
    """
    while not effects.stopping():
        try:
            flights = await effects.flights()
        except Unavailable as away:
            effects.note_doubt(away)
        else:
            if ref.offset not in flights.claims.values():
                if ref.offset not in flights.keys:
                    return None
                # A resource that did not answer may answer the next time.
                return NotNow(str(error)) if isinstance(error, TransactionInDoubt) else error
        await effects.sleep(DOUBT_PAUSE_S)
    return NotNow(f"record {ref.place}, offset {ref.offset} is in doubt; recovery will finish the transaction")


async def try_once(tried: Tried, effects: TryEffects, policy: RetryPolicy, violations: Collection[enum.StrEnum] = ()) -> float | None:
    """Try a record once, and handle its failure.

    Returns the number of seconds to the next call, or None if there is nothing left to do. Raises Late.
    """
    try:
        if tried.failure is None:
            await _deliver(tried, effects, violations)
        if tried.failure is not None:
            return await _failed(tried, tried.failure, effects, policy, violations)
    except Late:
        raise
    except Superseded as error:
        effects.note(SettlingEvent.SUPERSEDED, error)
    except TooLarge as error:
        tried.refusals += 1
        pause_s = REFUSED.pause_s(tried.refusals)
        effects.note(SettlingEvent.REFUSED, error, pause_s)
        return pause_s
    except BaseException as error:  # a worker that ended here would leave the record, and those behind it, stuck
        effects.note(SettlingEvent.AWAY, error, policy.away_s)
        return policy.away_s
    return None


async def _deliver(tried: Tried, effects: TryEffects, violations: Collection[enum.StrEnum]) -> None:
    try:
        await effects.deliver()
        effects.note(SettlingEvent.DELIVERED)
    except BaseException as error:
        verdict = verdict_on(error, settling=effects.settling(), violations=violations)
        if verdict in (TryVerdict.LATE, TryVerdict.SUPERSEDED):
            raise
        if not effects.settling():
            effects.settle()
        if verdict is TryVerdict.AWAY:
            raise
        tried.failure = error
        effects.note(SettlingEvent.FAILED, error)


async def _failed(
    tried: Tried, error: BaseException, effects: TryEffects, policy: RetryPolicy, violations: Collection[enum.StrEnum]
) -> float | None:
    failures = tried.failures + 1
    if failures > policy.retries:
        await _bury(error, effects, violations)
        return None
    pause_s = policy.backoff.pause_s(failures)
    if policy.in_place:
        await effects.keep(failures)
        tried.failure = None
        effects.note(SettlingEvent.RETRIED)
        return pause_s
    crash.point("inbound.retry.before")
    try:
        await effects.move(MoveTarget.RETRY, error, pause_s, None)
    except TooLarge as refused:
        effects.note(SettlingEvent.RETRY_REFUSED, refused)
        await _bury(error, effects, violations)
        return None
    crash.point("inbound.retry.after")
    effects.note(SettlingEvent.RETRIED)
    return None


async def _bury(error: BaseException, effects: TryEffects, violations: Collection[enum.StrEnum]) -> None:
    """Move a record to the dead letters, without the parts that do not fit, so that its lane is not blocked for ever."""
    if SettlingViolation.DEAD_LETTER_FORGOTTEN in violations:
        return
    crash.point("inbound.dead_letter.before")
    refused: TooLarge | None = None
    for target in (MoveTarget.DEAD_LETTER, MoveTarget.WITHOUT_VALUE):
        try:
            await effects.move(target, error, 0.0, refused)
        except TooLarge as again:
            refused = again
            effects.note(SettlingEvent.LETTER_REFUSED, refused)
        else:
            break
    else:
        await effects.move(MoveTarget.WITHOUT_KEY, error, 0.0, refused)
    effects.note(SettlingEvent.DEAD_LETTERED)
