"""One global transaction, as its application uses it: in one thread at a time, or in tasks of an event loop."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from bascule.core.effects import run_blocking
from bascule.core.errors import InvalidInput, TransactionRolledBack
from bascule.core.log import get_log
from bascule.threads.loops import in_own_thread
from bascule.xa.blocking import BlockingLog, BlockingParticipant, SystemClock, in_threads, now_ms
from bascule.xa.effects import Participant
from bascule.xa.errors import NoTransaction, OutOfOrder
from bascule.xa.hooks import CompletionHooks
from bascule.xa.log import DecisionLog, Heuristic
from bascule.xa.resource import Resource
from bascule.xa.two_phase import ENDED, TransactionPhase, TransactionStatus, TwoPhase
from bascule.xa.xid import new_gtrid

HandleT = TypeVar("HandleT")
T = TypeVar("T")
_OPEN = (TransactionStatus.ACTIVE, TransactionStatus.MARKED_ROLLBACK)
#: The longest timeout of a transaction, in seconds (24 days): the longest that PostgreSQL has for an idle transaction.
LONGEST_TIMEOUT_S = 2_147_483.0

_log = get_log("bascule.xa")


@dataclass(frozen=True, slots=True)
class TransactionEnvironment:
    """The parts of a manager that a transaction needs."""

    manager: str
    log: DecisionLog
    by: str
    known: Callable[[Resource[Any]], bool]
    entered: Callable[[Transaction], Callable[[], None]]
    #: Called once, at the end, with True if recovery has something left to do.
    left: Callable[[Transaction, bool], None]
    log_id: str = ""
    #: Names of the resources that may have the decision in their own tables.
    deciders: Collection[str] = ()
    #: See TransactionManager.
    parallel: bool = False
    finish_within_s: float = 0.0


class Transaction:
    """A transaction from ``TransactionManager.begin``. It ends with its ``with`` block, or by ``commit`` or ``rollback``."""

    def __init__(self, environment: TransactionEnvironment, timeout_s: float) -> None:
        deadline_ms = now_ms() + int(checked_timeout_s(timeout_s) * 1000)
        self.gtrid = new_gtrid(environment.manager, deadline_ms, environment.log_id, deciders=environment.deciders)
        self.id = self.gtrid.decode()
        self.timeout_s = timeout_s
        self._environment = environment
        at_once = in_threads if environment.parallel else None
        self._protocol = TwoPhase(self.gtrid, timeout_s, BlockingLog(environment.log), SystemClock(), environment.by, at_once=at_once)
        self._resources: dict[str, Resource[Any]] = {}
        self._lock = threading.RLock()
        self._leave: Callable[[], None] | None = None
        self._process = os.getpid()
        self._expired = self._left = False
        self._finished = threading.Event()
        self._hooks = CompletionHooks(self.id)
        self._ended_by: int | None = None  # the thread

    @property
    def status(self) -> TransactionStatus:
        """The state of the transaction."""
        return self._protocol.status

    @property
    def over(self) -> bool:
        """Whether the transaction has ended and its application knows: it has ended the transaction, or left its block after a timeout."""
        return self.status in ENDED and (self._left or not self._expired)

    @property
    def unfinished(self) -> dict[str, str]:
        """After a commit, the resources that could not be told yet, with the reason. Recovery tells them."""
        return self._protocol.unfinished

    @property
    def times_s(self) -> Mapping[TransactionPhase, float]:
        """The duration of each phase, in seconds."""
        return self._protocol.times_s

    @property
    def deadline_s(self) -> float:
        """The deadline on the monotonic clock, in seconds."""
        return self._protocol.deadline_s

    @property
    def enlisted(self) -> Collection[str]:
        """The names of the resources with branches that are not finished, or were not read-only."""
        return self._protocol.enlisted

    def enlist(self, resource: Resource[HandleT]) -> HandleT:
        """Enlist a resource, and return the handle to work with, which is the same for every call.

        Raises TransactionTimedOut, OutOfOrder if the transaction is over, and the errors of the resource's ``start``.
        """
        handle: HandleT = self.enlist_as(resource, BlockingParticipant(resource))
        return handle

    def enlist_as(self, resource: Resource[Any], participant: Participant) -> Any:
        """Do the same as ``enlist``, with a participant that makes the calls on the resource."""
        with self._locked():
            if (known := self._resources.get(resource.name, resource)) is not resource or not self._environment.known(known):
                raise InvalidInput(
                    f"resource {resource.name!r} does not belong to the transaction manager. Pass the resource to the constructor of the "
                    "manager, so that recovery can reach it"
                )
            handle = run_blocking(self._protocol.enlist(participant))
            self._resources[resource.name] = resource
            return handle

    def check_open(self) -> None:
        """Raise TransactionTimedOut, or NoTransaction, if the transaction has ended."""
        if self._expired:
            raise self._protocol.timed_out()
        if self.status in ENDED:
            raise NoTransaction(f"transaction {self.id} is {self.status.value}")

    def set_rollback_only(self) -> None:
        """Mark the transaction so that it can only be rolled back. Raises OutOfOrder, TransactionTimedOut."""
        with self._locked():
            self._protocol.mark()

    def give_up(self) -> None:
        """Do the same as ``set_rollback_only``, unless the transaction has ended."""
        with suppress(OutOfOrder):
            self.set_rollback_only()

    def before_completion(self, hook: Callable[[], object]) -> None:
        """Call ``hook`` before the first phase of a commit. It may still work in the transaction.

        If it raises, the transaction is rolled back.

        Raises OutOfOrder, TransactionTimedOut if the transaction ends or has ended.
        """
        self._check_process()
        if self.status not in _OPEN:
            raise self._refusal()
        self._hooks.add_before(hook)

    def after_completion(self, hook: Callable[[TransactionStatus], object]) -> None:
        """Call ``hook`` with the status after the end of the transaction, however it ends. An error of the hook is logged.

        The thread that ends the transaction calls it. Raises OutOfOrder, TransactionTimedOut if the hooks were called before.
        """
        self._check_process()
        if not self._hooks.add_after(hook):
            raise self._refusal()

    def commit(self) -> None:
        """Run both phases. Return when the transaction is committed, except in the resources in ``unfinished``.

        Raises TransactionRolledBack (TransactionTimedOut), TransactionInDoubt, HeuristicOutcome, and OutOfOrder if the transaction is over.
        """
        self._check_process()
        try:
            self._hooks.call_before(lambda: self.status is TransactionStatus.ACTIVE)
        except BaseException as error:
            self.rollback()
            if not isinstance(error, Exception):
                raise
            text = f"was rolled back: a before_completion hook failed: {error}"
            raise TransactionRolledBack(text, transaction_id=self.id, cause=error) from error
        with self._hooks_after(), self._locked():
            self._end(self._protocol.commit)
        if self.unfinished and self._environment.finish_within_s:
            self.wait_finished(self._environment.finish_within_s)

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait after a commit until recovery has told the resources in ``unfinished``. Return True if all have committed in time.

        Raises HeuristicOutcome if a branch was rolled back from outside, InvalidInput if ``timeout_s`` is negative or not a number.
        """
        finished = self._finished.wait(min(checked_wait_s("timeout_s", timeout_s), threading.TIMEOUT_MAX))
        self._protocol.report_heuristics()
        return finished

    def told(self, heuristics: Collection[Heuristic], *, finished: bool) -> None:
        """Note that recovery has told resources in ``unfinished``, all of them if ``finished``.

        ``heuristics`` were finished from outside.
        """
        known = {each.xid for each in self._protocol.heuristics}
        self._protocol.heuristics += [each for each in heuristics if each.xid not in known]
        if finished:
            self.unfinished.clear()
            self._finished.set()

    def rollback(self) -> None:
        """Roll back all branches. Raises HeuristicOutcome if a branch was committed heuristically, OutOfOrder after the end."""
        self._check_process()
        with self._hooks_after(), self._lock:
            if not self._expired:
                self._end(self._protocol.rollback)

    def expire(self) -> None:
        """Roll back the transaction after its timeout, unless a call of the application is in progress."""
        with self._hooks_after():
            if not self._lock.acquire(blocking=False):
                return
            try:
                if self.status in _OPEN:
                    self._expired = True
                    _log.warning("transaction timed out, rolling back", transaction=self.id, timeout_s=self.timeout_s)
                    self._end(self._protocol.rollback)
            finally:
                self._lock.release()

    def enter(self) -> None:
        """Make this the current transaction of this thread or task. Raises OutOfOrder if there is one."""
        self._leave = self._environment.entered(self)

    def leave(self) -> None:
        """Stop being the current transaction of this thread or task."""
        self._left = True
        if self._leave is not None:
            self._leave()

    def __enter__(self) -> Self:
        """Make this the current transaction of this thread or task. If that raises, the transaction is rolled back."""
        try:
            self.enter()
        except BaseException:
            self.rollback()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Commit, or roll back if an exception passes. A transaction that ended within the block stays as it is."""
        try:
            self.finish(failed=kind is not None)
        finally:
            self.leave()

    async def __aenter__(self) -> Self:
        """Make this the current transaction of this task."""
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Do the same as ``__exit__``, in a thread, so that the event loop continues.

        A cancellation that arrives meanwhile is raised when the transaction has ended; ``status`` has the outcome.
        """
        try:
            await in_own_thread(functools.partial(self.finish, failed=kind is not None), "bascule-xa-finish")
        finally:
            self.leave()

    def finish(self, *, failed: bool) -> None:
        """End the block: commit or roll back, unless that was done within the block."""
        if self._process != os.getpid():
            if not failed:
                self._check_process()
            return
        if self._expired and not failed:
            raise self._protocol.timed_out()
        if self.status not in _OPEN:
            return
        if failed:
            self.rollback()
        else:
            self.commit()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Surround a call of the application. Raises OutOfOrder in a forked child, TransactionTimedOut."""
        self._check_process()
        with self._lock:
            if self._expired:
                raise self._protocol.timed_out()
            yield

    def _check_process(self) -> None:
        """Raise OutOfOrder in the child of a fork. The lock must not be taken there: a thread that only the parent has may hold it."""
        if self._process != os.getpid():
            raise OutOfOrder(f"transaction {self.id} belongs to the parent process {self._process}, which forked this process")

    def _end(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        over = self.status in ENDED
        try:
            run_blocking(call())
        finally:
            if not over and self.status in ENDED:
                self._ended_by = threading.get_ident()
                self._environment.left(self, self._protocol.pending or bool(self._protocol.heuristics))
                if not self._protocol.pending:
                    self._finished.set()

    @contextmanager
    def _hooks_after(self) -> Iterator[None]:
        """Surround code that may end the transaction. The thread that has ended it calls the hooks.

        The hooks are called without the lock of the transaction, because a hook may wait for another thread that needs the lock.
        """
        over = self.status in ENDED
        try:
            yield
        finally:
            if not over and self._ended_by == threading.get_ident():
                self._hooks.call_after(self.status)

    def _refusal(self) -> Exception:
        return self._protocol.timed_out() if self._expired else OutOfOrder(f"transaction {self.id} is {self.status.value}")


def checked_timeout_s(timeout_s: float) -> float:
    """Return the timeout of a transaction, in seconds. Raises InvalidInput."""
    if not 0 <= timeout_s <= LONGEST_TIMEOUT_S:
        raise InvalidInput(f"invalid timeout_s={timeout_s} of a transaction; expected 0 to {LONGEST_TIMEOUT_S:.0f} seconds")
    return timeout_s


def checked_wait_s(name: str, wait_s: float) -> float:
    """Return the value of a parameter that is a number of seconds to wait, or infinity. Raises InvalidInput."""
    if not wait_s >= 0:  # also for "not a number"
        raise InvalidInput(f"invalid {name}={wait_s}; expected 0 or more seconds")
    return wait_s


@runtime_checkable
class FollowsTransaction(Protocol):
    """A resource that is used without a handle: work in a thread or task belongs to the current transaction there.

    The resource enlists itself when the code first uses it.
    """

    def follow(self, transaction: Transaction | None) -> Callable[[], None]:
        """Make ``transaction`` the current one of this thread or task for the resource; None: no current transaction. No IO.

        Returns a function that undoes this in the same thread or task. Raises OutOfOrder if the transaction cannot become current here.
        """
