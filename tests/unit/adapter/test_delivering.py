"""The effect of each end of an endpoint's call on the record and on the records behind it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from bascule.adapter.inbound import ActivationSpec, Backoff, Order, Record
from bascule.adapter.inbound.deliveries import RecordDelivery
from bascule.adapter.inbound.delivering import Deliverer
from bascule.adapter.inbound.state import Place, Ref
from bascule.adapter.inbound.workers import Counts, Workers
from bascule.core.errors import TooLarge
from bascule.core.kafka_records import Outgoing
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

PLACE = Place("topic", 0)
LONG_S = 40.0 * SLOWNESS
SPEC = ActivationSpec(topics=("topic",), group="g", workers=1, order="partition", retries=1, backoff=Backoff(0, 1, 0))  # type: ignore[arg-type]


class RecordingMode:
    """A delivery mode that keeps the offsets of delivered and dead-lettered records, and the moved records. ``commit`` may fail."""

    def __init__(self, commit: Callable[[], None] = lambda: None, refused: Callable[[Outgoing], bool] = lambda _: False) -> None:
        self.done: list[int] = []
        self.dead: list[int] = []
        self.moved: list[Outgoing] = []
        self._commit = commit
        self._refused = refused

    def deliver(self, delivery: RecordDelivery, work: Callable[[], None]) -> None:
        work()
        self._commit()
        self.done.append(delivery.ref.offset)

    def move(self, delivery: RecordDelivery, outgoing: Outgoing) -> None:
        if self._refused(outgoing):
            raise TooLarge(f"{outgoing.topic} takes no more")
        self.moved.append(outgoing)
        self.dead.append(delivery.ref.offset)

    def failed(self, ref: Ref, _failures: int) -> bytes:
        return str(ref).encode()


@contextmanager
def at_work(endpoint: Any, taken: RecordingMode, offsets: range, spec: ActivationSpec = SPEC) -> Iterator[Counts]:
    counts, failures = Counts(), list[BaseException]()
    deliverer = Deliverer(spec, cast("Any", taken), taken, counts)
    workers = Workers(spec, endpoint, lambda delivery, call: deliverer.handle(workers, delivery, call), counts, failures.append)
    workers.start()
    workers.add(
        [RecordDelivery(Ref(PLACE, "t", offset), Record(*PLACE, offset, b"key", b"value", (("own", b"1"),)), ()) for offset in offsets]
    )
    try:
        yield counts
        wait_for(lambda: len(taken.done) + len(taken.dead) == len(offsets), "all records to be handled", LONG_S)
        assert workers.drop("t", LONG_S)
    finally:
        workers.stop(LONG_S)


async def cancelled(record: Record) -> None:
    if record.offset == 1:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task


async def exits(record: Record) -> None:
    await asyncio.sleep(0)
    exits_at_once(record)


def exits_at_once(record: Record) -> None:
    if record.offset == 1:
        sys.exit("no more")


@pytest.mark.parametrize("endpoint", [cancelled, exits, exits_at_once])
def test_endpoint_that_raises_cancellation_or_exit_has_failed_and_later_records_are_delivered(endpoint: Any) -> None:
    taken = RecordingMode()
    with at_work(endpoint, taken, range(1, 4)) as counts:
        pass
    assert (taken.done, taken.dead, counts.failed, counts.dead_lettered) == ([2, 3], [1], 2, 1)


def test_delivery_timeout_does_not_apply_to_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record may be committed, so it must not go to another worker."""
    monkeypatch.setattr("bascule.adapter.inbound.worker_pool.WATCH_S", 0.01)
    overdue, give_up = threading.Event(), Workers.give_up

    def watched(workers: Workers, worker: Any) -> None:
        give_up(workers, worker)
        overdue.set()

    def commit() -> None:
        assert overdue.wait(LONG_S)

    monkeypatch.setattr(Workers, "give_up", watched)
    taken = RecordingMode(commit)
    with at_work(lambda _: None, taken, range(1, 2), replace(SPEC, delivery_timeout_s=0.05)) as counts:
        pass
    assert (taken.done, taken.dead, counts.failed, counts.hung) == ([1], [], 0, 0)


