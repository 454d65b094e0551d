"""A worker pool that endpoints share: bounded, fair, intact when an endpoint hangs or stops, and ended with the last endpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from bascule.adapter.inbound import ActivationSpec, Record, WorkerPool, worker_pool
from bascule.adapter.inbound.deliveries import RecordDelivery
from bascule.adapter.inbound.endpoint import Endpoint
from bascule.adapter.inbound.state import Place, Ref
from bascule.adapter.inbound.workers import Counts, Workers
from bascule.core.errors import InvalidInput
from bascule.threads.background import in_background
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

LONG_S = 30.0 * SLOWNESS
PLACE = Place("topic", 0)


class Held:
    """An endpoint that holds its records until the test releases them."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.most = 0
        self._at_work = 0
        self._released = threading.Semaphore(0)
        self._counting = threading.Lock()

    def __call__(self, record: Record) -> None:
        with self._counting:
            self.begun.append(record.offset)
            self._at_work += 1
            self.most = max(self.most, self._at_work)
        assert self._released.acquire(timeout=2 * LONG_S)
        with self._counting:
            self._at_work -= 1

    def release(self, count: int = 1) -> None:
        self._released.release(count)

    def await_begun(self, count: int) -> None:
        wait_for(lambda: len(self.begun) >= count, lambda: f"{count} records to be begun, of which {len(self.begun)} are")


class Member:
    """An endpoint that uses a pool."""

    def __init__(self, pool: WorkerPool | None, group: str, endpoint: Endpoint, *, workers: int = 8, timeout_s: float = LONG_S) -> None:
        spec = ActivationSpec(topics=("topic",), group=group, workers=workers, pool=pool, delivery_timeout_s=timeout_s)
        self.failures: list[BaseException] = []
        self.counts = Counts()
        self.workers = Workers(spec, endpoint, self._handle, self.counts, self.failures.append)
        self._offsets = iter(range(10_000))

    def _handle(self, delivery: RecordDelivery, call: Callable[[Record], None]) -> None:
        if delivery.failure is None:
            call(delivery.record)
            self.workers.settle(delivery)
            self.counts.add("delivered")

    def add(self, count: int, delay_s: float = 0.0) -> None:
        due_s = time.monotonic() + delay_s if delay_s else 0.0
        offsets = [next(self._offsets) for _ in range(count)]
        self.workers.add([RecordDelivery(Ref(PLACE, "t", each), Record(*PLACE, each, None, None), (), due_s) for each in offsets])

    def delivered(self, count: int) -> None:
        wait_for(lambda: self.counts.delivered >= count, f"{count} records to be delivered")


@contextmanager
def at_work(*members: Member) -> Iterator[None]:
    for each in members:
        each.workers.start()
    try:
        yield
    finally:
        stops = [in_background(partial(each.workers.stop, LONG_S), "test-stop") for each in members]
        for stop in stops:
            stop.result(2 * LONG_S)


def threads_of(name: str) -> list[str]:
    return sorted(each.name for each in threading.enumerate() if name in each.name)


def test_slow_endpoint_leaves_thread_to_other_endpoint_and_thread_count_is_bounded() -> None:
    pool = WorkerPool(4, "fair")
    slow, quick = Held(), Held()
    one, two = Member(pool, "slow", slow), Member(pool, "quick", quick)
    with at_work(one, two):
        one.add(20)
        slow.await_begun(3)
        for number in range(1, 6):
            two.add(1)
            quick.await_begun(number)  # although no record of the slow endpoint has ended
            quick.release()
            two.delivered(number)
        assert (len(slow.begun), slow.most) == (3, 3)
        two.add(20)
        quick.await_begun(6)
        slow.release()
        quick.await_begun(7)  # a free thread goes to the endpoint with the fewest threads
        assert pool.status() == worker_pool.PoolStatus("fair", 4, 4, 0, ("quick", "slow"))
        assert len(threads_of("bascule-pool-fair")) == 4
        for held in (slow, quick):
            held.release(40)
        one.delivered(20)
        two.delivered(25)
    assert slow.most <= 4
    assert pool.status() == worker_pool.PoolStatus("fair", 4, 0, 0, ())
    wait_for(lambda: threads_of("pool-fair") == [], "the end of the threads")


def test_endpoint_uses_at_most_its_worker_count() -> None:
    pool = WorkerPool(4)
    held = Held()
    one, two = Member(pool, "one", held, workers=2), Member(pool, "two", lambda _: None)
    with at_work(one, two):
        one.add(10)
        two.add(100)
        two.delivered(100)
        assert (held.most, len(held.begun)) == (2, 2)
        held.release(10)
        one.delivered(10)


def test_delayed_records_start_on_time_while_other_endpoint_is_busy() -> None:
    pool = WorkerPool(2)
    held = Held()
    busy, later = Member(pool, "busy", held), Member(pool, "later", lambda _: None)
    with at_work(busy, later):
        later.add(3, 0.2)
        busy.add(5)
        held.await_begun(1)
        later.delivered(3)
        held.release(5)
        busy.delivered(5)


