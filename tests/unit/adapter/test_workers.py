"""The worker pool starts each due record, whichever worker wakes up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bascule.adapter.inbound import ActivationSpec, Order, Record, workers
from bascule.adapter.inbound.deliveries import RecordDelivery
from bascule.adapter.inbound.state import Place, Ref
from bascule.adapter.inbound.workers import Counts, Workers
from bascule.threads.background import in_background
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

PLACE = Place("topic", 0)
SOON_S = 0.3
LONG_S = 30.0 * SLOWNESS


def delivery(offset: int, delay_s: float = 0.0, token: str = "t") -> RecordDelivery:
    return RecordDelivery(
        Ref(PLACE, token, offset), Record(*PLACE, offset, b"key", None), (), time.monotonic() + delay_s if delay_s else 0.0
    )


@contextmanager
def pool(workers: int, work: Callable[[Record], None], order: Order = Order.NONE) -> Iterator[Workers]:
    def handle(delivery: RecordDelivery, call: Callable[[Record], None]) -> None:
        call(delivery.record)
        running.settle(delivery)

    failures: list[BaseException] = []
    running = Workers(ActivationSpec(topics=("topic",), group="g", workers=workers, order=order), work, handle, Counts(), failures.append)
    running.start()
    try:
        yield running
    finally:
        running.stop(LONG_S)
    assert not failures


@pytest.mark.parametrize("workers", [1, 4])
def test_delayed_record_starts_when_due_without_further_records(workers: int) -> None:
    begun = threading.Event()
    with pool(workers, lambda _: begun.set()) as running:
        for _ in range(3):
            running.add([delivery(1, SOON_S)])
            assert begun.wait(LONG_S)
            begun.clear()


def test_delayed_record_starts_when_its_waiting_worker_took_other_record() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(record: Record) -> None:
        if record.offset == 1:
            begun.set()
        else:
            go_on.wait(LONG_S)

    with pool(3, work) as running:
        running.add([delivery(1, SOON_S)])
        running.add([delivery(2)])
        running.add([delivery(3)])
        assert begun.wait(LONG_S / 2)
        go_on.set()


def test_record_blocked_by_dropped_record_of_same_key_starts_at_once() -> None:
    """Two partitions have records of one key. One partition goes to another member while its record waits for a retry."""
    begun = threading.Event()
    with pool(2, lambda _: begun.set(), Order.KEY) as running:
        running.add([delivery(1, 2 * LONG_S, "other"), delivery(2)])
        wait_for(lambda: running.scheduler.delayed, "the first to wait")
        assert not begun.wait(SOON_S)
        running.drop("other")
        assert begun.wait(LONG_S)


def result_of(stop: Callable[[], list[str]]) -> list[str]:
    """Return the result of ``stop``, which must not wait for the hanging worker."""
    answer = in_background(stop, "test-stop")
    return answer.result(LONG_S)


@pytest.mark.parametrize("hangs_in", ["close", "work", "work, and was given up"])
def test_hanging_worker_is_named_by_stop_and_not_awaited(monkeypatch: pytest.MonkeyPatch, hangs_in: str) -> None:
    monkeypatch.setattr(workers, "END_S", 2.0)
    hangs, released, done = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        released.wait(2 * LONG_S)

    class Hanging:
        def on_record(self, record: Record) -> None:
            if hangs_in != "close" and record.offset == 1:
                hang()
            elif record.offset == 2:
                done.set()

        def close(self) -> None:
            if hangs_in == "close":
                hang()

    def handle(delivery: RecordDelivery, call: Callable[[Record], None]) -> None:
        if delivery.failure is None:
            call(delivery.record)
            running.settle(delivery)

    timeout_s = 0.1 if "given up" in hangs_in else LONG_S
    spec = ActivationSpec(topics=("topic",), group="g", workers=1, delivery_timeout_s=timeout_s)
    failures: list[BaseException] = []
    running = Workers(spec, Hanging, handle, Counts(), failures.append)
    before = set(threading.enumerate())
    running.start()
    left = set(threading.enumerate()) - before
    try:
        running.add([delivery(1), delivery(2)])
        if hangs_in != "work":
            assert done.wait(LONG_S)
        assert hangs_in == "close" or hangs.wait(LONG_S)
        assert result_of(lambda: running.stop(0.1)) == ["bascule-inbound-g-1"]
        assert hangs.is_set()
    finally:
        released.set()
        for worker in left:
            worker.join(LONG_S)


def test_duration_of_each_call_of_the_endpoint_is_counted_also_if_it_fails() -> None:
    counts = Counts()

    def work(record: Record) -> None:
        if record.offset == 1:
            raise ValueError("bad record")

    timed = counts.timed(work)
    timed(delivery(0).record)
    with pytest.raises(ValueError, match="bad record"):
        timed(delivery(1).record)
    assert sum(counts.handler.counts) == 2
    assert counts.handler.sum_s >= 0


def test_pool_counts_the_calls_that_it_makes() -> None:
    with pool(2, lambda _: None) as running:
        running.add([delivery(offset) for offset in range(5)])
        wait_for(lambda: sum(running._counts.handler.counts) == 5, "five calls")
