"""Databases whose commit can be the decision of a transaction: the decision is a row, committed together with the work."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

from bascule.core.log import get_log
from bascule.xa.database import DatabaseResource, HandleT
from bascule.xa.database_errors import asked_about, in_words_of_xa, translated, unprepared_commit
from bascule.xa.decision_table import DecisionTable
from bascule.xa.errors import BranchRolledBack, Code, ResourceFailed, XaError
from bascule.xa.log import Decision, Outcome
from bascule.xa.resource import Call
from bascule.xa.xid import Xid

#: When this many decisions can be forgotten and no recovery has deleted them, they are deleted at once.
FORGOTTEN_MAX: Final = 1000

_log = get_log("bascule.xa")


class DecidingViolation(enum.StrEnum):
    """Rules of databases that decide, broken by a test."""

    #: The row of the decision is written behind the work, by a transaction of its own.
    ROW_BESIDE_WORK = "deciding-row-beside-work"
    #: The row of a COMMIT is deleted before the other resources have committed.
    ROW_FORGOTTEN_EARLY = "deciding-row-forgotten-early"
    #: A commit that was not answered counts as rolled back.
    IN_DOUBT_IS_ROLLED_BACK = "deciding-in-doubt-is-rolled-back"
    #: The second decision stands.
    LAST_DECISION_STANDS = "deciding-last-decision-stands"


class DecidingDatabase(DatabaseResource[HandleT]):
    """The implementation of ``Decides`` with a table of decisions."""

    #: Whether ``write_row`` also commits, in the same round trip.
    commits_with_row = False

    def __init__(self, name: str, *, table: DecisionTable, **rest: Any) -> None:
        super().__init__(name, **rest)
        self._table = table
        self._forgotten: set[bytes] = set()

    def has_decisions(self, raw: Any) -> bool:
        """Return True if the database has a table of decisions."""
        raise NotImplementedError

    def tables(self, raw: Any, gtrid: bytes | None = None) -> Sequence[DecisionTable]:  # noqa: ARG002 - for those that may not read a table
        """Return the tables that may have decisions, with the table of this process first.

        ``gtrid`` is the transaction whose decision is wanted; None means all transactions. Raises XaError if its decision may be in a
        table that cannot be read.
        """
        return [self._table] if self.has_decisions(raw) else []

    def commit_deciding(self, xid: Xid, decision: Decision) -> None:
        """See Decides."""
        self._branches.check(xid, Call.COMMIT_ONE_PHASE)
        asked = self.commits_with_row
        try:
            with self._working(xid) as work:
                self.refuse_failed(work.raw, xid)  # the database would roll back a failed branch without an error
                if DecidingViolation.ROW_BESIDE_WORK not in self._violations:
                    with unprepared_commit() if asked else nullcontext():
                        self._write(work.raw, decision)
                asked = True
                with unprepared_commit():
                    work.commit()
                if DecidingViolation.ROW_BESIDE_WORK in self._violations:
                    self.decide(decision)
        except ResourceFailed as error:
            if not asked:
                raise BranchRolledBack(
                    f"{self.name} lost branch {xid} before the commit: {error}", Code.XA_RBCOMMFAIL, cause=error
                ) from error
            # The first decision counts: the insert waits for a commit in progress, and a later commit fails.
            if DecidingViolation.IN_DOUBT_IS_ROLLED_BACK in self._violations:
                raise BranchRolledBack(f"{self.name} did not answer", Code.XA_RBCOMMFAIL, cause=error) from error
            with asked_about(error):
                stands = self.decide(replace(decision, outcome=Outcome.ROLLBACK))
            if stands.outcome is Outcome.ROLLBACK:
                raise BranchRolledBack(f"{self.name} did not commit branch {xid}: {error}", Code.XA_RBCOMMFAIL, cause=error) from error
        self._gone(xid)
        if DecidingViolation.ROW_FORGOTTEN_EARLY in self._violations:
            self.forget_decisions([decision.gtrid])

    def decide(self, decision: Decision) -> Decision:
        """See Decides."""
        with translated(), self.connected() as raw:
            tables = self.tables(raw, decision.gtrid)
            if not tables:
                raw.rollback()
            for place, table in enumerate(tables):
                if (stands := self._decide_in(raw, table, decision)).outcome is not decision.outcome:
                    for other in tables[:place]:  # not where the decision was made; its row would be taken for the outcome
                        other.delete(raw, [decision.gtrid])
                        raw.commit()
                    return stands
            return decision

    def _decide_in(self, raw: Any, table: DecisionTable, decision: Decision) -> Decision:
        """Store a decision in one table, and return the one that counts there."""
        try:
            self.make_durable(raw)
            table.insert(raw, decision)
            raw.commit()
        except Exception as error:
            raw.rollback()
            if in_words_of_xa(error).xa_code is not Code.XA_RBINTEGRITY:
                raise
            found = table.find(raw, decision.gtrid)
            raw.rollback()
            if DecidingViolation.LAST_DECISION_STANDS in self._violations:
                return decision
            # The row was deleted: it was a COMMIT that was carried out, because a ROLLBACK is kept for a day.
            return found or replace(decision, outcome=Outcome.COMMIT)
        return decision

    def decisions(self, manager: str) -> Sequence[Decision]:
        """See Decides. Also deletes forgotten decisions."""
        with translated(), self.connected() as raw:
            tables = self.tables(raw)
            self._delete(raw, tables)
            found = [decision for table in tables for decision in table.read(raw, manager)]
            raw.rollback()
            rollbacks = Counter(each.gtrid for each in found if each.outcome is Outcome.ROLLBACK)
            stand: dict[bytes, Decision] = {}
            for decision in sorted(found, key=lambda each: each.outcome is not Outcome.COMMIT):
                # A recoverer that has died may have stored a ROLLBACK in some of the tables only: another process could still commit.
                if decision.outcome is Outcome.COMMIT or rollbacks[decision.gtrid] == len(tables):
                    stand.setdefault(decision.gtrid, decision)
            return list(stand.values())

    def forget_decisions(self, gtrids: Iterable[bytes]) -> None:
        """See Decides. The rows are deleted at the next recovery, when there are many, or when the manager closes."""
        with self._lock:
            self._forgotten.update(gtrids)
            many = len(self._forgotten) >= FORGOTTEN_MAX
        if many:
            self.delete_forgotten()

    def delete_forgotten(self) -> None:
        """See DeletesLater."""
        with self._lock:
            if not self._forgotten:
                return
        try:
            with translated(), self.connected() as raw:
                self._delete(raw, self.tables(raw))
        except XaError as error:
            _log.warning("could not delete decisions, will retry", resource=self.name, error=error)

    def write_row(self, raw: Any, decision: Decision) -> None:
        """Write the row of a decision in the transaction of the branch. With ``commits_with_row``, also commit."""
        self._table.insert(raw, decision)

    def make_durable(self, raw: Any) -> None:
        """Let the current transaction survive a crash of the database once it is committed, if this depends on a setting."""

    def is_decided(self, error: Exception) -> bool:
        """Return True if ``write_row`` has failed because there is a row for the transaction."""
        return in_words_of_xa(error).xa_code is Code.XA_RBINTEGRITY

    def _write(self, raw: Any, decision: Decision) -> None:
        try:
            self.write_row(raw, decision)
        except Exception as error:
            if not self.is_decided(error):
                raise
            text = "recovery rolled back the transaction before the commit"
            if self.commits_with_row:  # the row of the other decision has the outcome
                raise ResourceFailed(text, cause=error) from error
            raise BranchRolledBack(text, Code.XA_RBTRANSIENT) from error

    def _delete(self, raw: Any, tables: Sequence[DecisionTable]) -> None:
        with self._lock:
            forgotten, self._forgotten = self._forgotten, set()
        try:
            for table in tables:
                table.delete(raw, sorted(forgotten))
            raw.commit()
        except BaseException:
            with self._lock:
                self._forgotten |= forgotten
            raise