def test_hanging_endpoint_threads_are_replaced_and_other_endpoint_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "WATCH_S", 0.01)
    pool = WorkerPool(2, "hung")
    hanging = Held()
    bad, good = Member(pool, "bad", hanging, workers=1, timeout_s=0.05), Member(pool, "good", lambda _: None)
    with at_work(bad, good):
        bad.add(5)
        wait_for(lambda: bad.counts.hung == 2, "two threads to hang, of which one is replaced")
        good.add(100)
        good.delivered(100)
        assert len(bad.workers.hanging) == 2
        assert (pool.status().hanging, len(threads_of("bascule-pool-hung"))) == (2, 3)
        assert len(hanging.begun) == 2  # the endpoint gets no thread before a hanging thread returns
        hanging.release(5)
        wait_for(lambda: len(hanging.begun) == 5, "the other records to be begun")
        bad.delivered(3)
    assert (bad.failures, good.failures) == ([], [])
    wait_for(lambda: threads_of("pool-hung") == [], "the end of the threads")


class Closing:
    """An endpoint that records the threads in which its instances are made and closed."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.closed: list[str] = []
        self.act: Callable[[Record], None] = lambda _: None

    def endpoint(self) -> type:
        seen = self

        class Instance:
            def __init__(self) -> None:
                self.thread = threading.current_thread().name
                seen.made.append(self.thread)

            def on_record(self, record: Record) -> None:
                assert threading.current_thread().name == self.thread
                seen.act(record)

            def close(self) -> None:
                assert threading.current_thread().name == self.thread
                seen.closed.append(self.thread)

        return Instance


def test_instances_of_stopped_endpoint_are_closed_while_pool_continues() -> None:
    pool = WorkerPool(2)
    first, second = Closing(), Closing()
    one, two = Member(pool, "one", first.endpoint()), Member(pool, "two", second.endpoint())
    with at_work(two):
        one.workers.start()
        one.add(6)
        one.delivered(6)
        assert one.workers.stop(LONG_S) == []
        assert sorted(first.closed) == sorted(first.made) != []
        one.add(1)  # no thread takes records of a stopped endpoint
        two.add(10)
        two.delivered(10)
        assert pool.status().groups == ("two",)
    assert sorted(second.closed) == sorted(second.made) != []
    assert one.counts.delivered == 6


def test_stop_names_running_thread_and_pool_replaces_it() -> None:
    pool = WorkerPool(2, "replacing")
    held, also = Held(), Held()
    one, two, three = Member(pool, "one", held), Member(pool, "two", lambda _: None), Member(pool, "three", also)
    with at_work(two):
        one.workers.start()
        one.add(1)
        held.await_begun(1)
        (left,) = one.workers.stop(0.05)
        assert left.startswith("bascule-pool-replacing-")
        with at_work(three):  # the pool has a thread for the third endpoint, although the abandoned thread is busy
            three.add(1)
            also.await_begun(1)
            two.add(10)
            two.delivered(10)
            also.release()
        held.release()
        wait_for(lambda: left not in threads_of("pool-replacing"), "the end of the thread that was left behind")
        assert pool.status().hanging == 0


def test_stop_does_not_wait_for_thread_working_for_other_endpoint() -> None:
    pool = WorkerPool(2)
    closing, held = Closing(), Held()
    one, two = Member(pool, "one", closing.endpoint()), Member(pool, "two", held)
    with at_work(two):
        one.workers.start()
        begun = threading.Barrier(3)
        closing.act = lambda _: begun.wait(LONG_S) and None
        # Both threads have an instance; then one thread works for the other endpoint.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool.shares, "candidates", lambda: [one.workers])
            one.add(2)
            begun.wait(LONG_S)
        one.delivered(2)
        two.add(1)
        held.await_begun(1)
        before_s = time.monotonic()
        assert one.workers.stop(LONG_S) == []
        assert time.monotonic() - before_s < LONG_S / 2
        assert len(closing.closed) == 1
        held.release()
        wait_for(lambda: len(closing.closed) == 2, "the other instance to be closed")


def test_endpoint_beyond_pool_threads_is_refused_at_start() -> None:
    pool = WorkerPool(1)
    one, two = Member(pool, "one", lambda _: None), Member(pool, "two", lambda _: None)
    with at_work(one), pytest.raises(InvalidInput, match="a pool of 1 threads cannot serve more than 1 endpoints"):
        two.workers.start()
    with at_work(two):
        two.add(1)
        two.delivered(1)
    with pytest.raises(InvalidInput, match="threads=0 is out of range"):
        WorkerPool(0)


def test_failure_of_pool_thread_is_reported_to_each_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(2)
    one, two = Member(pool, "one", lambda _: None), Member(pool, "two", lambda _: None)

    def fail(*_: object) -> None:
        raise AssertionError("injected")

    with at_work(one, two):
        monkeypatch.setattr(Workers, "finished", fail)
        one.add(1)
        wait_for(lambda: one.failures and two.failures, "both to be told")
        monkeypatch.undo()
        two.add(10)
        two.delivered(10)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < LONG_S, "the stop must not wait for the record of the failed thread"


def test_endpoint_without_pool_gets_its_own_pool() -> None:
    one, two = Member(None, "one", lambda _: None, workers=2), Member(None, "two", lambda _: None, workers=3)
    with at_work(one, two):
        assert one.workers.pool is not two.workers.pool
        assert threads_of("bascule-inbound-one-") == ["bascule-inbound-one-1", "bascule-inbound-one-2"]
        assert len(threads_of("bascule-inbound-two-")) == 3
