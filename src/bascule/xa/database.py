"""Databases as resources: any driver with the two-phase methods of PEP 249 (``tpc_begin`` etc.)."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import Any, Generic, Protocol, TypeVar

from bascule.core.errors import InvalidInput
from bascule.xa.branch_mark import BranchMark
from bascule.xa.branches import BranchStates
from bascule.xa.database_errors import asked_about, translated, unprepared_commit
from bascule.xa.driver_xids import driver_xid, is_left_trial, recovered, trial_xid
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, ResourceError, ResourceFailed, RetryLater, UnknownXid
from bascule.xa.forks import abandon
from bascule.xa.log import Outcome
from bascule.xa.resource import BranchState, Call, CommitPriority, Vote, beside_a_call
from bascule.xa.xid import Xid

HandleT = TypeVar("HandleT")
#: Connections kept open between branches: as many as threads usually work at once.
IDLE_MAX = 8

#: The two-phase commit extensions of PEP 249 that are used here.
TWO_PHASE_METHODS = ("xid", "tpc_begin", "tpc_prepare", "tpc_commit", "tpc_rollback", "tpc_recover")


class DatabaseViolation(enum.StrEnum):
    """Rules of databases as resources that a test breaks."""

    HANDLE_OUTLIVES_BRANCH = "the handle of a branch still works after the branch has ended"
    READ_ONLY_IS_PREPARED = "a branch that the driver reports as read-only counts as prepared"
    IDS_ARE_TEXT = "a driver that returns the ids of prepared branches as bytes is not understood"


class Work(Protocol[HandleT]):
    """A branch in progress, on its own connection. ``raw`` is the driver connection."""

    handle: HandleT
    raw: Any

    def begin(self, xid: Any) -> None:
        """Begin the branch with the driver's xid."""

    def interrupt(self) -> bool:
        """End a call of the application in progress on the handle. Return True if there is one.

        Returns when the call has ended, or the connection has become unusable.
        """

    def flush(self) -> None:
        """Send buffered statements."""

    def cut_off(self) -> None:
        """End the use of the handle, if the driver can. The branch continues without the application."""

    def prepare(self) -> Any:
        """Prepare the branch. Return False, and no other value, if there was nothing to commit; the branch no longer exists then."""

    def commit(self) -> None:
        """Commit the branch, in the second phase or in one phase."""

    def rollback(self) -> None:
        """Roll the branch back."""

    def close(self, *, reusable: bool) -> None:
        """Return the connection to its pool, or close the connection if its state is unknown (``reusable`` is False)."""


