"""One global transaction and its two phases, without IO.

The transaction ends and prepares its branches, stores COMMIT in the decision log, and tells the branches the outcome that counts. Recovery
handles branches that cannot be told.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Final

from bascule.core import crash
from bascule.core.errors import InvalidInput
from bascule.core.log import get_log
from bascule.xa.effects import AtOnce, Clock, Decisions, Participant, raise_first
from bascule.xa.errors import (
    BranchHeuristic,
    BranchRolledBack,
    Code,
    HeuristicOutcome,
    OutOfOrder,
    ResourceError,
    TransactionInDoubt,
    TransactionRolledBack,
    TransactionTimedOut,
    XaError,
)
from bascule.xa.finishing import finish, split
from bascule.xa.log import Decision, Heuristic, Outcome
from bascule.xa.resource import Vote
from bascule.xa.transaction_states import BEGUN
from bascule.xa.transaction_states import ENDED as ENDED
from bascule.xa.transaction_states import TRANSITIONS as TRANSITIONS
from bascule.xa.transaction_states import TransactionEvent as TransactionEvent
from bascule.xa.transaction_states import TransactionPhase as TransactionPhase
from bascule.xa.transaction_states import TransactionStatus as TransactionStatus
from bascule.xa.xid import Xid, branch, may_be_in_database

_log = get_log("bascule.xa")


#: The status of a branch until it is told. After an interrupt, recovery tells it.
_NOT_TOLD: Final = "has not received the outcome yet"


class TwoPhaseViolation(enum.StrEnum):
    """Rules of a transaction that a test breaks."""

    #: Each branch is committed as soon as it has voted yes.
    COMMIT_BEFORE_ALL_PREPARED = "two-phase-commit-before-all-prepared"
    #: A prepare that fails counts as a yes vote.
    FAILED_PREPARE_IS_YES = "two-phase-failed-prepare-is-yes"
    #: The branches are told to commit before the log has stored the decision.
    COMMIT_BEFORE_DECISION = "two-phase-commit-before-decision"
    #: The transaction commits although the log answers that ROLLBACK stands.
    DECISION_IGNORED = "two-phase-decision-ignored"
    #: A commit whose decision may be stored is reported as rolled back.
    IN_DOUBT_IS_ROLLED_BACK = "two-phase-in-doubt-is-rolled-back"
    #: A commit in one phase that was not answered is reported as rolled back.
    ONE_PHASE_IN_DOUBT_IS_ROLLED_BACK = "two-phase-one-phase-in-doubt-is-rolled-back"
    #: The decision is deleted although a branch could not be told.
    UNTOLD_IS_FORGOTTEN = "two-phase-untold-is-forgotten"
    #: A transaction with several branches commits the last one in one phase although others are prepared.
    LAST_BRANCH_IN_ONE_PHASE = "two-phase-last-branch-in-one-phase"
    #: A commit that came after a rollback by recovery is reported as if the work itself had failed.
    RECOVERY_IS_FAILURE = "two-phase-recovery-is-failure"
    #: A transaction whose end is interrupted stays in an intermediate state.
    INTERRUPT_IS_NO_END = "two-phase-interrupt-is-no-end"


@dataclass(slots=True)
class _Enlisted:
    participant: Participant
    xid: Xid
    handle: Any
    token: str = ""
    ended: bool = False  # the application's work has ended
    undone: bool = False  # the resource has answered a rollback, or has failed


def _priority(each: _Enlisted) -> int:
    return each.participant.priority


class TwoPhase:
    """The protocol of one transaction. Make one call at a time.

    ``status`` is the state. ``unfinished`` has the resources that could not be told their outcome, with the reason. ``pending`` says
    whether recovery has something left to do after the end. ``times_s`` has the duration of each phase, ``heuristics`` the branches that
    were finished from outside.
    """

    def __init__(
        self,
        gtrid: bytes,
        timeout_s: float,
        log: Decisions,
        clock: Clock,
        by: str,
        *,
        at_once: AtOnce | None = None,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``by`` names this process in the decision. After ``timeout_s`` seconds the transaction takes no more work and does not commit.

        ``at_once``: all branches prepare at the same time, and those of equal priority commit at the same time. Without it they prepare one
        after the other, so that the last one commits in one phase if no other has anything to commit.
        """
        self.gtrid = gtrid
        self.id = gtrid.decode()
        self.status = TransactionStatus.ACTIVE
        self.unfinished: dict[str, str] = {}
        self.pending = False
        self.times_s: dict[TransactionPhase, float] = {}
        self._timeout_s = timeout_s
        self._log = log
        self._clock = clock
        self._by = by
        self._at_once = at_once
        self._violations = violations
        self._deadline_s = clock.monotonic_s() + timeout_s
        self._branches: dict[str, _Enlisted] = {}
        self.heuristics: list[Heuristic] = []
        self._refused_by: XaError | None = None
        self._deciding: _Enlisted | None = None  # the branch whose commit is the decision
        self._asked = False  # a branch was asked to commit in one phase, and has not refused

    @property
    def deadline_s(self) -> float:
        """The deadline of the transaction on the monotonic clock, in seconds."""
        return self._deadline_s

    @property
    def enlisted(self) -> Collection[str]:
        """The names of the resources whose branches this process has to finish."""
        return self._branches.keys()

    async def enlist(self, participant: Participant) -> Any:
        """Start a branch, once for each resource, and return the application's handle.

        Raises OutOfOrder if the transaction does not take more work, TransactionTimedOut, and the errors of the resource's ``start``. The
        last two mark the transaction for rollback.
        """
        if self.status is not TransactionStatus.ACTIVE:
            raise self._refusal()
        if (known := self._branches.get(participant.name)) is not None:
            return known.handle
        if (left_s := self._deadline_s - self._clock.monotonic_s()) <= 0:
            self._move(TransactionEvent.MARK)
            raise self.timed_out()
        xid = branch(self.gtrid, participant.name)
        try:
            handle = await participant.start(xid, timeout_s=left_s)
        except BaseException:
            self._move(TransactionEvent.MARK)
            raise
        crash.point("xa.enlist.after")
        deciding = [each.participant.name for each in self._branches.values() if each.participant.decides]
        self._branches[participant.name] = _Enlisted(participant, xid, handle)
        if participant.decides and (deciding or not may_be_in_database(self.gtrid)):
            self._move(TransactionEvent.MARK)
            raise InvalidInput(
                f"neither {participant.name} nor {deciding[0]} can prepare a branch; at most one database of a transaction may lack "
                "prepared transactions (in PostgreSQL: max_prepared_transactions)"
                if deciding
                else f"{participant.name} can no longer prepare a branch; close the manager and open it again"
            )
        return handle

    def mark(self) -> None:
        """Mark the transaction for rollback. Raises OutOfOrder if it has ended."""
        self._move(TransactionEvent.MARK)

    async def commit(self) -> None:
        """Run both phases. Return when COMMIT counts and each branch is told, except those in ``unfinished``.

        Raises TransactionRolledBack (TransactionTimedOut), TransactionInDoubt, HeuristicOutcome, and OutOfOrder if the transaction has
        ended.
        """
        try:
            await self._commit()
        except GeneratorExit:  # the process has died
            raise
        except BaseException:
            await self._settle()
            raise

    async def _settle(self) -> None:
        """Leave no intermediate state after an interrupt: the application and recovery would both skip the transaction."""
        if TwoPhaseViolation.INTERRUPT_IS_NO_END in self._violations:
            return
        try:
            if self.status is TransactionStatus.PREPARING and not self._asked:
                self._move(TransactionEvent.REFUSED)
            if self.status is TransactionStatus.ROLLING_BACK:
                await self._roll_back()
        finally:
            if self.status in BEGUN:
                self.pending = True
                self._move(BEGUN[self.status])

    async def _commit(self) -> None:
        marked = self.status is TransactionStatus.MARKED_ROLLBACK
        self._move(TransactionEvent.COMMIT)
        if marked:
            await self._undo()
            raise TransactionRolledBack("was marked for rollback", transaction_id=self.id)
        try:
            with self._timed(TransactionPhase.PREPARE):
                prepared = await self._phase_one()
        except GeneratorExit:
            raise
        except BaseException as error:
            if self.status is TransactionStatus.IN_DOUBT:
                raise
            if self._asked:
                raise self._in_doubt("may have been committed in one phase", error) from error
            self._move(TransactionEvent.REFUSED)
            await self._undo()
            if isinstance(error, TransactionRolledBack) or not isinstance(error, Exception):
                raise
            raise TransactionRolledBack(f"was rolled back: {error}", transaction_id=self.id, cause=error) from error
        if prepared:
            self._move(TransactionEvent.ALL_PREPARED)
            await self._phase_two(prepared)
        else:
            self._move(TransactionEvent.NOTHING_LEFT)
        self.report_heuristics()

    async def rollback(self) -> None:
        """Roll back all branches.

        Raises HeuristicOutcome if a branch was committed from outside, OutOfOrder if the transaction has ended.
        """
        try:
            self._move(TransactionEvent.ROLLBACK)
            await self._undo()
        except GeneratorExit:
            raise
        except BaseException:
            await self._settle()
            raise

    # -- the first phase ---------------------------------------------------------------------------------------------------

    async def _phase_one(self) -> list[_Enlisted]:
        """Return the prepared branches. The last branch commits at once if no other branch has anything to commit."""
        for each in list(self._branches.values()):
            await each.participant.end(each.xid, success=True)
            each.ended = True
        branches = sorted(self._branches.values(), key=lambda each: each.participant.decides)
        if self._at_once is not None and len(branches) > 1:
            return await self._prepare_at_once(self._at_once, branches)
        prepared: list[_Enlisted] = []
        for place, each in enumerate(branches):
            self._refuse_late()
            last = place == len(branches) - 1
            if last and (not prepared or TwoPhaseViolation.LAST_BRANCH_IN_ONE_PHASE in self._violations):
                await self._one_phase(each)
            elif each.participant.decides:
                self._deciding = each
            elif await self._vote(each) is Vote.YES:
                prepared.append(each)
        if prepared:
            self._refuse_late()
        return prepared

    async def _prepare_at_once(self, at_once: AtOnce, branches: list[_Enlisted]) -> list[_Enlisted]:
        """Return the prepared branches. Each has answered when this returns or raises."""
        self._refuse_late()
        voting = [each for each in branches if not each.participant.decides]
        deciding = next((each for each in branches if each.participant.decides), None)
        votes = await at_once([partial(self._vote, each) for each in voting])
        raise_first(votes)
        prepared = [each for each, vote in zip(voting, votes, strict=True) if vote is Vote.YES]
        self._refuse_late()
        if deciding is not None and not prepared:
            await self._one_phase(deciding)
        else:
            self._deciding = deciding
        return prepared

    async def _vote(self, each: _Enlisted) -> Vote:
        try:
            crash.point("xa.prepare.before")
            vote = await each.participant.prepare(each.xid)
            crash.point("xa.prepare.after")
        except BranchRolledBack:
            if TwoPhaseViolation.FAILED_PREPARE_IS_YES in self._violations:
                return Vote.YES
            del self._branches[each.participant.name]
            raise
        if vote is Vote.READ_ONLY:
            del self._branches[each.participant.name]
            return vote
        each.token = await each.participant.token(each.xid)
        if TwoPhaseViolation.COMMIT_BEFORE_ALL_PREPARED in self._violations:
            await self._tell(each, Outcome.COMMIT)
        return vote

    async def _one_phase(self, each: _Enlisted) -> None:
        try:
            self._asked = True
            crash.point("xa.one_phase.before")
            await each.participant.commit(each.xid, one_phase=True)
            crash.point("xa.one_phase.after")
        except (BranchRolledBack, ResourceError):
            self._asked = False
            del self._branches[each.participant.name]
            raise
        except BranchHeuristic as error:
            heuristic = Heuristic(each.xid, error.xa_code, Outcome.COMMIT, str(error), self._clock.now_ms())
            await self._log.record(heuristic)
            self.heuristics.append(heuristic)
        except GeneratorExit:
            raise
        except BaseException as error:
            if TwoPhaseViolation.ONE_PHASE_IN_DOUBT_IS_ROLLED_BACK in self._violations:
                self._asked = False
                del self._branches[each.participant.name]
                raise
            if not isinstance(error, Exception):  # an interrupt, perhaps before the resource was asked: nobody else would end the branch
                with suppress(Exception):
                    await each.participant.rollback(each.xid)
            text = f"may have been committed in {each.participant.name}, the only resource that had to commit"
            raise self._in_doubt(text, error) from error

    # -- the second phase --------------------------------------------------------------------------------------------------

    async def _phase_two(self, prepared: list[_Enlisted]) -> None:
        if TwoPhaseViolation.COMMIT_BEFORE_DECISION in self._violations:
            for each in prepared:
                await self._tell(each, Outcome.COMMIT)
        with self._timed(TransactionPhase.DECIDE):
            decision = await self._decided(prepared)
        if decision.outcome is Outcome.ROLLBACK and TwoPhaseViolation.DECISION_IGNORED not in self._violations:
            self._move(TransactionEvent.ROLLBACK_STANDS)
            await self._undo()
            if (refused := self._refused_by) is not None:
                raise TransactionRolledBack(f"was rolled back: {refused}", transaction_id=self.id, cause=refused) from refused
            raise rolled_back_by(decision.by, self.id, self._violations)
        self._move(TransactionEvent.COMMIT_STANDS)
        self.unfinished.update({each.participant.name: _NOT_TOLD for each in prepared})
        try:
            with self._timed(TransactionPhase.COMMIT):
                for _, equal in groupby(sorted(prepared, key=_priority), key=_priority):
                    await self._tell_all(list(equal), Outcome.COMMIT)
        finally:  # also if the process is told to end: COMMIT counts, and recovery carries it out
            self.pending = bool(self.unfinished)
            self._move(TransactionEvent.TOLD)
        if not self.unfinished or TwoPhaseViolation.UNTOLD_IS_FORGOTTEN in self._violations:
            crash.point("xa.forget.before")
            await self._forget()

    async def _forget(self) -> None:
        decider = None if self._deciding is None else self._deciding.participant.decider
        await (self._log.forget([self.gtrid]) if decider is None else decider.forget_decisions([self.gtrid]))

    async def _decided(self, prepared: list[_Enlisted]) -> Decision:
        names, tokens = tuple(each.participant.name for each in prepared), tuple(each.token for each in prepared)
        try:
            crash.point("xa.decide.before")
            wanted = Decision(self.gtrid, Outcome.COMMIT, names, self._clock.now_ms(), self._by, tokens if any(tokens) else ())
            decision = await (self._log.decide(wanted) if self._deciding is None else self._decided_by(self._deciding, wanted))
            crash.point("xa.decide.after")
        except GeneratorExit:
            raise
        except BaseException as error:
            in_doubt = self._in_doubt("is prepared, and the decision may or may not be stored", error)
            if TwoPhaseViolation.IN_DOUBT_IS_ROLLED_BACK in self._violations:
                raise TransactionRolledBack(f"was rolled back: {error}", transaction_id=self.id, cause=error) from error
            raise in_doubt from error
        return decision

    async def _decided_by(self, each: _Enlisted, wanted: Decision) -> Decision:
        """Commit the branch that cannot be prepared, with the decision. Return the decision that counts."""
        if (decider := each.participant.decider) is None:
            raise OutOfOrder(f"{each.participant.name} has no table of decisions")
        try:
            await decider.commit_deciding(each.xid, wanted)
        except (BranchRolledBack, ResourceError) as error:
            self._refused_by = error
            wanted = replace(wanted, outcome=Outcome.ROLLBACK, by=each.participant.name)
        del self._branches[each.participant.name]
        return wanted

    async def _undo(self) -> None:
        await self._roll_back()
        self.report_heuristics()

    async def _roll_back(self) -> None:
        """Tell each branch that was not told yet to roll back."""
        with self._timed(TransactionPhase.ROLLBACK):
            left = [each for each in self._branches.values() if not each.undone]
            self.unfinished.update({each.participant.name: _NOT_TOLD for each in left})
            for each in left:
                await self._end_work(each)
            await self._tell_all(left, Outcome.ROLLBACK)
        self.pending = bool(self.unfinished)
        self._move(TransactionEvent.TOLD)

    async def _end_work(self, each: _Enlisted) -> None:
        """End the work of a branch before its rollback, so that later calls are refused and do not reach the next branch of the session."""
        if each.ended:
            return
        each.ended = True
        try:
            await each.participant.end(each.xid, success=False)
        except Exception as error:  # the branch is rolled back whatever its resource answers
            _log.debug("end of a branch failed", xid=each.xid, error=error)

    async def _tell_all(self, branches: list[_Enlisted], outcome: Outcome) -> None:
        if self._at_once is not None and len(branches) > 1:
            raise_first(await self._at_once([partial(self._tell, each, outcome) for each in branches]))
            return
        for each in branches:
            await self._tell(each, outcome)

    async def _tell(self, each: _Enlisted, outcome: Outcome) -> None:
        name = each.participant.name
        try:
            crash.point("xa.finish.before")
            heuristic = await finish(
                each.participant, each.xid, outcome, self._log, self._clock, token=each.token, violations=self._violations
            )
            crash.point("xa.finish.after")
        except Exception as error:
            _log.warning("could not send outcome to branch", xid=each.xid, outcome=outcome, error=error)
            self.unfinished[name] = str(error)
        else:
            if heuristic is not None:
                self.heuristics.append(heuristic)
            self.unfinished.pop(name, None)  # told before the decision, if a test breaks that rule
        each.undone = outcome is Outcome.ROLLBACK

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _move(self, event: TransactionEvent) -> None:
        if (after := TRANSITIONS.get((self.status, event))) is None:
            raise self._refusal()
        self.status = after

    def _refusal(self) -> OutOfOrder:
        return OutOfOrder(f"transaction {self.id} is {self.status.value}")

    @contextmanager
    def _timed(self, phase: TransactionPhase) -> Iterator[None]:
        began_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self.times_s[phase] = self._clock.monotonic_s() - began_s

    def _refuse_late(self) -> None:
        if self._clock.monotonic_s() > self._deadline_s:
            raise self.timed_out()

    def timed_out(self) -> TransactionTimedOut:
        """Return the error for a transaction whose time is over."""
        return TransactionTimedOut(f"took longer than {self._timeout_s:g} s", transaction_id=self.id)

    def _in_doubt(self, text: str, error: BaseException) -> BaseException:
        """Return the error to raise. An exception that ends the process is returned unchanged."""
        self._move(TransactionEvent.UNANSWERED)
        self.pending = True
        return TransactionInDoubt(f"{text}: {error}", transaction_id=self.id, cause=error) if isinstance(error, Exception) else error

    def report_heuristics(self) -> None:
        """Raise HeuristicOutcome if a branch was finished from outside against the decision, or possibly against it."""
        if bad := [each for each in self.heuristics if split(each)]:
            said = "; ".join(each.text for each in bad)
            raise HeuristicOutcome(f"is {self.status.value}, except for: {said}", [str(each.xid) for each in bad], transaction_id=self.id)


def rolled_back_by(by: str, transaction_id: str, violations: Collection[enum.StrEnum] = frozenset()) -> TransactionRolledBack:
    """Return what to raise for a commit that came after another process had rolled the transaction back.

    The work may be repeated: the cause has the code XA_RBTRANSIENT (XA specification, section 4.3).
    """
    text = f"was rolled back by {by} before the commit"
    cause = None if TwoPhaseViolation.RECOVERY_IS_FAILURE in violations else BranchRolledBack(text, Code.XA_RBTRANSIENT)
    return TransactionRolledBack(text, transaction_id=transaction_id, cause=cause)
