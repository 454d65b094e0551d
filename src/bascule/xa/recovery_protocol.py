"""One pass of recovery, without IO: look at log and resources, make a plan, take its steps.

Any number of recoverers may work on the same branches at once: the decision log has the outcome of a transaction, and all obey it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from bascule.core import crash
from bascule.core.errors import BasculeError, InvalidInput, Unavailable
from bascule.core.log import get_log
from bascule.xa.effects import Clock, Decider, Decisions, Participant
from bascule.xa.errors import UnknownXid
from bascule.xa.finishing import finish
from bascule.xa.log import Decision, Heuristic, LogState, Outcome
from bascule.xa.plan import (
    REMOVED_DECIDER,
    Action,
    RecoveryView,
    Step,
    missing_resources,
    own_log,
    plan,
    removed_decider,
    split_risks,
)
from bascule.xa.report import TransactionReport, report
from bascule.xa.xid import Xid, log_id_of_gtrid, manager_of, manager_of_gtrid, may_be_in_database

_log = get_log("bascule.xa")


class RecoveryViolation(enum.StrEnum):
    """Rules of a pass that a test breaks."""

    #: The answer of the log to a ROLLBACK is ignored.
    DECISION_IGNORED = "recovery-decision-ignored"
    #: A branch is rolled back without asking the log.
    ROLLBACK_UNDECIDED = "recovery-rollback-undecided"
    #: A pass plans, and does nothing.
    NOTHING_DONE = "recovery-nothing-done"
    #: A decision is deleted although a step of its transaction has failed.
    FAILED_STEP_IS_DONE = "recovery-failed-step-is-done"
    #: A transaction without a row of its decision in the database that decides counts as committed.
    MISSING_ROW_IS_COMMIT = "recovery-missing-row-is-commit"
    #: A COMMIT that a database has decided is deleted before the process of the transaction asks about it.
    CARRIED_OUT_IS_FORGOTTEN = "recovery-carried-out-is-forgotten"
    #: The ROLLBACK of a database counts while another one, which may have decided COMMIT, does not answer.
    ROLLBACK_BESIDE_SILENCE = "recovery-rollback-beside-silence"
    #: The ROLLBACK of one database counts although another one that may decide does not have it.
    PARTIAL_ROLLBACK_COUNTS = "recovery-partial-rollback-counts"


@dataclass(slots=True)
class Pass:
    """The findings and actions of one pass of recovery."""

    steps: list[Step] = field(default_factory=list)
    #: Resources that did not answer, with the error.
    unreachable: dict[str, str] = field(default_factory=dict)
    #: Resources that were removed or renamed, with the number of the manager's transactions that wait for them.
    missing: dict[str, int] = field(default_factory=dict)
    #: Steps that failed, with the error. They will be retried.
    failed: dict[Step, str] = field(default_factory=dict)
    #: Heuristic outcomes in the log, and those that the pass has found.
    heuristics: list[Heuristic] = field(default_factory=list)
    #: Transactions whose COMMIT each resource has carried out, and that are no longer in the log.
    committed: list[bytes] = field(default_factory=list)
    #: The id of the decision log, or "" if it has none.
    log_id: str = ""
    #: See RecoveryView.
    partial: dict[bytes, Decision] = field(default_factory=dict)

    def note(self, heuristic: Heuristic | None) -> None:
        """Keep the heuristic outcome that a step has found, if any."""
        if heuristic is not None:
            self.heuristics = [*(each for each in self.heuristics if each.xid != heuristic.xid), heuristic]

    @property
    def foreign(self) -> list[Step]:
        """The steps for branches of the manager's name whose decisions are in another log. They are not changed."""
        return [step for step in self.steps if step.action is Action.FOREIGN]

    @property
    def undecidable(self) -> list[Step]:
        """The steps for branches whose decisions may be in a database that was removed or renamed. They are not changed."""
        return [step for step in self.steps if step.why == REMOVED_DECIDER]

    @property
    def finished(self) -> bool:
        """Whether the next pass would find nothing. Valid for a pass that has taken its steps."""
        return not self.unreachable and not self.failed and all(step.action is not Action.WAIT for step in self.steps)


