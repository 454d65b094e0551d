"""Worker pools: threads that take deliveries from the schedulers of one or several endpoints. A hanging thread is replaced.

pool = WorkerPool(8)
orders = ActivationSpec(topics=("orders",), group="shop.orders", workers=6, pool=pool)
refunds = ActivationSpec(topics=("refunds",), group="shop.refunds", workers=6, pool=pool)

A pool has threads while it has endpoints. Its lock guards the schedulers of all endpoints, and the phases of their deliveries.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from bascule.adapter.inbound.deliveries import DeliveryStep, RecordDelivery
from bascule.adapter.inbound.endpoint import Instance
from bascule.adapter.inbound.record import Record
from bascule.adapter.inbound.settling import Late
from bascule.adapter.inbound.shares import PoolShares
from bascule.adapter.inbound.spec import WORKERS_MAX, ActivationSpec
from bascule.core.errors import InvalidInput
from bascule.core.log import get_log
from bascule.threads.lasting import lasting_thread

if TYPE_CHECKING:
    from bascule.adapter.inbound.workers import Workers

#: Interval, in seconds, at which the pool looks for hanging endpoints.
WATCH_S = 0.25
#: Number of innermost calls of a hanging thread that are logged.
STACK_DEPTH = 6

_log = get_log("bascule.adapter")


@dataclass(slots=True, eq=False)
class PoolThread:
    """A thread of a pool, and the record that it works on. ``made`` are its instances of endpoints."""

    name: str
    thread: threading.Thread | None = None
    member: Workers | None = None
    delivery: RecordDelivery | None = None
    since_s: float = 0.0
    made: dict[Workers, Instance] = field(default_factory=dict)
    #: Set if the thread takes no more records: its endpoint was given up, or the pool has no endpoint.
    leaves: bool = False

    def stack(self) -> str:
        """Return the innermost calls of the thread as text."""
        frame = sys._current_frames().get(self.thread.ident) if self.thread is not None and self.thread.ident is not None else None
        return "".join(traceback.format_list(traceback.extract_stack(frame)[-STACK_DEPTH:])) if frame is not None else "(no stack)\n"


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The status of a pool: its busy threads, its hanging threads, and the groups of its endpoints."""

    name: str
    threads: int
    at_work: int
    hanging: int
    groups: tuple[str, ...]


