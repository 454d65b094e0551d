"""The worker pool: so many threads take what the scheduler gives. One whose endpoint hangs is replaced."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial

from bascule.adapter.inbound.deliveries import DeliveryStep, Phase, RecordDelivery
from bascule.adapter.inbound.endpoint import Endpoint, Instance, name_of
from bascule.adapter.inbound.record import Record
from bascule.adapter.inbound.scheduler import Scheduler
from bascule.adapter.inbound.settling import Late
from bascule.adapter.inbound.spec import ActivationSpec
from bascule.core.errors import BasculeError, Scope
from bascule.core.log import get_log
from bascule.threads.lasting import lasting_thread

#: Hanging endpoints are looked for so often.
WATCH_S = 0.25
#: A thread that has nothing more to do, but for its endpoint's or its clients' close, ends within this time or is left behind.
END_S = 5.0
#: How much of a hanging thread's stack is logged: the innermost calls.
STACK_DEPTH = 6

_log = get_log("bascule.adapter")


class Hung(BasculeError):
    """An endpoint was at work for too long; its record counts as failed."""

    retriable = True
    scope = Scope.OPERATION


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    thread: threading.Thread | None = None
    delivery: RecordDelivery | None = None
    since_s: float = 0.0


@dataclass(slots=True)
class Counts:
    """Since the activation."""

    delivered: int = 0
    failed: int = 0
    retried: int = 0
    dead_lettered: int = 0
    hung: int = 0
    superseded: int = 0
    vanished: int = 0
    redelivered: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, count: int = 1) -> None:
        """Safe for threads."""
        with self._lock:
            setattr(self, name, getattr(self, name) + count)

    def by_name(self) -> dict[str, int]:
        """As they stand."""
        return {each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("_")}


#: Handles a delivery by means of an endpoint; gives when to try it again (monotonic seconds), or None when that is not needed.
Handle = Callable[[RecordDelivery, Callable[[Record], None]], float | None]


class Workers:
    """Threads, and the scheduler that they share; ``changed`` guards the scheduler and the phases of deliveries."""

    def __init__(
        self, spec: ActivationSpec, endpoint: Endpoint, handle: Handle, counts: Counts, on_failure: Callable[[BaseException], None]
    ) -> None:
        """``on_failure`` is told, in its thread, of an error that ends one of the threads."""
        lock = threading.RLock()
        # Only workers wait for it: each of its notifications is for one of them.
        self.changed = threading.Condition(lock)
        #: Somebody is at work no more: few wait for it, and not the workers.
        self._released = threading.Condition(lock)
        self.scheduler: Scheduler[RecordDelivery] = Scheduler(spec.order)
        self.gone: set[str] = set()
        self._spec = spec
        self._endpoint = endpoint
        self._handle = handle
        self._counts = counts
        self._on_failure = on_failure
        self._numbers = itertools.count(1)
        self._workers: list[_Worker] = []
        #: Threads that are still in an endpoint that was given up.
        self._lost: list[_Worker] = []
        self._stopping = False
        self._ended = threading.Event()

    def start(self) -> None:
        """All of them, and the watch."""
        with self.changed:
            for _ in range(self._spec.workers):
                self._add()
        lasting_thread(self._watch, f"bascule-watch-{self._spec.group}", on_failure=self._on_failure).start()

    def add(self, deliveries: list[RecordDelivery]) -> None:
        """They are to be delivered."""
        with self.changed:
            for delivery in deliveries:
                self.scheduler.add(delivery, delivery.due_s)
            self.changed.notify(len(deliveries))

    def drop(self, token: str, drain_s: float = 0.0) -> bool:
        """What an owner's token stood for is not to be delivered any more; false when some of it is still at work after ``drain_s``."""
        with self.changed:
            self.gone.add(token)
            self.scheduler.drop(token)
            # What others have behind it in its lane is ready now, and who sleeps does so until it would have been due.
            self.changed.notify_all()
            return self._released.wait_for(lambda: not self.scheduler.running(token), drain_s) if drain_s else True

    def settle(self, delivery: RecordDelivery) -> None:
        """Its endpoint has returned. Raises Late where it had been given up before."""
        with self.changed:
            if delivery.phase is not Phase.WORKING:
                raise Late(f"{delivery.ref.place}, offset {delivery.ref.offset} was given up before")
            delivery.step(DeliveryStep.RETURNED)

    def stop(self, drain_s: float) -> list[str]:
        """No more is begun. Returns when what is at work is done and its endpoints are closed, and the names of workers left behind.

        Those are at work after ``drain_s``, or in their endpoint's close after that (``END_S`` at least), or hang.
        """
        until_s = time.monotonic() + drain_s
        with self.changed:
            self._stopping = True
            self._ended.set()
            self.changed.notify_all()
            self._released.wait_for(lambda: not self.scheduler.running(), drain_s)
            left = [each.name for each in [*self._workers, *self._lost] if each.delivery is not None]
            threads = [each.thread for each in self._workers if each.delivery is None and each.thread is not None]
        return [*left, *left_behind(threads, max(END_S, until_s - time.monotonic()))]

    @property
    def stopping(self) -> bool:
        """Whether no more is begun."""
        return self._stopping

    @property
    def hanging(self) -> list[str]:
        """Names of the threads that are still in an endpoint that was given up."""
        return [each.name for each in self._lost]

    def _add(self) -> None:
        worker = _Worker(f"bascule-inbound-{self._spec.group}-{next(self._numbers)}")
        self._workers.append(worker)
        worker.thread = lasting_thread(partial(self._work, worker), worker.name, on_failure=self._on_failure)
        worker.thread.start()

    def _work(self, worker: _Worker) -> None:
        made: list[Instance] = []

        def call(record: Record) -> None:
            if not made:
                made.append(Instance(self._endpoint))
            made[0](record)

        try:
            while (delivery := self._next(worker)) is not None:
                try:
                    again_s = self._handle(delivery, call)
                except Late as error:
                    _log.warning(
                        "endpoint returned too late, nothing of it counts",
                        endpoint=name_of(self._endpoint),
                        worker=worker.name,
                        error=error,
                    )
                    break
                self._finished(worker, delivery, again_s)
        finally:
            for instance in made:
                instance.close()
            with self.changed:
                for workers in (self._workers, self._lost):
                    if worker in workers:
                        workers.remove(worker)
                if not self._stopping and len(self._workers) < self._spec.workers:
                    self._add()

    def _next(self, worker: _Worker) -> RecordDelivery | None:
        with self.changed:
            while not self._stopping:
                now_s = time.monotonic()
                if (delivery := self.scheduler.take(now_s)) is not None:
                    delivery.step(DeliveryStep.TAKEN)
                    worker.delivery, worker.since_s = delivery, now_s
                    if self.scheduler.waiting:  # somebody else has to know when the next one is due
                        self.changed.notify()
                    return delivery
                due_s = self.scheduler.next_due_s()
                self.changed.wait(None if due_s is None else due_s - now_s)
            return None

    def _finished(self, worker: _Worker, delivery: RecordDelivery, again_s: float | None) -> None:
        with self.changed:
            worker.delivery = None
            delivery.step(DeliveryStep.FINISHED)
            if again_s is None or delivery.ref.token in self.gone:
                self.scheduler.done(delivery)
            else:
                self.scheduler.again(delivery, again_s)
                self.changed.notify()
            self._released.notify_all()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            with self.changed:
                overdue_s = time.monotonic() - self._spec.delivery_timeout_s
                for worker in [each for each in self._workers if each.delivery is not None and each.since_s < overdue_s]:
                    self._give_up(worker)

    def _give_up(self, worker: _Worker) -> None:
        """The record goes to another worker, as a failure; the thread is replaced while no more of them hang than there are workers."""
        delivery = worker.delivery
        if delivery is None or delivery.phase is not Phase.WORKING or delivery.failure is not None:
            return
        said = f"{name_of(self._endpoint)} hangs since {self._spec.delivery_timeout_s:g} s in {worker.name}"
        _log.error("endpoint hangs", reason=said, place=delivery.ref.place, offset=delivery.ref.offset, stack=_stack(worker.thread))
        self._counts.add("hung")
        # The thread keeps the old object, which says to it that it is late.
        delivery.step(DeliveryStep.HANGS)
        failed = RecordDelivery(delivery.ref, delivery.record, delivery.keys, failure=Hung(said))
        self.scheduler.replace(delivery, failed)
        self._workers.remove(worker)
        self._lost.append(worker)
        if len(self._lost) <= self._spec.workers:
            self._add()
        self.changed.notify()
        self._released.notify_all()


def left_behind(threads: Iterable[threading.Thread], within_s: float) -> list[str]:
    """The names of those that have not ended ``within_s`` from now."""
    until_s = time.monotonic() + within_s
    left = []
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            left.append(thread.name)
    return left


def _stack(thread: threading.Thread | None) -> str:
    frame = sys._current_frames().get(thread.ident) if thread is not None and thread.ident is not None else None
    return "".join(traceback.format_list(traceback.extract_stack(frame)[-STACK_DEPTH:])) if frame is not None else "(no stack)\n"