def test_records_are_delivered_again_after_hanging_endpoint_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.adapter.inbound.worker_pool.WATCH_S", 0.01)
    released, taken = threading.Event(), RecordingMode()

    def hang(record: Record) -> None:
        if record.offset < 3:
            released.wait(LONG_S)

    spec = ActivationSpec(
        topics=("topic",), group="g", workers=1, retries=0, delivery_timeout_s=1.0
    )  # much longer than the third record needs
    with at_work(hang, taken, range(1, 4), spec) as counts:
        wait_for(lambda: counts.hung == 2, "two workers to hang", LONG_S)
        assert taken.done == []
        released.set()
    assert (taken.done, sorted(taken.dead)) == ([3], [1, 2])


def test_interrupt_during_commit_of_record_is_not_counted_as_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record may be committed. If it counted as failed, it would be in flight again."""
    monkeypatch.setattr("bascule.adapter.inbound.delivering.AWAY_PAUSE_S", 0.0)
    ends = iter([SystemExit(), asyncio.CancelledError()])

    def commit() -> None:
        for error in ends:
            raise error

    taken = RecordingMode(commit)
    with at_work(lambda _: None, taken, range(1, 3)) as counts:
        pass
    assert (taken.done, taken.dead, counts.failed) == ([1, 2], [], 0)


def fails(_record: Record) -> None:
    raise ValueError("no account")


def test_record_too_large_for_retry_topic_becomes_dead_letter_at_once() -> None:
    taken = RecordingMode(refused=lambda outgoing: outgoing.topic == "g.retry")
    with at_work(fails, taken, range(1, 2), replace(SPEC, order=Order.NONE, retries=3)) as counts:
        pass
    (letter,) = taken.moved
    assert (letter.topic, letter.value, counts.retried, counts.dead_lettered) == ("g.dead-letter", b"value", 0, 1)
    assert ("bascule.retry.count", b"1") in letter.headers


def test_record_too_large_for_dead_letter_topic_is_stored_without_value() -> None:
    taken = RecordingMode(refused=lambda outgoing: outgoing.value == b"value")
    with at_work(fails, taken, range(1, 3), replace(SPEC, retries=0)) as counts:
        pass
    letter = taken.moved[0]
    headers: dict[str, Any] = dict(letter.headers)
    assert (letter.topic, letter.key, letter.value, counts.dead_lettered) == ("g.dead-letter", b"key", b"", 2)
    assert (headers["bascule.retry.origin"], headers["__connect.errors.exception.message"]) == (b"topic/0/1", b"no account")
    assert headers["bascule.retry.left-out"] == b"value and headers: g.dead-letter takes no more"
    assert "own" not in headers


def test_record_with_key_too_large_for_dead_letter_topic_is_stored_with_origin_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken = RecordingMode(refused=lambda outgoing: outgoing.key is not None)
    with at_work(fails, taken, range(1, 3), replace(SPEC, retries=0)) as counts:
        pass
    letter = taken.moved[0]
    headers: dict[str, Any] = dict(letter.headers)
    assert (letter.topic, letter.key, letter.value, counts.dead_lettered) == ("g.dead-letter", None, b"", 2)
    assert headers["bascule.retry.origin"] == b"topic/0/1"
    assert headers["bascule.retry.left-out"] == b"key, value and headers: g.dead-letter takes no more"
    assert (
        'dead letter is incomplete topic=topic partition=0 offset=1 left_out="key, value and headers" error="g.dead-letter takes no more'
        in caplog.text
    )


def test_record_that_cannot_be_dead_lettered_is_retried_with_growing_pause() -> None:
    refusals = 3

    def refused(_: Outgoing) -> bool:
        return delivery.refusals < refusals

    taken, counts = RecordingMode(refused=refused), Counts()
    deliverer = Deliverer(replace(SPEC, retries=0), cast("Any", taken), taken, counts)
    delivery = RecordDelivery(Ref(PLACE, "t", 1), Record(*PLACE, 1, b"key", b"value", ()), (), failure=ValueError("bad"))
    for pause_s in (1, 2, 4):
        begun_s = time.monotonic()
        again_s = deliverer.handle(cast("Any", None), delivery, fails)
        assert again_s is not None
        assert begun_s + pause_s <= again_s <= time.monotonic() + pause_s
        assert deliverer.unburied == {
            delivery.ref: "could not dead-letter record topic-0, offset 1: g.dead-letter takes no more; "
            "raise max.message.bytes of the dead-letter topic"
        }
    assert deliverer.handle(cast("Any", None), delivery, fails) is None
    assert (deliverer.unburied, counts.dead_lettered) == ({}, 1)