class DatabaseResource(Generic[HandleT]):
    """The common rules of databases. A subclass opens connections and knows the differences of its database."""

    def __init__(self, name: str, *, priority: int = CommitPriority.DATABASE, violations: Collection[enum.StrEnum] = frozenset()) -> None:
        """See CommitPriority for ``priority``."""
        self.name = name
        self._violations = violations
        self.priority = priority
        self._work: dict[Xid, Work[HandleT]] = {}
        self._branches = BranchStates()
        self._lock = threading.Lock()

    def start(self, xid: Xid, *, timeout_s: float) -> HandleT:
        """See Resource. Use the handle in one thread at a time; only the transaction commits it and rolls it back."""
        self._branches.check(xid, Call.START)
        with translated():
            work = self.opened(xid)
            try:
                self.begun(work.raw, timeout_s)
            except BaseException:
                work.close(reusable=False)
                raise
        with self._lock:
            self._work[xid] = work
        self._branches.move(xid, BranchState.ACTIVE)
        return work.handle

    def end(self, xid: Xid, *, success: bool) -> None:
        """See Resource. A statement in progress is cancelled, if the driver can."""
        after = self._branches.check(xid, Call.END if success else Call.END_FAILED)
        with self._lock:
            left = self._work.get(xid)
        if left is not None and left.interrupt() and success:
            left.cut_off()  # a later call would work in the branch, or after its rollback
            self._branches.move(xid, BranchState.FAILED)
            raise beside_a_call(xid)
        if success:
            with self._working(xid) as work:
                work.flush()
        if left is not None:
            left.cut_off()
        self._branches.move(xid, after)

    def prepare(self, xid: Xid) -> Vote:
        """See Resource."""
        after = self._branches.check(xid, Call.PREPARE)
        with self._working(xid) as work:
            vote = self.vote(work.raw, xid)
            if vote is Vote.READ_ONLY:
                work.rollback()
            elif work.prepare() is False and DatabaseViolation.READ_ONLY_IS_PREPARED not in self._violations:
                vote = Vote.READ_ONLY
        if vote is Vote.READ_ONLY:
            self._gone(xid)
        else:
            self._branches.move(xid, after)
        return vote

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource."""
        if self._branches.state(xid) is BranchState.NONE and not one_phase:
            self._from_outside(xid, Outcome.COMMIT)
            return
        self._branches.check(xid, Call.COMMIT_ONE_PHASE if one_phase else Call.COMMIT)
        asked = not one_phase
        try:
            with self._working(xid) as work:
                if one_phase:
                    self.vote_alone(work.raw, xid)  # the database would roll back a failed branch without an error
                asked = True
                with unprepared_commit() if one_phase else nullcontext():
                    work.commit()
        except UnknownXid as error:
            self._missing(xid, Outcome.COMMIT, error)
        except ResourceFailed as error:
            if not asked:
                raise BranchRolledBack(
                    f"{self.name} lost branch {xid} before the commit: {error}", Code.XA_RBCOMMFAIL, cause=error
                ) from error
            # A prepared branch is asked about again; for others this is the only chance to learn the outcome.
            with asked_about(error):
                outcome = self.outcome(xid) if one_phase else None
            if outcome is Outcome.ROLLBACK:
                raise BranchRolledBack(f"{self.name} did not commit branch {xid}: {error}", Code.XA_RBCOMMFAIL, cause=error) from error
            if outcome is None:
                raise
        self._gone(xid)

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        state = self._branches.state(xid)
        if state is BranchState.NONE:
            self._from_outside(xid, Outcome.ROLLBACK)
            return
        try:
            with self._working(xid) as work:
                if work.interrupt():  # as in ``end``, and the call continues: the rollback would wait for it
                    raise ResourceFailed(f"{self.name}: could not roll back branch {xid}: the application is still using it")
                work.rollback()
        except UnknownXid as error:
            self._missing(xid, Outcome.ROLLBACK, error)
        except ResourceFailed:
            if state is BranchState.PREPARED:
                raise  # otherwise the end of the connection has ended the branch
        self._gone(xid)

    def recover(self) -> Sequence[Xid]:
        """See Resource."""
        with translated(), self.connected() as raw:
            return self.listed(raw)

    def forget(self, xid: Xid) -> None:
        """See Resource. A database does not remember heuristic outcomes."""
        raise UnknownXid(f"{self.name} has no heuristic outcome of branch {xid}")

    def after_fork(self) -> None:
        """See Forks."""
        abandon(self._work, self._lock)
        self._work, self._branches, self._lock = {}, BranchStates(), threading.Lock()

    # The methods below differ between databases and drivers.

    def opened(self, xid: Xid) -> Work[HandleT]:
        """Return a connection on which the branch has begun."""
        raise NotImplementedError

    def connected(self) -> AbstractContextManager[Any]:
        """Return a driver connection without a branch."""
        raise NotImplementedError

    def begun(self, raw: Any, timeout_s: float) -> None:
        """Prepare the connection right after the begin."""

    def vote(self, raw: Any, xid: Xid) -> Vote:  # noqa: ARG002 - for those who can tell
        """Return the vote before a prepare. Raises BranchRolledBack if the branch has failed already."""
        return Vote.YES

    def vote_alone(self, raw: Any, xid: Xid) -> Vote:
        """Return the vote before a commit in one phase, for which ``outcome`` may be asked. Raises BranchRolledBack."""
        return self.vote(raw, xid)

    def refuse_failed(self, raw: Any, xid: Xid) -> None:
        """Raise BranchRolledBack before a commit with a decision if the branch has failed already, unless the commit shows it."""

    def listed(self, raw: Any) -> Sequence[Xid]:
        """Return the branches that the database has prepared."""
        rows = [each for each in raw.tpc_recover() if each[0] is not None]
        if DatabaseViolation.IDS_ARE_TEXT in self._violations:
            return [Xid(number, *(part.encode() for part in parts)) for number, *parts in rows]
        found = [recovered(each) for each in rows]
        raw.rollback()
        return found

    def token(self, xid: Xid) -> str:  # noqa: ARG002 - for those who can tell
        """See TellsOutcome."""
        return ""

    def outcome(self, xid: Xid, token: str = "") -> Outcome | None:  # noqa: ARG002 - for those who can tell
        """See TellsOutcome. Without a token, for a branch of this process."""
        return None

    def _from_outside(self, xid: Xid, outcome: Outcome) -> None:
        """Finish a branch that another process, or a lost connection, has prepared."""
        try:
            with translated(), self.connected() as raw:
                (raw.tpc_commit if outcome is Outcome.COMMIT else raw.tpc_rollback)(driver_xid(raw, xid))
        except UnknownXid as error:
            if xid in self.recover():  # in MySQL and MariaDB, only the session that has prepared a branch can end it while it is open
                raise RetryLater(f"{self.name}: branch {xid} is prepared, and the session that has prepared it is still open") from error
            self._missing(xid, outcome, error)
        self._gone(xid)

    def _missing(self, xid: Xid, wanted: Outcome, error: UnknownXid) -> None:
        """Handle a branch that the database does not have. Return if it is known to have been finished as wanted, otherwise raise."""
        if (found := self.outcome(xid)) is None:
            raise error
        code = Code.XA_HEURCOM if found is Outcome.COMMIT else Code.XA_HEURRB
        if found is not wanted:
            raise BranchHeuristic(f"branch {xid} was finished heuristically, by {found}", code) from error

    @contextmanager
    def _working(self, xid: Xid) -> Iterator[Work[HandleT]]:
        """Yield the work of a branch to one thread at a time. After a failure, close the connection; only the database has the branch."""
        with self._lock:
            work = self._work.pop(xid, None)
        if work is None:  # a second thread would find the next branch on the connection after the first has returned it
            raise RetryLater(f"branch {xid} is in use by another thread")
        try:
            with translated():
                yield work
        except BaseException:
            work.close(reusable=False)
            self._gone(xid, reusable=False)
            raise
        with self._lock:
            self._work[xid] = work

    def _gone(self, xid: Xid, *, reusable: bool = True) -> None:
        self._branches.move(xid, BranchState.NONE)
        with self._lock:
            work = self._work.pop(xid, None)
        if work is not None:
            work.close(reusable=reusable)


class _ConnectionWork(Generic[HandleT]):
    """A branch on a plain driver connection. The handle is another object if ``lend`` returns one."""

    def __init__(
        self,
        connection: HandleT,
        give_back: Callable[[HandleT], None],
        lend: Callable[[HandleT], HandleT],
        cut_off: Callable[[HandleT], None],
        interrupt: Callable[[HandleT], bool],
    ) -> None:
        self._connection = connection
        self.raw: Any = connection
        self._give_back = give_back
        self._lend = lend
        self._cut_off = cut_off
        self._interrupt = interrupt

    def begin(self, xid: Any) -> None:
        self.raw.tpc_begin(xid)
        self.handle = self._lend(self._connection)

    def interrupt(self) -> bool:
        return self._interrupt(self._connection)

    def flush(self) -> None:
        """Do nothing: a connection sends at once."""

    def cut_off(self) -> None:
        self._cut_off(self.handle)

    def prepare(self) -> Any:
        return self.raw.tpc_prepare()

    def commit(self) -> None:
        self.raw.tpc_commit()

    def rollback(self) -> None:
        self.raw.tpc_rollback()

    def close(self, *, reusable: bool) -> None:
        if reusable:
            self._cut_off(self.handle)
            self._give_back(self._connection)
        else:
            close_quietly(self.raw)


def close_quietly(connection: Any) -> None:
    """Close a connection that is broken or unused. Never raises."""
    with suppress(Exception):
        connection.close()


@contextmanager
def connection_of(connect: Callable[[], Any]) -> Iterator[Any]:
    """Yield a new connection, which is closed at the end of the block."""
    raw = connect()
    try:
        yield raw
    finally:
        close_quietly(raw)


class DbapiResource(DatabaseResource[HandleT]):
    """A database behind any driver with PEP 249's two-phase methods. The handle is a connection."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], HandleT],
        *,
        idle_max: int = 0,
        priority: int = CommitPriority.DATABASE,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``connect`` opens a connection. See CommitPriority for ``priority``.

        Up to ``idle_max`` connections are kept. An application that uses a connection after its transaction writes into another one.
        """
        super().__init__(name, priority=priority, violations=violations)
        self._connect = connect
        self._idle_max = idle_max
        self._idle: list[HandleT] = []
        self._mark = BranchMark(self._trial)

    def begun(self, raw: Any, timeout_s: float) -> None:  # noqa: ARG002 - the driver has no timeout for a transaction
        """See DatabaseResource."""
        self._mark.put(raw)

    def vote(self, raw: Any, xid: Xid) -> Vote:
        """See DatabaseResource."""
        self._mark.check(raw, xid)
        return Vote.YES

    @contextmanager
    def _trial(self) -> Iterator[Any]:
        """Yield a connection with a branch in which nobody works."""
        with self.connected() as raw:
            raw.tpc_begin(driver_xid(raw, trial_xid(self.name)))
            try:
                yield raw
            finally:
                with suppress(Exception):  # the end of the connection rolls the branch back
                    raw.tpc_rollback()

    def opened(self, xid: Xid) -> Work[HandleT]:
        """See DatabaseResource."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            with suppress(Exception):  # an idle connection may be broken; a new one shows whether the database is available
                return self._begun(idle, xid)
        return self._begun(self._connect(), xid)

    def connected(self) -> AbstractContextManager[Any]:
        """See DatabaseResource."""
        return connection_of(self._connect)

    def check(self) -> None:
        """See Checks. Prepares a branch without work, and looks for it as recovery does after a crash."""
        with translated(), self.connected() as raw:
            missing = [method for method in TWO_PHASE_METHODS if not hasattr(raw, method)]
        if missing:
            raise InvalidInput(
                f"{self.name}: driver {type(raw).__module__} has no two-phase commit: its connections have no {', '.join(missing)}"
            )
        trial = trial_xid(self.name)
        with translated(), self.connected() as raw, self.connected() as other:
            found = self._tried_out(trial, raw, other)
        if found is None or trial in found:
            return
        text = f"driver {type(raw).__module__} does not list a branch that it has prepared; recovery could not finish it after a crash"
        if other_id := next((each for each in found if trial.gtrid in each.gtrid), None):
            raise InvalidInput(f"{self.name}: {text}. It lists {other_id} instead of {trial}")
        raise ResourceError(f"{self.name}: {text}")

    def _tried_out(self, trial: Xid, raw: Any, other: Any) -> Sequence[Xid] | None:
        """Prepare a branch and roll it back. Return what another connection lists meanwhile, or None if nothing was prepared."""
        for each in self.listed(other):  # a process may have died here
            if is_left_trial(each, self.name):
                other.tpc_rollback(driver_xid(other, each))
        raw.tpc_begin(driver_xid(raw, trial))
        with suppress(Exception), closing(raw.cursor()) as cursor:  # some drivers begin with the first statement; Oracle has another one
            cursor.execute("SELECT 1")
            cursor.fetchall()
        if raw.tpc_prepare() is False:
            return None
        try:
            return self.listed(other)
        finally:
            raw.tpc_rollback()
            for row in other.tpc_recover():  # a driver that does not know the branch has not rolled it back
                if row[0] is not None and trial.gtrid in recovered(row).gtrid:
                    other.tpc_rollback(row)
            other.rollback()

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            close_quietly(each)

    def after_fork(self) -> None:
        """See Forks."""
        super().after_fork()
        abandon(self._idle)
        self._idle = []

    def lent(self, connection: HandleT) -> HandleT:
        """Return the object through which the application uses a connection for one branch."""
        return connection

    def cut_off(self, handle: HandleT) -> None:
        """End the use of the handle that ``lent`` has returned, if the driver can."""

    def interrupt(self, connection: HandleT) -> bool:  # noqa: ARG002 - for drivers that can tell
        """End the call in progress on a connection, if the driver can, and return True if there is one."""
        return False

    def _begun(self, connection: HandleT, xid: Xid) -> Work[HandleT]:
        work = _ConnectionWork(connection, self._take_back, self.lent, self._end_handle, self.interrupt)
        try:
            work.begin(driver_xid(connection, xid))
        except BaseException:
            work.close(reusable=False)
            raise
        return work

    def _end_handle(self, handle: HandleT) -> None:
        if DatabaseViolation.HANDLE_OUTLIVES_BRANCH not in self._violations:
            self.cut_off(handle)

    def _take_back(self, connection: HandleT) -> None:
        with self._lock:
            if len(self._idle) < self._idle_max:
                self._idle.append(connection)
                return
        close_quietly(connection)
