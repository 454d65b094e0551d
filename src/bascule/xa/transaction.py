"""One global transaction, and its two phases."""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from bascule.core import crash
from bascule.core.errors import InvalidInput
from bascule.xa.errors import (
    BranchHeuristic,
    BranchRolledBack,
    HeuristicOutcome,
    OutOfOrder,
    ResourceError,
    TransactionInDoubt,
    TransactionRolledBack,
    TransactionTimedOut,
    UnknownXid,
    XaError,
)
from bascule.xa.log import Decision, DecisionLog, Heuristic, Outcome
from bascule.xa.recovery import finish, now_ms, split
from bascule.xa.resource import Resource, Vote
from bascule.xa.xid import Xid, branch, new_gtrid

_log = logging.getLogger("bascule.xa")
HandleT = TypeVar("HandleT")


class Status(enum.Enum):
    """Of a transaction, as in Jakarta Transactions."""

    ACTIVE = "active"
    MARKED_ROLLBACK = "to be rolled back"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling back"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    IN_DOUBT = "in doubt"


class _Branch(NamedTuple):
    resource: Resource[Any]
    xid: Xid
    handle: Any


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a transaction needs of its manager."""

    manager: str
    log: DecisionLog
    by: str
    known: Callable[[Resource[Any]], bool]
    entered: Callable[[Transaction], Callable[[], None]]
    #: Called once, at the end; true when recovery has something left to do.
    left: Callable[[Transaction, bool], None]


class Transaction:
    """Made by ``TransactionManager.begin``; ends with its ``with`` block, or by ``commit`` or ``rollback``.

    ``unfinished`` names, after a commit, the resources that could not be told yet, and why; recovery tells them.
    """

    def __init__(self, around: Surroundings, timeout_s: float) -> None:
        self.gtrid = new_gtrid(around.manager, now_ms() + int(timeout_s * 1000))
        self.id = self.gtrid.decode()
        self.timeout_s = timeout_s
        self.status = Status.ACTIVE
        self.unfinished: dict[str, str] = {}
        self._around = around
        self._deadline = time.monotonic() + timeout_s
        self._branches: dict[str, _Branch] = {}
        self._heuristics: list[Heuristic] = []
        self._lock = threading.RLock()
        self._leave: Callable[[], None] | None = None

    def enlist(self, resource: Resource[HandleT]) -> HandleT:
        """The resource takes part from now on; gives what to work with, the same at every call.

        Raises TransactionTimedOut, OutOfOrder when the transaction is over, and what ``start`` of the resource raises.
        """
        with self._lock:
            self._expect(Status.ACTIVE)
            if (known := self._branches.get(resource.name)) is not None and known.resource is resource:
                handle: HandleT = known.handle
                return handle
            if known is not None or not self._around.known(resource):
                raise InvalidInput(f"resource {resource.name!r} is not one that the manager was made with: recovery could not reach it")
            if (left_s := self._deadline - time.monotonic()) <= 0:
                self.status = Status.MARKED_ROLLBACK
                raise TransactionTimedOut(f"took longer than {self.timeout_s:g} s", transaction_id=self.id)
            xid = branch(self.gtrid, resource.name)
            try:
                handle = resource.start(xid, timeout_s=left_s)
            except BaseException:
                self.status = Status.MARKED_ROLLBACK
                raise
            crash.point("xa.enlist.after")
            self._branches[resource.name] = _Branch(resource, xid, handle)
            return handle

    def set_rollback_only(self) -> None:
        """Whatever comes, it will not commit."""
        with self._lock:
            self._expect(Status.ACTIVE, Status.MARKED_ROLLBACK)
            self.status = Status.MARKED_ROLLBACK

    def commit(self) -> None:
        """Both phases. Returns when all of it is decided, and done but for what ``unfinished`` names.

        Raises TransactionRolledBack (TransactionTimedOut), TransactionInDoubt, HeuristicOutcome; OutOfOrder when it is over.
        """
        with self._lock:
            self._expect(Status.ACTIVE, Status.MARKED_ROLLBACK)
            try:
                if self.status is Status.MARKED_ROLLBACK:
                    raise TransactionRolledBack("was marked to be rolled back", transaction_id=self.id)
                self.status = Status.COMMITTING
                prepared = self._phase_one()
            except TransactionInDoubt:
                raise
            except TransactionRolledBack:
                self._undo()
                raise
            except Exception as error:
                self._undo()
                raise TransactionRolledBack(f"was rolled back: {error}", transaction_id=self.id, cause=error) from error
            except BaseException:
                if self.status is not Status.IN_DOUBT:
                    self._undo()
                raise
            self._phase_two(prepared)

    def rollback(self) -> None:
        """Undoes everything. Raises HeuristicOutcome where a branch was committed from outside; OutOfOrder when it is over."""
        with self._lock:
            self._expect(Status.ACTIVE, Status.MARKED_ROLLBACK)
            for each in self._branches.values():
                try:
                    each.resource.end(each.xid, success=False)
                except XaError as error:
                    _log.debug("end of %s: %s", each.xid, error)
            self._undo()

    def __enter__(self) -> Self:
        """It is the current transaction of this thread or task."""
        self._leave = self._around.entered(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Commits, or rolls back when an exception passes. What was ended within the block is left as it is."""
        if self._leave is not None:
            self._leave()
        if self.status not in (Status.ACTIVE, Status.MARKED_ROLLBACK):
            return
        if kind is None:
            self.commit()
        else:
            self.rollback()

    async def __aenter__(self) -> Self:
        """It is the current transaction of this task."""
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """As ``__exit__``, in a thread: the event loop goes on."""
        if self._leave is not None:
            self._leave()
            self._leave = None
        await asyncio.shield(asyncio.to_thread(self.__exit__, kind, error, trace))

    def _phase_one(self) -> list[_Branch]:
        """The branches that are prepared. The last one commits at once where no other has anything to commit."""
        branches = list(self._branches.values())
        for each in branches:
            each.resource.end(each.xid, success=True)
        prepared: list[_Branch] = []
        for place, each in enumerate(branches):
            if time.monotonic() > self._deadline:
                raise TransactionTimedOut(f"took longer than {self.timeout_s:g} s", transaction_id=self.id)
            if not prepared and place == len(branches) - 1:
                self._one_phase(each)
            elif self._vote(each) is Vote.YES:
                prepared.append(each)
        if prepared and time.monotonic() > self._deadline:
            raise TransactionTimedOut(f"took longer than {self.timeout_s:g} s", transaction_id=self.id)
        return prepared

    def _vote(self, each: _Branch) -> Vote:
        try:
            crash.point("xa.prepare.before")
            vote = each.resource.prepare(each.xid)
            crash.point("xa.prepare.after")
        except BranchRolledBack:
            del self._branches[each.resource.name]
            raise
        if vote is Vote.READ_ONLY:
            del self._branches[each.resource.name]
        return vote

    def _one_phase(self, each: _Branch) -> None:
        try:
            crash.point("xa.one_phase.before")
            each.resource.commit(each.xid, one_phase=True)
            crash.point("xa.one_phase.after")
        except (BranchRolledBack, ResourceError, UnknownXid):
            del self._branches[each.resource.name]
            raise
        except BranchHeuristic as error:
            heuristic = Heuristic(each.xid, error.xa_code, Outcome.COMMIT, str(error), now_ms())
            self._around.log.record(heuristic)
            self._heuristics.append(heuristic)
        except BaseException as error:
            raise self._doubt(f"may have been committed in {each.resource.name}, the only one that had to commit", error) from error

    def _phase_two(self, prepared: list[_Branch]) -> None:
        if not prepared:
            self._over(Status.COMMITTED)
            return
        around = self._around
        names = tuple(each.resource.name for each in prepared)
        try:
            crash.point("xa.decide.before")
            decision = around.log.decide(Decision(self.gtrid, Outcome.COMMIT, names, now_ms(), around.by))
            crash.point("xa.decide.after")
        except BaseException as error:
            raise self._doubt("is prepared, and its decision may be stored or not", error) from error
        if decision.outcome is Outcome.ROLLBACK:
            self._undo()
            raise TransactionRolledBack(f"was rolled back by {decision.by}, before it could be committed", transaction_id=self.id)
        try:
            for each in prepared:
                self._finish(each, Outcome.COMMIT)
        finally:  # also when the process is told to end: the decision stands, and recovery carries it out
            self._over(Status.COMMITTED, pending=bool(self.unfinished), forget=not self.unfinished)

    def _doubt(self, text: str, error: BaseException) -> BaseException:
        """What to raise; the end of the process is not held up."""
        self._over(Status.IN_DOUBT, pending=True)
        return TransactionInDoubt(f"{text}: {error}", transaction_id=self.id, cause=error) if isinstance(error, Exception) else error

    def _undo(self) -> None:
        self.status = Status.ROLLING_BACK
        try:
            for each in self._branches.values():
                self._finish(each, Outcome.ROLLBACK)
        finally:
            self._over(Status.ROLLED_BACK, pending=bool(self.unfinished))

    def _finish(self, each: _Branch, outcome: Outcome) -> None:
        self.unfinished[each.resource.name] = "not told yet"
        try:
            crash.point("xa.finish.before")
            heuristic = finish(each.resource, each.xid, outcome, self._around.log)
            crash.point("xa.finish.after")
        except BranchRolledBack:
            heuristic = None  # which is what it was to be told
        except Exception as error:
            _log.warning("%s cannot be told to %s: %s", each.xid, outcome, error)
            self.unfinished[each.resource.name] = str(error)
            return
        del self.unfinished[each.resource.name]
        if heuristic is not None:
            self._heuristics.append(heuristic)

    def _over(self, status: Status, *, pending: bool = False, forget: bool = False) -> None:
        self.status = status
        if forget:
            crash.point("xa.forget.before")
            self._around.log.forget([self.gtrid])
        self._around.left(self, pending)
        if bad := [each for each in self._heuristics if split(each)]:
            said = "; ".join(each.text for each in bad)
            raise HeuristicOutcome(f"is {status.value}, except for: {said}", [str(each.xid) for each in bad], transaction_id=self.id)

    def _expect(self, *allowed: Status) -> None:
        if self.status not in allowed:
            raise OutOfOrder(f"transaction {self.id} is {self.status.value}")
