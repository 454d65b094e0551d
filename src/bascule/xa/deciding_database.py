"""Databases whose commit can be the decision of a transaction: the decision is a row, committed together with the work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from bascule.core.log import get_log
from bascule.xa.database import DatabaseResource, HandleT, asked_about, in_words_of_xa, translated, unprepared_commit
from bascule.xa.decision_table import DecisionTable
from bascule.xa.errors import BranchRolledBack, Code, ResourceFailed, XaError
from bascule.xa.log import Decision, Outcome
from bascule.xa.resource import Call
from bascule.xa.xid import Xid

#: When this many decisions can be forgotten and no recovery has deleted them, they are deleted at once.
FORGOTTEN_MAX: Final = 1000

_log = get_log("bascule.xa")


class DecidingDatabase(DatabaseResource[HandleT]):
    """The implementation of ``Decides`` with a table of decisions."""

    def __init__(self, name: str, *, table: DecisionTable, **rest: Any) -> None:
        super().__init__(name, **rest)
        self._table = table
        self._forgotten: set[bytes] = set()

    def has_decisions(self, raw: Any) -> bool:
        """Return True if the database has a table of decisions."""
        raise NotImplementedError

    def commit_deciding(self, xid: Xid, decision: Decision) -> None:
        """See Decides."""
        self._branches.check(xid, Call.COMMIT_ONE_PHASE)
        asked = False
        try:
            with self._working(xid) as work:
                self.vote(work.raw, xid)  # the database would roll back a failed branch without an error
                self._write(work.raw, decision)
                asked = True
                with unprepared_commit():
                    work.commit()
        except ResourceFailed as error:
            if not asked:
                raise BranchRolledBack(
                    f"{self.name} lost branch {xid} before the commit: {error}", Code.XA_RBCOMMFAIL, cause=error
                ) from error
            # The first decision counts: the insert waits for a commit in progress, and a later commit fails.
            with asked_about(error):
                stands = self.decide(replace(decision, outcome=Outcome.ROLLBACK))
            if stands.outcome is Outcome.ROLLBACK:
                raise BranchRolledBack(f"{self.name} did not commit branch {xid}: {error}", Code.XA_RBCOMMFAIL, cause=error) from error
        self._gone(xid)

    def decide(self, decision: Decision) -> Decision:
        """See Decides."""
        with translated(), self.connected() as raw:
            if not self.has_decisions(raw):
                raw.rollback()
                return decision
            try:
                self._table.insert(raw, decision)
                raw.commit()
            except Exception as error:
                raw.rollback()
                if in_words_of_xa(error).xa_code is not Code.XA_RBINTEGRITY:
                    raise
                found = self._table.find(raw, decision.gtrid)
                raw.rollback()
                # The row was deleted: it was a COMMIT that was carried out, because a ROLLBACK is kept for a day.
                return found or replace(decision, outcome=Outcome.COMMIT)
            return decision

    def decisions(self, manager: str) -> Sequence[Decision]:
        """See Decides. Also deletes forgotten decisions."""
        with translated(), self.connected() as raw:
            if not self.has_decisions(raw):
                raw.rollback()
                return []
            self._delete(raw)
            found = self._table.read(raw, manager)
            raw.rollback()
            return found

    def forget_decisions(self, gtrids: Iterable[bytes]) -> None:
        """See Decides. The rows are deleted at the next recovery, or when there are many."""
        with self._lock:
            self._forgotten.update(gtrids)
            many = len(self._forgotten) >= FORGOTTEN_MAX
        if many:
            try:
                with translated(), self.connected() as raw:
                    self._delete(raw)
            except XaError as error:
                _log.warning("could not delete decisions, will retry", resource=self.name, error=error)

    def _write(self, raw: Any, decision: Decision) -> None:
        try:
            self._table.insert(raw, decision)
        except Exception as error:
            if in_words_of_xa(error).xa_code is not Code.XA_RBINTEGRITY:
                raise
            text = "recovery rolled back the transaction before the commit"
            raise BranchRolledBack(text, Code.XA_RBTRANSIENT) from error

    def _delete(self, raw: Any) -> None:
        with self._lock:
            forgotten, self._forgotten = self._forgotten, set()
        try:
            self._table.delete(raw, sorted(forgotten))
            raw.commit()
        except BaseException:
            with self._lock:
                self._forgotten |= forgotten
            raise
