"""What the threads of a worker pool do for one endpoint: its scheduler, its instances, its counts, and its stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from bascule.adapter.inbound.deliveries import DeliveryStep, Phase, RecordDelivery
from bascule.adapter.inbound.endpoint import Endpoint, Instance, name_of
from bascule.adapter.inbound.record import Record
from bascule.adapter.inbound.scheduler import Scheduler
from bascule.adapter.inbound.settling import Late
from bascule.adapter.inbound.spec import ActivationSpec
from bascule.adapter.inbound.worker_pool import PoolThread, WorkerPool
from bascule.core.errors import BasculeError, Scope
from bascule.core.log import get_log

#: A thread that has nothing more to do, but for its endpoint's or its clients' close, ends within this time or is left behind.
END_S = 5.0

_log = get_log("bascule.adapter")


class Hung(BasculeError):
    """An endpoint was at work for too long; its record counts as failed."""

    retriable = True
    scope = Scope.OPERATION


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
    """An endpoint in a worker pool; ``changed`` guards the scheduler and the phases of deliveries."""

    def __init__(
        self, spec: ActivationSpec, endpoint: Endpoint, handle: Handle, counts: Counts, on_failure: Callable[[BaseException], None]
    ) -> None:
        """``on_failure`` is told, in its thread, of an error that ends one of the threads."""
        self.spec = spec
        self.pool = spec.pool or WorkerPool.of_one(spec)
        self.changed = self.pool.changed
        self.scheduler: Scheduler[RecordDelivery] = Scheduler(spec.order)
        self.gone: set[str] = set()
        self._endpoint = endpoint
        self._handle = handle
        self._counts = counts
        self._on_failure = on_failure
        self._stopping = False

    def start(self) -> None:
        """The pool takes its records from now on. Raises InvalidInput if the pool has no thread for the endpoint."""
        self.pool.join(self)

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
            return self.pool.released.wait_for(lambda: not self.scheduler.running(token), drain_s) if drain_s else True

    def settle(self, delivery: RecordDelivery) -> None:
        """Its endpoint has returned. Raises Late where it had been given up before."""
        with self.changed:
            if delivery.phase is not Phase.WORKING:
                raise Late(f"record {delivery.ref.place}, offset {delivery.ref.offset} was given up before its endpoint returned")
            delivery.step(DeliveryStep.RETURNED)

    def stop(self, drain_s: float) -> list[str]:
        """No more is begun. Returns when what is at work is done and its endpoints are closed, and the names of threads left behind.

        Those are at work after ``drain_s``, or in their endpoint's close after that (``END_S`` at least), or hang. A thread of a shared
        pool that is at work for another endpoint closes its instance of this one when it is done with that, and is not waited for.
        """
        until_s = time.monotonic() + drain_s
        pool = self.pool
        with self.changed:
            self._stopping = True
            pool.leave(self)
            # Not the scheduler: of a thread that has failed it may still have the record as running.
            pool.released.wait_for(lambda: all(each.leaves for each in pool.at_work(self)), drain_s)
            at_work = pool.at_work(self)
            for each in at_work:
                if not each.leaves:
                    pool.give_up(each, self)
            pool.released.wait_for(lambda: not pool.closing(self), max(END_S, until_s - time.monotonic()))
            closing, ending = pool.closing(self), pool.ending()
        left = [each.name for each in [*at_work, *closing]]
        threads = [each.thread for each in ending if each not in closing and each.thread is not None]
        return [*left, *left_behind(threads, max(END_S, until_s - time.monotonic()))]

    @property
    def stopping(self) -> bool:
        """Whether no more is begun."""
        return self._stopping

    @property
    def hanging(self) -> list[str]:
        """Names of the threads that are still in an endpoint that was given up."""
        with self.changed:
            return [each.name for each in self.pool.at_work(self) if each.leaves]

    # -- what the pool calls

    def fail(self, error: BaseException) -> None:
        """A thread of the pool has failed."""
        self._on_failure(error)

    def instance(self) -> Instance:
        """An instance of the endpoint, for one thread."""
        return Instance(self._endpoint)

    def handle(self, worker: PoolThread, delivery: RecordDelivery, call: Callable[[Record], None]) -> float | None:
        """When to try a delivery again (monotonic seconds), or None when that is not needed. Raises Late."""
        try:
            return self._handle(delivery, call)
        except Late as error:
            _log.warning(
                "endpoint returned after its timeout, result ignored",
                endpoint=name_of(self._endpoint),
                worker=worker.name,
                error=error,
            )
            raise

    def finished(self, delivery: RecordDelivery, again_s: float | None) -> None:
        """A thread is done with a delivery. Within the lock."""
        delivery.step(DeliveryStep.FINISHED)
        if again_s is None or delivery.ref.token in self.gone:
            self.scheduler.done(delivery)
        else:
            self.scheduler.again(delivery, again_s)
            self.changed.notify()

    def give_up(self, worker: PoolThread) -> None:
        """The record goes to another thread, as a failure. Within the lock."""
        delivery = worker.delivery
        if delivery is None or delivery.phase is not Phase.WORKING or delivery.failure is not None:
            return
        said = f"{name_of(self._endpoint)} has not returned for {self.spec.delivery_timeout_s:g} s in thread {worker.name}"
        _log.error("endpoint hangs", reason=said, place=delivery.ref.place, offset=delivery.ref.offset, stack=worker.stack())
        self._counts.add("hung")
        # The thread keeps the old object, which says to it that it is late.
        delivery.step(DeliveryStep.HANGS)
        failed = RecordDelivery(delivery.ref, delivery.record, delivery.keys, failure=Hung(said))
        self.scheduler.replace(delivery, failed)
        self.pool.give_up(worker, self)


def left_behind(threads: Iterable[threading.Thread], within_s: float) -> list[str]:
    """The names of those that have not ended ``within_s`` from now."""
    until_s = time.monotonic() + within_s
    left = []
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            left.append(thread.name)
    return left
