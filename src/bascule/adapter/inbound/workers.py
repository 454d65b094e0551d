"""The side of a worker pool that belongs to one endpoint: its scheduler, instances, counts, and stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Final

from bascule.adapter.inbound.deliveries import DeliveryStep, Phase, RecordDelivery
from bascule.adapter.inbound.endpoint import Endpoint, Instance, name_of
from bascule.adapter.inbound.record import Record
from bascule.adapter.inbound.scheduler import Scheduler
from bascule.adapter.inbound.settling import Late
from bascule.adapter.inbound.spec import ActivationSpec
from bascule.adapter.inbound.worker_pool import PoolThread, WorkerPool
from bascule.core.durations import Durations
from bascule.core.errors import BasculeError, Scope
from bascule.core.log import get_log
from bascule.writer.carried import BOUNDS_S

#: A thread that only has to close its endpoint or clients ends within this time, in seconds, or is left behind.
END_S = 5.0
#: Upper bounds, in seconds, of the histogram of calls: from an endpoint that only computes to one that is near its timeout.
HANDLER_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
NOTHING_HANDLED: Final = Durations.none(HANDLER_BOUNDS_S)
#: The latency has the bounds of pipelines: a record may have waited for days.
NO_LATENCY: Final = Durations.none(BOUNDS_S)

_log = get_log("bascule.adapter")


class Hung(BasculeError):
    """Raised for a record whose endpoint ran for too long. The record counts as failed."""

    retriable = True
    scope = Scope.OPERATION


@dataclass(slots=True)
class Counts:
    """Counts since the activation."""

    delivered: int = 0
    failed: int = 0
    retried: int = 0
    dead_lettered: int = 0
    hung: int = 0
    superseded: int = 0
    vanished: int = 0
    redelivered: int = 0
    _handler: Durations = NOTHING_HANDLED
    _latency: Durations = NO_LATENCY
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, count: int = 1) -> None:
        """Add to a count. Thread-safe."""
        with self._lock:
            setattr(self, name, getattr(self, name) + count)

    @property
    def handler(self) -> Durations:
        """Return how long the calls of the endpoint took, also those that failed or were given up."""
        return self._handler

    @property
    def latency(self) -> Durations:
        """Return the times from the timestamps of records until the records were handled."""
        return self._latency

    def arrived(self, timestamp_ms: int) -> None:
        """Note that a record with this timestamp is handled now. Thread-safe."""
        if timestamp_ms > 0:
            latency_s = max(0.0, time.time() - timestamp_ms / 1000)
            with self._lock:
                self._latency = self._latency.with_these((latency_s,))

    def timed(self, call: Callable[[Record], None]) -> Callable[[Record], None]:
        """Return a call of the endpoint that adds its duration. Thread-safe."""

        def timed(record: Record) -> None:
            begun_s = time.monotonic()
            try:
                call(record)
            finally:
                with self._lock:
                    self._handler = self._handler.with_these((time.monotonic() - begun_s,))

        return timed

    def by_name(self) -> dict[str, int]:
        """Return the current counts by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("_")}


#: Handles a delivery with an endpoint. Returns when to try it again (monotonic seconds), or None.
Handle = Callable[[RecordDelivery, Callable[[Record], None]], float | None]