class WorkerPool:
    """Threads for the endpoints that name the pool in their ``ActivationSpec``. Thread-safe; a module can hold one."""

    def __init__(self, threads: int, name: str = "shared") -> None:
        """``threads`` is the maximum of endpoint calls at once; the pool needs at least one for each endpoint. Raises InvalidInput."""
        if not 1 <= threads <= WORKERS_MAX:
            raise InvalidInput(f"threads={threads!r} is out of range; must be 1 to {WORKERS_MAX}")
        self.name = name
        lock = threading.RLock()
        # Only threads of the pool wait for it: each notification is for one of them.
        self.changed = threading.Condition(lock)
        #: Notified when a thread's work has ended or an endpoint is closed. Threads of the pool do not wait for it.
        self.released = threading.Condition(lock)
        self.shares: PoolShares[Workers] = PoolShares(threads)
        self._threads: list[PoolThread] = []
        self._numbers = itertools.count(1)
        self._of_thread, self._of_watch = f"bascule-pool-{name}", f"bascule-watch-pool-{name}"
        self._watched = threading.Event()
        self._watched.set()

    @classmethod
    def of_one(cls, spec: ActivationSpec) -> WorkerPool:
        """Return the pool of an endpoint that shares none."""
        pool = cls(spec.workers, spec.group)
        pool._of_thread, pool._of_watch = f"bascule-inbound-{spec.group}", f"bascule-watch-{spec.group}"
        return pool

    def status(self) -> PoolStatus:
        """Return the current status."""
        with self.changed:
            shares = self.shares
            groups = tuple(sorted(member.spec.group for member in shares.members))
            return PoolStatus(self.name, shares.threads, shares.at_work, shares.hanging, groups)

    # -- called by endpoints

    def join(self, member: Workers) -> None:
        """Let an endpoint take records. Raises InvalidInput if there is no thread for it."""
        with self.changed:
            self.shares.join(member, member.spec.workers)
            self._fill()
            if self._watched.is_set():
                self._watched = threading.Event()
                watch = partial(self._watch, self._watched)
                lasting_thread(watch, self._of_watch, on_failure=self._fail).start()

    def leave(self, member: Workers) -> None:
        """Let an endpoint take no more records. Call this with the lock held."""
        self.shares.leave(member)
        if not self.shares.members:
            self._watched.set()
        self.changed.notify_all()

    def at_work(self, member: Workers) -> list[PoolThread]:
        """Return the threads that have a record of an endpoint, including hanging ones. Call this with the lock held."""
        return [each for each in self._threads if each.member is member and each.delivery is not None]

    def closing(self, member: Workers) -> list[PoolThread]:
        """Return the idle threads that must close an instance of an endpoint. Call this with the lock held."""
        return [each for each in self._threads if member in each.made and each.delivery is None]

    def ending(self) -> list[PoolThread]:
        """Return the threads that only have to end. Call this with the lock held."""
        return [] if self.shares.members else [each for each in self._threads if each.delivery is None]

    def give_up(self, worker: PoolThread, member: Workers) -> None:
        """Give up a hanging thread: it ends when its endpoint returns, and others do its work. Call this with the lock held."""
        worker.leaves = True
        self.shares.hang(member)
        self._fill()
        self.changed.notify()
        self.released.notify_all()

    # -- the threads of the pool

    def _fail(self, error: BaseException) -> None:
        """Stop all endpoints of the pool after one of its threads has failed."""
        with self.changed:
            members = self.shares.members
        for each in members:
            each.fail(error)

    def _fill(self) -> None:
        while self.shares.members and sum(not each.leaves for each in self._threads) < self.shares.wanted:
            worker = PoolThread(f"{self._of_thread}-{next(self._numbers)}")
            self._threads.append(worker)
            worker.thread = lasting_thread(partial(self._work, worker), worker.name, on_failure=self._fail)
            worker.thread.start()

    def _work(self, worker: PoolThread) -> None:
        try:
            while (step := self._next(worker)) is not None:
                step()
        except Late:
            pass  # the warning was logged
        finally:
            for instance in worker.made.values():
                instance.close()
            with self.changed:
                self._ended(worker)

    def _next(self, worker: PoolThread) -> Callable[[], None] | None:
        """Return what a thread does next, or None if it ends."""
        with self.changed:
            while not worker.leaves:
                if stopped := [member for member in worker.made if member.stopping]:
                    return partial(self._close, worker, stopped)
                if not self.shares.members:
                    worker.leaves = True
                    break
                now_s = time.monotonic()
                candidates = self.shares.candidates()
                for member in candidates:
                    if (delivery := member.scheduler.take(now_s)) is not None:
                        self._take(worker, member, delivery, now_s)
                        return partial(self._deliver, worker, member, delivery)
                due_s = min((due for member in candidates if (due := member.scheduler.next_due_s()) is not None), default=None)
                self.changed.wait(None if due_s is None else due_s - now_s)
            return None

    def _take(self, worker: PoolThread, member: Workers, delivery: RecordDelivery, now_s: float) -> None:
        delivery.step(DeliveryStep.TAKEN)
        worker.member, worker.delivery, worker.since_s = member, delivery, now_s
        self.shares.take(member)
        if any(each.scheduler.waiting for each in self.shares.members):  # another thread must know when the next delivery is due
            self.changed.notify()

    def _deliver(self, worker: PoolThread, member: Workers, delivery: RecordDelivery) -> None:
        def call(record: Record) -> None:
            if member not in worker.made:
                worker.made[member] = member.instance()
            worker.made[member](record)

        again_s = member.handle(worker, delivery, call)
        with self.changed:
            worker.delivery = None
            if not worker.leaves:
                worker.member = None
                self.shares.give_back(member)
            member.finished(delivery, again_s)
            self.released.notify_all()

    def _close(self, worker: PoolThread, stopped: list[Workers]) -> None:
        for member in stopped:
            worker.made[member].close()
        with self.changed:
            for member in stopped:
                del worker.made[member]
            self.released.notify_all()

    def _ended(self, worker: PoolThread) -> None:
        """Remove a thread that has ended. If its endpoint was given up, other threads may take records of that endpoint again."""
        self._threads.remove(worker)
        worker.made.clear()
        if (member := worker.member) is not None:
            worker.member = worker.delivery = None
            (self.shares.end if worker.leaves else self.shares.give_back)(member)
        self._fill()
        self.changed.notify()
        self.released.notify_all()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(WATCH_S):
            with self.changed:
                now_s = time.monotonic()
                for worker in [each for each in self._threads if each.delivery is not None and not each.leaves]:
                    if worker.member is not None and worker.since_s < now_s - worker.member.spec.delivery_timeout_s:
                        worker.member.give_up(worker)