class RecoveryProtocol:
    """The recovery of one manager's transactions."""

    def __init__(
        self,
        manager: str,
        log: Decisions,
        participants: Mapping[str, Participant],
        clock: Clock,
        by: str,
        *,
        lost_logs: Collection[str] = (),
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``by`` names this process in its decisions. See RecoveryView for ``lost_logs``."""
        self._manager = manager
        self._log = log
        self._participants = dict(sorted(participants.items(), key=lambda item: item[1].priority))
        self._clock = clock
        self._by = by
        self._lost_logs = lost_logs
        self._foreign: list[Step] = []
        self._undecidable: list[Step] = []
        self._seen_s: dict[bytes, float] = {}  # of decisions that are kept for a time
        self._carried_out: set[bytes] = set()  # see RecoveryView
        self._violations = violations
        self._missing: dict[str, int] = {}

    async def look(self, live: Callable[[], Collection[bytes]], *, patient: bool) -> Pass:
        """Return what a pass would do now. ``live`` returns the transactions of this process. Raises Unavailable without the log."""
        return (await self._look(live, patient=patient))[0]

    async def _look(self, live: Callable[[], Collection[bytes]], *, patient: bool) -> tuple[Pass, RecoveryView]:
        found = Pass()
        at_work = dict.fromkeys(live())
        before, in_database = await self._read(found)
        incomplete = bool(found.unreachable)
        if not incomplete:  # otherwise a database that does not answer may still have decisions
            self._carried_out &= before.decisions.keys()
        branches: dict[str, Sequence[Xid]] = {}
        for name, participant in self._participants.items():
            try:
                branches[name] = await participant.recover()
            except Exception as error:  # a failing resource does not keep the branches of others from being finished
                found.unreachable[name] = said_of(error)
        at_work.update(dict.fromkeys(live()))  # a transaction that began meanwhile may have listed branches
        after, _ = await self._read(found)
        view = RecoveryView(
            branches,
            before,
            after,
            at_work.keys(),
            self._clock.now_ms(),
            self._known_s(before, found.partial, incomplete=incomplete),
            self._lost_logs,
            in_database,
            silent=[name for name, _ in self._deciders() if name in found.unreachable],
            carried_out=frozenset(self._carried_out),
            deciders=self._names_of_deciders(),
            partial={gtrid: decision for gtrid, decision in found.partial.items() if gtrid not in after.decisions},
        )
        found.missing = missing_resources(self._manager, view, self._participants.keys())
        steps = plan(self._manager, view, patient=patient, violations=self._violations)
        found.steps = sorted(steps, key=lambda step: (step.action is Action.FORGET, self._priority(step.resource)))
        found.log_id = view.after.log_id
        found.heuristics = [each for each in view.after.heuristics.values() if manager_of(each.xid) == self._manager]
        return found, view

    async def _read(self, found: Pass) -> tuple[LogState, Collection[bytes]]:
        """Return the decisions of the log and of the databases that answer, and which of them only a database has."""
        state = await self._log.read()
        in_log = set(state.decisions)
        await self._read_databases(state, found)
        return state, state.decisions.keys() - in_log

    async def _read_databases(self, state: LogState, found: Pass) -> None:
        """Add the decisions of the databases to those of the log. A ROLLBACK counts only if all databases have it.

        As long as one of them does not have it, this one may still decide COMMIT, or has done so.
        """
        decisions: list[Decision] = []
        names = self._names_of_deciders()
        silent: list[str] = []
        for name, decider in self._deciders():
            try:
                decisions += await decider.decisions(self._manager)
            except Exception as error:
                found.unreachable[name] = said_of(error)
                silent.append(name)
        if RecoveryViolation.ROLLBACK_BESIDE_SILENCE in self._violations:
            names, silent = [name for name in names if name not in silent], []
        # A recoverer may have asked a database for ROLLBACK before another one, which decides and may have been removed, answered COMMIT.
        decisions = [each for each in decisions if each.outcome is Outcome.COMMIT or not (silent or self._removed(each.gtrid, names))]
        asked = Counter(each.gtrid for each in decisions)
        for decision in sorted(decisions, key=lambda each: each.outcome is not Outcome.COMMIT):
            whole = decision.outcome is Outcome.COMMIT or asked[decision.gtrid] == len(names)
            if whole or RecoveryViolation.PARTIAL_ROLLBACK_COUNTS in self._violations:
                state.add(decision)
            elif decision.gtrid not in state.decisions:
                found.partial[decision.gtrid] = decision

    def _deciders(self) -> list[tuple[str, Decider]]:
        found = ((name, participant.decider) for name, participant in self._participants.items())
        return [(name, decider) for name, decider in found if decider is not None]

    def _names_of_deciders(self) -> list[str]:
        return [name for name, _ in self._deciders()]

    def _removed(self, gtrid: bytes, deciders: Collection[str]) -> bool:
        return removed_decider(gtrid, deciders, self._violations)

    async def _decide(self, decision: Decision) -> Decision:
        """Ask the databases that may have the decision, and the log, for an outcome. Return the one that counts.

        Raises XaError, Unavailable.
        """
        if may_be_in_database(decision.gtrid):
            if (stored := await self._stored_without_decider(decision.gtrid)) is not None:
                return stored
            deciders = self._deciders()
            for place, (_, decider) in enumerate(deciders):
                if (stands := await decider.decide(decision)).outcome is not decision.outcome:
                    for _, other in deciders[:place]:  # did not take part; its row would be taken for the outcome
                        await other.forget_decisions([decision.gtrid])
                    return stands
        return await self._log.decide(decision)

    async def _stored_without_decider(self, gtrid: bytes) -> Decision | None:
        """Return the decision in the log of a transaction whose deciding database was removed, and None if no such database was removed.

        Raises InvalidInput if it was removed and the log has no decision, Unavailable.
        """
        if not self._removed(gtrid, self._names_of_deciders()):
            return None
        # The log has a ROLLBACK only if all databases had answered, and a COMMIT only if no database decided.
        if (stored := (await self._log.read()).decisions.get(gtrid)) is None:
            raise InvalidInput(REMOVED_DECIDER)
        return stored

    def _priority(self, resource: str) -> int:
        participant = self._participants.get(resource)
        return 0 if participant is None else participant.priority

    async def report(self, gtrid: bytes, live: Callable[[], Collection[bytes]]) -> TransactionReport:
        """Return what is known of a transaction. Raises Unavailable without the log."""
        found, view = await self._look(live, patient=True)
        self._refuse_other_log(gtrid, gtrid.decode("latin-1"), view.after.log_id)
        return report(gtrid, view, found.steps, found.unreachable)

    def _known_s(self, log: LogState, partial: Collection[bytes], *, incomplete: bool) -> dict[bytes, float]:
        """Return how many seconds this process has known each decision that is kept for a time."""
        now_s = self._clock.monotonic_s()
        rollbacks = (gtrid for gtrid, decision in log.decisions.items() if decision.outcome is Outcome.ROLLBACK)
        seen = {gtrid: self._seen_s.get(gtrid, now_s) for gtrid in (*rollbacks, *partial, *self._carried_out)}
        self._seen_s = self._seen_s | seen if incomplete else seen  # a database that does not answer may still have the others
        return {gtrid: now_s - seen_s for gtrid, seen_s in self._seen_s.items()}

    def _keep(self, gtrid: bytes, view: RecoveryView) -> bool:
        """Return True if a decision that is carried out must be kept for now.

        The process whose database has committed it may have lost the answer: it would then ask the database for ROLLBACK, and get it.
        """
        decision = view.before.decisions.get(gtrid)
        if decision is None:
            return False  # see RecoveryView.partial
        if RecoveryViolation.CARRIED_OUT_IS_FORGOTTEN in self._violations:
            return False
        if decision.by == self._by or gtrid not in view.in_database or gtrid in view.carried_out or decision.outcome is Outcome.ROLLBACK:
            return False
        self._carried_out.add(gtrid)
        return True

    async def run(self, live: Callable[[], Collection[bytes]], *, patient: bool) -> Pass:
        """Take the steps of a plan. Raises Unavailable without the log; the result has the resources that do not answer."""
        done, view = await self._look(live, patient=patient)
        if done.missing != self._missing:  # log it once, not at each pass
            self._missing = done.missing
            for name, count in done.missing.items():
                _log.error("transactions wait for an unknown resource", resource=name, transactions=count)
        if done.foreign != self._foreign:
            self._foreign = done.foreign
            for step in done.foreign:
                _log.error("branch of another decision log ignored", xid=step.xid, resource=step.resource, reason=step.why)
        if done.undecidable != self._undecidable:
            self._undecidable = done.undecidable
            for step in done.undecidable:
                _log.error("branch of an unknown decider ignored", xid=step.xid, resource=step.resource, reason=step.why)
        crash.point("xa.recover.before")
        if RecoveryViolation.NOTHING_DONE in self._violations:
            return done
        for step in done.steps:
            if step.action is Action.FORGET and self._needed(step.xid.gtrid, done):
                continue
            try:
                if step.action is not Action.FORGET or not self._keep(step.xid.gtrid, view):
                    done.note(await self._take(step))
                crash.point("xa.recover.step")
                decision = view.before.decisions.get(step.xid.gtrid)
                if step.action is Action.FORGET and decision is not None and decision.outcome is Outcome.COMMIT:
                    done.committed.append(step.xid.gtrid)
            except Exception as error:
                done.failed[step] = said_of(error)
                _log.warning("recovery step failed", action=step.action, xid=step.xid, error=said_of(error))
        if any(step.action is Action.FORGET for step in done.steps):
            await self._read_databases(LogState(), done)  # this deletes forgotten decisions; this process may not look again
        return done

    def _needed(self, gtrid: bytes, done: Pass) -> bool:
        failed = any(step.xid.gtrid == gtrid for step in done.failed)
        return failed and RecoveryViolation.FAILED_STEP_IS_DONE not in self._violations

    async def _take(self, step: Step) -> Heuristic | None:
        if step.action is Action.FORGET:
            await self._log.forget([step.xid.gtrid])
            for _, decider in self._deciders():
                await decider.forget_decisions([step.xid.gtrid])
        elif step.action not in (Action.WAIT, Action.FOREIGN):
            outcome = Outcome.ROLLBACK if step.action is Action.ROLLBACK else Outcome.COMMIT
            if outcome is Outcome.ROLLBACK:
                outcome = await self._stands(step.xid.gtrid)
            _log.info("recovery finishing branch", outcome=outcome, xid=step.xid, resource=step.resource, reason=step.why)
            participant, presumed = self._participants[step.resource], outcome is Outcome.ROLLBACK
            return await finish(
                participant,
                step.xid,
                outcome,
                self._log,
                self._clock,
                token=step.token,
                presumed=presumed,
                violations=self._violations,
            )
        return None

    async def _stands(self, gtrid: bytes) -> Outcome:
        """Ask the log for ROLLBACK, and return the outcome that counts: the application may only have been slow."""
        if RecoveryViolation.ROLLBACK_UNDECIDED in self._violations:
            return Outcome.ROLLBACK
        if RecoveryViolation.MISSING_ROW_IS_COMMIT in self._violations and may_be_in_database(gtrid):
            return Outcome.COMMIT
        decision = await self._decide(Decision(gtrid, Outcome.ROLLBACK, (), self._clock.now_ms(), self._by))
        crash.point("xa.recover.decided")
        return Outcome.ROLLBACK if RecoveryViolation.DECISION_IGNORED in self._violations else decision.outcome

    async def finish_now(self, xid: Xid, outcome: Outcome, *, who: str, only: str = "", allow_split: bool = False) -> Outcome:
        """Finish a transaction as requested, unless the log has another decision. See ``Recoverer.finish_now``."""
        self._refuse_other_manager(xid)
        found = Pass()
        state, _ = await self._read(found)
        self._refuse_other_log(xid.gtrid, f"branch {xid}", state.log_id)
        undecided = xid.gtrid not in state.decisions and not may_be_in_database(xid.gtrid)
        if outcome is Outcome.COMMIT and undecided and not allow_split:
            await self._refuse_split(xid)
        decision = await self._wanted(xid, outcome, f"{who}, {self._by}", state, found)
        for participant in [self._participants[only]] if only else self._participants.values():
            for each in await participant.recover():
                if each.gtrid == xid.gtrid:
                    token = decision.token(participant.name)
                    await finish(participant, each, decision.outcome, self._log, self._clock, token=token, violations=self._violations)
        return decision.outcome

    async def _wanted(self, xid: Xid, outcome: Outcome, by: str, state: LogState, found: Pass) -> Decision:
        """Store the outcome that somebody wants for a transaction, and return the decision that counts.

        Raises InvalidInput for a COMMIT that only a database can decide.
        """
        if outcome is Outcome.COMMIT and may_be_in_database(xid.gtrid):
            # Only its row counts: an entry in the log would contradict a ROLLBACK, and let recovery delete the row of a COMMIT too early.
            if (decided := state.decisions.get(xid.gtrid) or await self._stored_without_decider(xid.gtrid)) is not None:
                return decided
            if found.unreachable:
                raise Unavailable(
                    f"branch {xid} may have been committed by {', '.join(found.unreachable)}, which does not answer; try again later"
                )
            raise InvalidInput(f"cannot commit branch {xid}: the database that decides has not committed it. Roll the branch back")
        # All resources: nobody knows which are prepared, and a COMMIT that is forgotten too early would be rolled back in the others.
        decision = Decision(xid.gtrid, outcome, tuple(self._participants), self._clock.now_ms(), by)
        return await (self._decide(decision) if outcome is Outcome.ROLLBACK else self._log.decide(decision))

    async def _refuse_split(self, xid: Xid) -> None:
        found, view = await self._look(tuple, patient=True)
        if xid.gtrid not in view.after.decisions and (risks := split_risks(xid.gtrid, view, found.unreachable)):
            raise InvalidInput(
                f"cannot commit branch {xid}: {'; '.join(risks)}. The commit could split the transaction. Look at it with "
                "`bascule xa show` and roll it back, or add --allow-split (allow_split=True) if each resource that took part has prepared"
            )

    def _refuse_other_manager(self, xid: Xid) -> None:
        if manager_of_gtrid(xid.gtrid) != self._manager:
            raise InvalidInput(
                f"branch {xid} does not belong to transaction manager {self._manager!r}; use the manager that began the branch"
            )

    def _refuse_other_log(self, gtrid: bytes, what: str, log_id: str) -> None:
        if not own_log(gtrid, log_id, self._lost_logs):
            other = log_id_of_gtrid(gtrid)
            raise InvalidInput(
                f"{what} was begun with decision log {other}; this manager uses {log_id or 'another log'}. Use decision log {other}"
            )

    async def forget(self, xid: Xid) -> None:
        """Drop a heuristic outcome that the operator has handled. See ``Recoverer.forget``."""
        self._refuse_other_manager(xid)
        state = await self._log.read()
        self._refuse_other_log(xid.gtrid, f"branch {xid}", state.log_id)
        if xid not in state.heuristics:
            raise UnknownXid(f"no heuristic outcome is recorded for {xid}")
        if (participant := self._participants.get(xid.bqual.decode("latin-1"))) is not None:
            try:
                await participant.forget(xid)
            except UnknownXid:
                _log.debug("branch unknown to its resource", resource=participant.name, xid=xid)
        await self._log.forget_heuristic(xid)


def said_of(error: Exception) -> str:
    """Return the text of an error. An error of another library gets its class name, because its text may be empty."""
    return str(error) if isinstance(error, BasculeError) else f"{type(error).__name__}: {error}"