class Workers:
    """An endpoint in a worker pool. ``changed`` guards the scheduler and the phases of deliveries."""

    def __init__(
        self, spec: ActivationSpec, endpoint: Endpoint, handle: Handle, counts: Counts, on_failure: Callable[[BaseException], None]
    ) -> None:
        """``on_failure`` is called, in the failed thread, with an error that ends one of the threads."""
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
        """Let the pool take records of the endpoint. Raises InvalidInput if the pool has no thread for it."""
        self.pool.join(self)

    def add(self, deliveries: list[RecordDelivery]) -> None:
        """Schedule deliveries."""
        with self.changed:
            for delivery in deliveries:
                self.scheduler.add(delivery, delivery.due_s)
            self.changed.notify(len(deliveries))

    def drop(self, token: str, drain_s: float = 0.0) -> bool:
        """Drop the deliveries of an owner's token. Return False if some of them are still in progress after ``drain_s`` seconds."""
        with self.changed:
            self.gone.add(token)
            self.scheduler.drop(token)
            # Deliveries of other tokens behind the dropped ones may be ready now: wake sleeping threads.
            self.changed.notify_all()
            return self.pool.released.wait_for(lambda: not self.scheduler.running(token), drain_s) if drain_s else True

    def settle(self, delivery: RecordDelivery) -> None:
        """Note that the endpoint has returned. Raises Late if it was given up before."""
        with self.changed:
            if delivery.phase is not Phase.WORKING:
                raise Late(f"record {delivery.ref.place}, offset {delivery.ref.offset} was handled as failed before its endpoint returned")
            delivery.step(DeliveryStep.RETURNED)

    def stop(self, drain_s: float) -> list[str]:
        """Begin no more deliveries, wait for those in progress, and close the endpoints. Return the names of threads left behind.

        These threads are busy after ``drain_s`` seconds, or in the close of their endpoint after that (``END_S`` at least), or hang. A
        thread of a shared pool that works for another endpoint closes its instance of this endpoint afterwards, and is not waited for.
        """
        until_s = time.monotonic() + drain_s
        pool = self.pool
        with self.changed:
            self._stopping = True
            pool.leave(self)
            # Not the scheduler: it may still list the record of a thread that has failed.
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
        """Return True if no more deliveries are begun."""
        return self._stopping

    @property
    def hanging(self) -> list[str]:
        """Return the names of the threads that are still in an endpoint that was given up."""
        with self.changed:
            return [each.name for each in self.pool.at_work(self) if each.leaves]

    # -- called by the pool

    def fail(self, error: BaseException) -> None:
        """Report that a thread of the pool has failed."""
        self._on_failure(error)

    def instance(self) -> Instance:
        """Return an instance of the endpoint for one thread."""
        return Instance(self._endpoint)

    def handle(self, worker: PoolThread, delivery: RecordDelivery, call: Callable[[Record], None]) -> float | None:
        """Return when to try a delivery again (monotonic seconds), or None. Raises Late."""
        try:
            return self._handle(delivery, self._counts.timed(call))
        except Late as error:
            _log.warning(
                "endpoint returned after its timeout, result ignored",
                endpoint=name_of(self._endpoint),
                worker=worker.name,
                error=error,
            )
            raise

    def finished(self, delivery: RecordDelivery, again_s: float | None) -> None:
        """Note that a thread is done with a delivery. Call this with the lock held."""
        delivery.step(DeliveryStep.FINISHED)
        if again_s is None or delivery.ref.token in self.gone:
            self.scheduler.done(delivery)
        else:
            self.scheduler.again(delivery, again_s)
            self.changed.notify()

    def give_up(self, worker: PoolThread) -> None:
        """Pass the record of a hanging thread to another thread, as a failure. Call this with the lock held."""
        delivery = worker.delivery
        if delivery is None or delivery.phase is not Phase.WORKING or delivery.failure is not None:
            return
        said = f"{name_of(self._endpoint)} has not returned for {self.spec.delivery_timeout_s:g} s in thread {worker.name}"
        _log.error("endpoint hangs", reason=said, place=delivery.ref.place, offset=delivery.ref.offset, stack=worker.stack())
        self._counts.add("hung")
        # The thread keeps the old object, whose phase tells it that it is late.
        delivery.step(DeliveryStep.HANGS)
        failed = RecordDelivery(delivery.ref, delivery.record, delivery.keys, failure=Hung(said))
        self.scheduler.replace(delivery, failed)
        self.pool.give_up(worker, self)


def left_behind(threads: Iterable[threading.Thread], within_s: float) -> list[str]:
    """Return the names of the threads that have not ended after ``within_s`` seconds."""
    until_s = time.monotonic() + within_s
    left = []
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            left.append(thread.name)
    return left
