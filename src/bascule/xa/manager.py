"""The transaction manager: begins transactions, knows the current one, and finishes what a crash or an outage has left.

manager = TransactionManager("shop", FileLog(Path("shop.xalog")), [database, kafka])

with manager, manager.begin(timeout_s=10) as transaction:
    transaction.enlist(database).execute("INSERT INTO payments ...")
    transaction.enlist(kafka).send("receipts", b"...")
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.log import get_log
from bascule.threads.background import in_background
from bascule.threads.lasting import lasting_thread
from bascule.xa.callables import done, is_coroutine_function, refuse_generator
from bascule.xa.current import CurrentTransaction
from bascule.xa.errors import NoTransaction, OutOfOrder, XaError
from bascule.xa.forks import Forks, abandon, register_for_forks
from bascule.xa.log import DecisionLog, LogDamaged
from bascule.xa.plan import Action, own_log
from bascule.xa.propagation import Propagation, TransactionUse
from bascule.xa.reaper import Reaper
from bascule.xa.recovery import Recoverer
from bascule.xa.recovery_protocol import Pass, said_of
from bascule.xa.report import TransactionFinding, TransactionReport
from bascule.xa.resource import Checks, Decides, DeletesLater, Resource
from bascule.xa.retries import Attempts
from bascule.xa.statistics import ManagerStatistics, Statistics
from bascule.xa.transaction import (
    FollowsTransaction,
    HandleT,
    Transaction,
    TransactionEnvironment,
    checked_timeout_s,
    checked_wait_s,
)
from bascule.xa.two_phase import TransactionStatus
from bascule.xa.xid import DECIDERS_MAX, LOG_ID, MANAGER_NAME, RESOURCE_NAME, Xid, manager_of_gtrid, named

#: Default timeout of a transaction, in seconds: long enough for a person, short for a database that keeps locks.
TIMEOUT_S = 60.0
#: Interval, in seconds, at which recovery looks for branches of other processes.
RECOVERY_INTERVAL_S = 30.0
#: Pause, in seconds, before recovery retries a failed step. It doubles with each retry up to the interval.
FIRST_RETRY_S = 0.5
#: Timeout of a resource in background recovery, in seconds, so that a hanging resource does not delay the branches of others.
ANSWER_WITHIN_S = 10.0
#: Timeout of ``close``, in seconds: longer than a recovery pass with one hanging resource, so that ``close`` does not hang.
CLOSE_WITHIN_S = 1.5 * ANSWER_WITHIN_S
#: Number of ended transactions that a manager remembers for ``outcome``, in addition to those in the log.
ENDED_MAX = 10_000
_FINDINGS = {TransactionStatus.COMMITTED: TransactionFinding.COMMITTED, TransactionStatus.ROLLED_BACK: TransactionFinding.ROLLED_BACK}

_log = get_log("bascule.xa")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class TransactionManager:
    """Begins transactions and recovers them. Thread-safe. It opens nothing before ``open`` or ``with``, so a module can hold one."""

    def __init__(
        self,
        name: str,
        log: DecisionLog,
        resources: Collection[Resource[Any]],
        *,
        shared: bool = False,
        timeout_s: float = TIMEOUT_S,
        recovery_interval_s: float = RECOVERY_INTERVAL_S,
        lost_logs: Collection[str] = (),
        parallel: bool = False,
        finish_within_s: float = 0.0,
    ) -> None:
        """``name`` identifies the manager's transactions. It must stay the same after a restart, and be unique among applications.

        ``shared``: several processes with this name work at once, on one log. Recovery then leaves undecided transactions of other
        processes alone until their deadline; otherwise it finishes them at once. Neither can split a transaction.

        Branches of this name that were begun with another decision log are reported and left alone. ``lost_logs`` has the ids of logs that
        are permanently lost: their branches are finished as this log says, with a rollback if it has no decision.

        ``parallel``: all branches prepare at the same time, and those of equal priority commit at the same time. Without it, the last
        branch commits in one phase if no other has written.

        ``finish_within_s``: how many seconds a commit waits for resources that could not be told at once, until recovery has told them.
        """
        self.name = named(MANAGER_NAME, name, "transaction manager")
        self.log = log
        self.resources = {named(RESOURCE_NAME, each.name, "resource"): each for each in resources}
        if len(self.resources) < len(resources):
            raise InvalidInput(f"names of resources must be unique: {', '.join(each.name for each in resources)}")
        self._deciding = [each for each in resources if isinstance(each, Decides)]
        self._by = _this_process()
        self._shared = shared
        self._lost_logs = frozenset(named(LOG_ID, each, "decision log") for each in lost_logs)
        self._log_id = ""
        self._timeout_s = checked_timeout_s(timeout_s)
        self._parallel, self._finish_within_s = parallel, checked_wait_s("finish_within_s", finish_within_s)
        self._untold: weakref.WeakValueDictionary[bytes, Transaction] = weakref.WeakValueDictionary()
        self._interval_s = checked_wait_s("recovery_interval_s", recovery_interval_s)
        self._current = CurrentTransaction(name, [each for each in resources if isinstance(each, FollowsTransaction)])
        self._live: dict[bytes, Transaction] = {}
        self._ended: dict[bytes, TransactionFinding] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._reaper = Reaper()
        self._failures: dict[str, str] = {}  # by thread
        self._statistics = Statistics()

    def open(self) -> Pass:
        """Finish transactions that an earlier process has left, as far as resources answer, and continue that in the background.

        Returns what was found. Raises Unavailable if the log does not answer, UnsafeTopic if the log's topic could lose decisions, and
        Unavailable or InvalidInput for a resource that cannot take part, such as a PostgreSQL without prepared transactions.
        """
        if self._thread is not None:
            raise OutOfOrder(f"transaction manager {self.name} is already open")
        self._closing = threading.Event()
        self._failures = {}
        if len(self.resources) > 1:  # a single resource prepares nothing
            self._check()
        first = self.recoverer().run()
        self._statistics.recovered(first, (), time.monotonic())
        self._log_id = first.log_id
        if not first.finished:
            self.recover_soon()
        recover = functools.partial(self._recover, self._closing)
        self._thread = lasting_thread(recover, f"bascule-xa-{self.name}", on_failure=self._recovery_failed)
        self._thread.start()
        self._reaper = Reaper()
        lasting_thread(self._reaper.run, f"bascule-xa-reaper-{self.name}", on_failure=self._reaper_failed).start()
        register_for_forks(self)
        return first

    def close(self) -> None:
        """Stop the background recovery and close the log. The owner of a resource closes it.

        If resources or the log hang, the recovery thread is left behind after ``CLOSE_WITHIN_S`` to end by itself, and the log stays open.
        """
        if self._thread is not None:
            self._reaper.close()
            self._closing.set()
            self._wake.set()
            self._thread.join(CLOSE_WITHIN_S)
            if self._thread.is_alive():
                _log.warning("recovery thread still running after close", thread=self._thread.name, after_s=CLOSE_WITHIN_S)
            else:
                self.log.close()
            self._thread = None

    def __enter__(self) -> Self:
        """Open the manager."""
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the manager."""
        self.close()

    def begin(self, timeout_s: float | None = None) -> Transaction:
        """Begin a transaction. Use it with ``with`` or ``async with``, which makes it the current transaction, or end it explicitly.

        Raises InvalidInput unless ``timeout_s`` is 0 to 2,147,483 (24 days), and Unavailable if a thread of the manager has failed.
        """
        if self._thread is None:
            raise OutOfOrder(f"transaction manager {self.name} is not open; open it with `with manager:`, which also runs recovery")
        if failures := "; ".join(self._failures.values()):
            raise Unavailable(f"manager {self.name} cannot begin a transaction: {failures}. Close the manager and open it again")
        deciders = [each.name for each in self._deciding if each.decides is not False]
        if deciders and len(self._deciding) > DECIDERS_MAX:  # recovery looks for the code among the names of all of them
            deciders = [each.name for each in self._deciding]
        environment = TransactionEnvironment(
            self.name,
            self.log,
            self._by,
            self._knows,
            self._current.enter,
            self._leave,
            self._log_id,
            deciders,
            self._parallel,
            self._finish_within_s,
        )
        transaction = Transaction(environment, timeout_s if timeout_s is not None else self._timeout_s)
        with self._lock:
            self._live[transaction.gtrid] = transaction
        expire = functools.partial(in_background, transaction.expire, "bascule-xa-expire")
        self._reaper.watch(transaction.gtrid, transaction.deadline_s, expire)
        return transaction

    @property
    def current(self) -> Transaction:
        """The transaction of this thread or task; a task inherits that of the task that has started it.

        Raises NoTransaction, or TransactionTimedOut if the transaction was rolled back at its timeout and its block still runs.
        """
        if (transaction := self._current.running()) is None:
            raise NoTransaction("there is no transaction in this thread or task; begin one with `with manager.begin()`")
        return transaction

    @property
    def entered(self) -> Transaction | None:
        """The transaction whose block this thread or task is in, or None.

        Raises NoTransaction if that transaction has ended within its block, or TransactionTimedOut if its time was over: later work must
        not happen without it. ``with aside()`` works outside of it.
        """
        transaction = self._current.get()
        if transaction is not None:
            transaction.check_open()
        return transaction

    def enlist(self, resource: Resource[HandleT]) -> HandleT:
        """Do the same as ``enlist`` of the current transaction."""
        return self.current.enlist(resource)

    @contextmanager
    def suspended(self) -> Iterator[Transaction]:
        """Suspend the current transaction within the block, so that another can begin."""
        transaction = self.current
        with self.aside():
            yield transaction

    def transactional(
        self,
        *,
        attempts: int = 1,
        timeout_s: float | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        propagation: Propagation = Propagation.REQUIRED,
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
        """Make each call of a function, or coroutine function, part of a transaction: the caller's, or a new one.

        A new transaction that was rolled back is retried, up to ``attempts`` attempts in all, as is one that failed with one of
        ``retry_on`` (for example a database's serialization failure). Any other exception rolls back and passes on. A transaction in doubt
        or with a heuristic outcome is never retried, also of an inner function. A function that fails in its caller's transaction marks
        this transaction for rollback. Raises InvalidInput for a generator function, and at the call if the function returns an awaitable.
        """
        if timeout_s is not None:
            checked_timeout_s(timeout_s)

        def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
            refuse_generator(function)

            @functools.wraps(function)
            def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
                use = self.use_of(propagation)
                if use is not TransactionUse.NEW:
                    with self._used(use):
                        return done(function, function(*args, **kwargs))
                tried = Attempts(function, attempts, retry_on)
                while True:
                    transaction: Transaction | None = None
                    try:
                        with self.aside(), self.begin(timeout_s) as transaction:
                            return done(function, function(*args, **kwargs))
                    except Exception as error:
                        if not tried.retries(error, transaction):
                            raise
                    time.sleep(tried.pause_s)

            @functools.wraps(function)
            async def call_async(*args: _P.args, **kwargs: _P.kwargs) -> Any:
                use = self.use_of(propagation)
                if use is not TransactionUse.NEW:
                    with self._used(use):
                        return await function(*args, **kwargs)  # type: ignore[misc]
                tried = Attempts(function, attempts, retry_on)
                while True:
                    transaction: Transaction | None = None
                    try:
                        with self.aside():
                            async with self.begin(timeout_s) as transaction:
                                return await function(*args, **kwargs)  # type: ignore[misc]
                    except Exception as error:
                        if not tried.retries(error, transaction):
                            raise
                    await asyncio.sleep(tried.pause_s)

            return call_async if is_coroutine_function(function) else call  # type: ignore[return-value]

        return decorate

    def outcome(self, transaction_id: str) -> TransactionReport:
        """Return a report on a transaction, by ``Transaction.id``, ``TransactionError.transaction_id``, or the xid of a branch.

        Changes nothing. Raises Unavailable if the log does not answer, InvalidInput for an id of another manager or decision log.
        """
        gtrid = Xid.parse(transaction_id).gtrid if transaction_id.count(":") == 2 else transaction_id.encode()
        if manager_of_gtrid(gtrid) != self.name:
            raise InvalidInput(f"{transaction_id!r} is not a transaction of manager {self.name!r}")
        found = self.recoverer(ANSWER_WITHIN_S).report(gtrid, self._at_work)
        with self._lock:
            ended = self._ended.get(gtrid)
        return found if ended is None or found.decision is not None else dataclasses.replace(found, finding=ended)

    def statistics(self) -> ManagerStatistics:
        """Return the counts since the manager was created; ``bascule.xa.metrics`` exports them to Prometheus."""
        return self._statistics.snapshot(time.monotonic())

    @property
    def active(self) -> int:
        """The number of active transactions of this process."""
        return len(self._at_work())

    def owns(self, gtrid: bytes) -> bool:
        """Return True if a transaction belongs to this manager, by its name and its decision log. The manager must be open."""
        return manager_of_gtrid(gtrid) == self.name and own_log(gtrid, self._log_id, self._lost_logs)

    def recover_soon(self) -> None:
        """Wake the background recovery."""
        self._wake.set()

    def recoverer(self, answer_within_s: float | None = None) -> Recoverer:
        """Return a Recoverer for one manual look or pass. See Recoverer for ``answer_within_s``."""
        resources = list(self.resources.values())
        return Recoverer(
            self.name,
            self.log,
            resources,
            by=self._by,
            patient=self._shared,
            answer_within_s=answer_within_s,
            lost_logs=self._lost_logs,
        )

    def _check(self) -> None:
        for name, resource in self.resources.items():
            if isinstance(resource, Checks):
                try:
                    resource.check()
                except XaError as error:  # unavailable: its branches are finished when it is back
                    _log.warning("could not check resource", resource=name, error=error)

    def _knows(self, resource: Resource[Any]) -> bool:
        return self.resources.get(resource.name) is resource

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work without a current transaction within the block."""
        take_back = self._current.set_aside()
        try:
            yield
        finally:
            take_back()

    def use_of(self, propagation: Propagation) -> TransactionUse:
        """Return where a function with this propagation runs here. Raises NoTransaction, OutOfOrder, TransactionTimedOut."""
        return self._current.use_of(propagation)

    @contextmanager
    def _used(self, use: TransactionUse) -> Iterator[None]:
        """Run a function that begins no transaction."""
        if use is TransactionUse.OUTSIDE:
            with self.aside():
                yield
            return
        transaction = self.current
        try:
            yield
        except BaseException:
            transaction.give_up()
            raise

    def _leave(self, transaction: Transaction, pending: bool) -> None:
        self._reaper.drop(transaction.gtrid)
        self._statistics.ended(transaction.gtrid, transaction.status, transaction.times_s, pending, time.monotonic())
        with self._lock:
            self._live.pop(transaction.gtrid, None)
            if transaction.unfinished:
                self._untold[transaction.gtrid] = transaction
            if (ended := _FINDINGS.get(transaction.status)) is not None:
                self._remember(transaction.gtrid, ended)
        if pending:
            self.recover_soon()

    def _remember(self, gtrid: bytes, ended: TransactionFinding) -> None:
        self._ended[gtrid] = ended
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _at_work(self) -> set[bytes]:
        with self._lock:
            return set(self._live)

    def _told(self, transactions: Collection[Transaction], done: Pass) -> None:
        """Tell transactions what a pass that began after their end has found, and whether it has left nothing to do for them."""
        heuristics = {each.xid: each for each in done.heuristics}
        waiting = {step.xid for step in done.steps if step.action is Action.WAIT} - heuristics.keys()  # the rest needs an operator
        left = {xid.gtrid for xid in waiting} | {step.xid.gtrid for step in done.failed}
        for each in transactions:
            finished = each.gtrid not in left and not done.unreachable.keys() & each.unfinished.keys()
            if finished:
                with self._lock:
                    self._untold.pop(each.gtrid, None)
            each.told([heuristic for xid, heuristic in heuristics.items() if xid.gtrid == each.gtrid], finished=finished)

    def _reaper_failed(self, error: BaseException) -> None:
        self._failures["reaper"] = f"the thread that ends timed-out transactions failed: {error!r}"

    def after_fork(self) -> None:
        """See Forks. In the child the manager is closed and shares nothing with the parent; ``open`` opens it."""
        abandon(self._live, self._thread, self._reaper, self._lock, self._wake, self._closing)
        self._by = _this_process()
        self._live, self._thread, self._reaper, self._failures = {}, None, Reaper(), {}
        self._untold, self._statistics = weakref.WeakValueDictionary(), Statistics()
        self._lock, self._wake, self._closing = threading.Lock(), threading.Event(), threading.Event()
        self._current.clear()
        for each in (self.log, *self.resources.values()):
            if isinstance(each, Forks):
                each.after_fork()

    def _recovery_failed(self, error: BaseException) -> None:
        self._failures["recovery"] = f"the recovery thread failed: {error!r}"

    def _recover(self, closing: threading.Event) -> None:
        self._recover_until(closing)
        for each in self.resources.values():
            if isinstance(each, DeletesLater):
                each.delete_forgotten()

    def _recover_until(self, closing: threading.Event) -> None:
        recoverer = self.recoverer(ANSWER_WITHIN_S)
        wait_s = self._interval_s
        retry_s = FIRST_RETRY_S
        while not closing.is_set():
            if self._wake.wait(min(wait_s, threading.TIMEOUT_MAX)):
                self._wake.clear()
                retry_s = FIRST_RETRY_S
            if closing.is_set():
                return
            try:
                with self._lock:
                    untold = list(self._untold.values())
                in_doubt = self._statistics.known()
                done = recoverer.run(self._at_work)
                self._statistics.recovered(done, in_doubt, time.monotonic())
                self._told(untold, done)
                finished = done.finished
                self._failures.pop("recovery", None)
                with self._lock:
                    for gtrid in done.committed:
                        self._remember(gtrid, TransactionFinding.COMMITTED)
            except LogDamaged as error:
                self._failures["recovery"] = f"the decision log is damaged: {error}"
                _log.error("recovery stopped, decision log damaged", error=said_of(error))
                finished = False
            except Exception as error:  # if this thread ended, nothing would be recovered any more, and nobody would know
                _log.warning("recovery failed, will retry", error=said_of(error))
                finished = False
            wait_s = self._interval_s if finished else min(retry_s, self._interval_s)
            retry_s = FIRST_RETRY_S if finished else 2 * retry_s


def _this_process() -> str:
    """Return the name of a manager in this process for its decisions. Containers may have the same host name and process ids."""
    return f"{socket.gethostname()}/{os.getpid()}.{secrets.token_hex(4)}"
