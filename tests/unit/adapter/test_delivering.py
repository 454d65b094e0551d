"""What an endpoint's end, of whatever kind, does to its record and to those behind it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from bascule.adapter.inbound import ActivationSpec, Backoff, Record
from bascule.adapter.inbound.delivering import Deliverer
from bascule.adapter.inbound.state import Place, Ref
from bascule.adapter.inbound.workers import Counts, Delivery, Workers
from bascule.kafka.compacted import Outgoing
from bascule.testing.system import wait_for

PLACE = Place("topic", 0)
SPEC = ActivationSpec(topics=("topic",), group="g", workers=1, order="partition", retries=1, backoff=Backoff(0, 1, 0))  # type: ignore[arg-type]


class Taken:
    """A mode that keeps what is delivered and moved away; ``commit`` may fail."""

    def __init__(self, commit: Callable[[], None] = lambda: None) -> None:
        self.done: list[int] = []
        self.dead: list[int] = []
        self._commit = commit

    def deliver(self, delivery: Delivery, work: Callable[[], None]) -> None:
        work()
        self._commit()
        self.done.append(delivery.ref.offset)

    def move(self, delivery: Delivery, _outgoing: Outgoing) -> None:
        self.dead.append(delivery.ref.offset)

    def failed(self, ref: Ref, _failures: int) -> bytes:
        return str(ref).encode()


@contextmanager
def at_work(endpoint: Any, taken: Taken, offsets: range) -> Iterator[Counts]:
    counts = Counts()
    deliverer = Deliverer(SPEC, cast("Any", taken), taken, counts)
    workers = Workers(SPEC, endpoint, lambda delivery, call: deliverer.handle(workers, delivery, call), counts)
    workers.start()
    workers.add([Delivery(Ref(PLACE, "t", offset), Record(*PLACE, offset, None, None), ()) for offset in offsets])
    try:
        yield counts
        wait_for(lambda: len(taken.done) + len(taken.dead) == len(offsets), "all records to be handled", 10)
        assert workers.drop("t", 10)
    finally:
        workers.stop(10)


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
def test_an_endpoint_that_ends_by_no_exception_has_failed_and_those_behind_its_record_go_on(endpoint: Any) -> None:
    taken = Taken()
    with at_work(endpoint, taken, range(1, 4)) as counts:
        pass
    assert (taken.done, taken.dead, counts.failed, counts.dead_lettered) == ([2, 3], [1], 2, 1)


def test_who_is_told_to_end_while_a_record_is_committed_says_nothing_about_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be committed: to count it as failed would bring it in flight again."""
    monkeypatch.setattr("bascule.adapter.inbound.delivering.AWAY_PAUSE_S", 0.0)
    ends = iter([SystemExit(), asyncio.CancelledError()])

    def commit() -> None:
        for error in ends:
            raise error

    taken = Taken(commit)
    with at_work(lambda _: None, taken, range(1, 3)) as counts:
        pass
    assert (taken.done, taken.dead, counts.failed) == ([1, 2], [], 0)
