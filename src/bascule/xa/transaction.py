"""One global transaction, as its application uses it: in one thread at a time, or by tasks of an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from bascule.core.effects import run_blocking
from bascule.core.errors import InvalidInput
from bascule.xa.blocking import BlockingLog, BlockingParticipant, SystemClock, now_ms
from bascule.xa.log import DecisionLog
from bascule.xa.resource import Resource
from bascule.xa.two_phase import ENDED, TransactionStatus, TwoPhase
from bascule.xa.xid import new_gtrid

HandleT = TypeVar("HandleT")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TransactionEnvironment:
    """What a transaction needs of its manager."""

    manager: str
    log: DecisionLog
    by: str
    known: Callable[[Resource[Any]], bool]
    entered: Callable[[Transaction], Callable[[], None]]
    #: Called once, at the end; true when recovery has something left to do.
    left: Callable[[Transaction, bool], None]
    log_id: str = ""


class Transaction:
    """Made by ``TransactionManager.begin``; ends with its ``with`` block, or by ``commit`` or ``rollback``."""

    def __init__(self, environment: TransactionEnvironment, timeout_s: float) -> None:
        self.gtrid = new_gtrid(environment.manager, now_ms() + int(timeout_s * 1000), environment.log_id)
        self.id = self.gtrid.decode()
        self.timeout_s = timeout_s
        self._environment = environment
        self._protocol = TwoPhase(self.gtrid, timeout_s, BlockingLog(environment.log), SystemClock(), environment.by)
        self._resources: dict[str, Resource[Any]] = {}
        self._lock = threading.RLock()
        self._leave: Callable[[], None] | None = None

    @property
    def status(self) -> TransactionStatus:
        """The state of the transaction."""
        return self._protocol.status

    @property
    def unfinished(self) -> dict[str, str]:
        """After a commit, the resources that could not be told yet, and why; recovery tells them."""
        return self._protocol.unfinished

    @property
    def enlisted(self) -> Collection[str]:
        """The names of the resources whose branches are not finished, or were not read-only."""
        return self._protocol.enlisted

    def enlist(self, resource: Resource[HandleT]) -> HandleT:
        """The resource takes part from now on; gives what to work with, the same at every call.

        Raises TransactionTimedOut, OutOfOrder when the transaction is over, and what ``start`` of the resource raises.
        """
        with self._lock:
            if (known := self._resources.get(resource.name, resource)) is not resource or not self._environment.known(known):
                raise InvalidInput(f"resource {resource.name!r} is not one that the manager was made with: recovery could not reach it")
            handle: HandleT = run_blocking(self._protocol.enlist(BlockingParticipant(resource)))
            self._resources[resource.name] = resource
            return handle

    def set_rollback_only(self) -> None:
        """Whatever comes, it will not commit."""
        with self._lock:
            self._protocol.mark()

    def commit(self) -> None:
        """Both phases. Returns when all of it is decided, and done but for what ``unfinished`` names.

        Raises TransactionRolledBack (TransactionTimedOut), TransactionInDoubt, HeuristicOutcome; OutOfOrder when it is over.
        """
        self._end(self._protocol.commit)

    def rollback(self) -> None:
        """Undoes everything. Raises HeuristicOutcome where a branch was committed from outside; OutOfOrder when it is over."""
        self._end(self._protocol.rollback)

    def __enter__(self) -> Self:
        """It is the current transaction of this thread or task."""
        self._leave = self._environment.entered(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Commits, or rolls back when an exception passes. What was ended within the block is left as it is."""
        if self._leave is not None:
            self._leave()
        if self.status not in (TransactionStatus.ACTIVE, TransactionStatus.MARKED_ROLLBACK):
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

    def _end(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with self._lock:
            over = self.status in ENDED
            try:
                run_blocking(call())
            finally:
                if not over and self.status in ENDED:
                    self._environment.left(self, self._protocol.pending)
