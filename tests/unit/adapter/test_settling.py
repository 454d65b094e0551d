"""The effect of an error on a record: a failure, a retry that does not count, or none."""

from __future__ import annotations

import asyncio

import pytest

from bascule.adapter.inbound.log_protocol import Superseded, refusal
from bascule.adapter.inbound.settling import Late, NotNow, TryVerdict, meaning_of, resolve, verdict_on
from bascule.adapter.inbound.state import Flight, Flights, Place, PlaceState, Ref
from bascule.core.effects import run_blocking
from bascule.core.errors import BasculeError, TooLarge, TransactionInDoubt, TransactionRolledBack, Unavailable
from bascule.core.xid import Xid
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa.blocking import BlockingLog, BlockingParticipant, SystemClock
from bascule.xa.errors import BranchRolledBack, Code, HeuristicOutcome, ResourceFailed
from bascule.xa.log import Decision, LogState, Outcome
from bascule.xa.two_phase import TwoPhase
from bascule.xa.xid import new_gtrid

REF = Ref(Place("payments", 0), "own", 5)
XID = Xid(7, b"shop/1", b"inbound")
OWN = "shop/1"
IN_FLIGHT = Flights({5: (b"key",)}, {5: 0}, {})
CLAIMED = Flights({5: (b"key",)}, {5: 0}, {XID: 5})
DONE = Flights({}, {}, {})


@pytest.mark.parametrize(
    ("error", "settling", "verdict"),
    [
        (ValueError("no account"), False, TryVerdict.FAILED),
        (ValueError("no account"), True, TryVerdict.FAILED),
        (SystemExit(), False, TryVerdict.FAILED),
        (SystemExit(), True, TryVerdict.AWAY),
        (asyncio.CancelledError(), True, TryVerdict.AWAY),
        (Unavailable("no database"), False, TryVerdict.FAILED),
        (Unavailable("no Kafka"), True, TryVerdict.AWAY),
        (NotNow("no Kafka"), False, TryVerdict.AWAY),
        (Superseded("is done"), True, TryVerdict.SUPERSEDED),
        (Late("was given up"), False, TryVerdict.LATE),
    ],
)
def test_unavailability_while_settling_is_no_failure_and_endpoint_error_is_failure(
    error: BaseException, settling: bool, verdict: TryVerdict
) -> None:
    assert verdict_on(error, settling=settling) is verdict


def rolled_back(cause: BaseException | None = None, transaction_id: str = OWN) -> TransactionRolledBack:
    return TransactionRolledBack("rolled back", transaction_id=transaction_id, cause=cause)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (ResourceFailed("no answer"), NotNow),
        (rolled_back(ResourceFailed("no answer")), NotNow),
        (rolled_back(BranchRolledBack("lost", Code.XA_RBCOMMFAIL)), NotNow),
        (rolled_back(BranchRolledBack("no room", cause=TooLarge("no room"))), TooLarge),
        (rolled_back(Superseded("is done")), Superseded),
        (rolled_back(BranchRolledBack("constraint")), TransactionRolledBack),
        (rolled_back(), TransactionRolledBack),
        (rolled_back(ResourceFailed("no answer"), "other"), TransactionRolledBack),
        (TransactionInDoubt("in doubt", transaction_id="other"), TransactionInDoubt),
    ],
)
def test_transaction_error_maps_to_failure_unless_resource_is_away_or_record_is_superseded(error: BasculeError, meaning: type) -> None:
    found = meaning_of(error, OWN)
    assert type(found) is meaning
    assert (found is error) == (meaning in (TransactionRolledBack, TransactionInDoubt))


def test_rollback_by_recovery_is_no_failure_of_record() -> None:
    gtrid = new_gtrid("shop", 0)
    log = ModelLog(LogState({gtrid: Decision(gtrid, Outcome.ROLLBACK, (), 0, "another process")}))
    transaction = TwoPhase(gtrid, 60.0, BlockingLog(log), SystemClock(), "application")
    for name in ("inbound", "db"):
        run_blocking(transaction.enlist(BlockingParticipant(ModelResource(name))))
    with pytest.raises(TransactionRolledBack, match="by another process") as raised:
        run_blocking(transaction.commit())
    assert type(meaning_of(raised.value, transaction.id)) is NotNow


def test_claim_withdrawn_by_recovery_is_no_failure_of_record() -> None:
    state = PlaceState(owner="own", flights={5: Flight({b"key"}, {b"key"})})
    refused = refusal(state, XID, REF)
    assert isinstance(refused, BranchRolledBack)
    assert type(meaning_of(rolled_back(refused), OWN)) is NotNow


@pytest.mark.parametrize("error", [TransactionInDoubt("x", transaction_id=OWN), HeuristicOutcome("x", ["db"], transaction_id=OWN)])
def test_outcome_of_transaction_in_doubt_is_left_to_inbound_log(error: BasculeError) -> None:
    assert meaning_of(error, OWN) is None


class Waiting:
    """A log that gives its answers in turn. After the last one, the delivery is stopping."""

    def __init__(self, *answers: Flights | Unavailable) -> None:
        self._answers = list(answers)
        self.noted: list[BaseException] = []
        self.pauses = 0

    async def flights(self) -> Flights:
        answer = self._answers.pop(0)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    def stopping(self) -> bool:
        return not self._answers

    async def sleep(self, pause_s: float) -> None:
        assert pause_s > 0
        self.pauses += 1

    def note_doubt(self, error: BaseException) -> None:
        self.noted.append(error)


def test_transaction_in_doubt_is_awaited_while_claim_stands_or_log_is_away() -> None:
    away = Unavailable("no Kafka")
    waiting = Waiting(CLAIMED, away, CLAIMED, DONE)
    assert run_blocking(resolve(REF, TransactionInDoubt("x"), waiting)) is None
    assert (waiting.pauses, waiting.noted) == (3, [away])


@pytest.mark.parametrize(
    ("error", "meaning"), [(TransactionInDoubt("x"), NotNow), (HeuristicOutcome("x", ["db"]), HeuristicOutcome)], ids=["doubt", "heuristic"]
)
def test_record_still_in_flight_is_retried_after_doubt_and_failed_after_operator_decision(error: BasculeError, meaning: type) -> None:
    assert type(run_blocking(resolve(REF, error, Waiting(CLAIMED, IN_FLIGHT)))) is meaning


def test_doubt_beyond_endpoint_lifetime_is_left_to_recovery() -> None:
    found = run_blocking(resolve(REF, TransactionInDoubt("x"), Waiting(CLAIMED)))
    assert isinstance(found, NotNow)
    assert "recovery will finish the transaction" in str(found)
