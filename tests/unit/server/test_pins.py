"""What the journal is kept for beside pipelines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bascule.broker import snapshot as snapshots
from bascule.broker.snapshot import Snapshot
from bascule.server.pins import Pins
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes

RECORD_BYTES = 100.0


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Pins:
    place: Any = SimpleNamespace(retention_s=60.0, pinned_bytes_max=1)
    found = Pins(place)
    monkeypatch.setattr(found, "of_pipelines", lambda *_: [])
    return found


@pytest.fixture
def taken() -> Snapshot:
    """Of two queues; the older message is in ``first``."""
    broker, sender = BrokerInMemory(), Sender()
    for queue in ("first", "second"):
        broker.send(queue, message_bytes("x"), sender, queue)
        broker.settle()
    return snapshots.take(broker.engine, broker.offsets)


def said(pins: Pins, taken: Snapshot, retained: int, held: dict[int, str]) -> list[tuple[str, str, int, bool]]:
    found = pins.found(taken, retained, held, RECORD_BYTES)
    assert all(pin.offset + pin.records == taken.next_offset and pin.bytes == RECORD_BYTES * pin.records for pin in found)
    return [(pin.keeper, pin.name, pin.offset, pin.released) for pin in found]


def test_the_queue_with_the_oldest_message_that_is_not_in_the_store(pins: Pins, taken: Snapshot) -> None:
    assert said(pins, taken, taken.next_offset, {}) == [("queue", "first", taken.first_offset(), False)]
    taken.stored = taken.mids[0]
    assert said(pins, taken, taken.next_offset, {}) == [("queue", "second", taken.first_offset(), False)]
    taken.stored = sorted(taken.mids[0] + taken.mids[1])
    assert said(pins, taken, taken.next_offset, {}) == []


def test_the_branch_that_has_received_it(pins: Pins, taken: Snapshot) -> None:
    (mid,) = taken.mids[0]
    assert said(pins, taken, taken.next_offset, {mid: "7:a:b"}) == [("branch", "7:a:b", taken.first_offset(), False)]


def test_the_owners_retention(pins: Pins, taken: Snapshot) -> None:
    taken.stored = sorted(taken.mids[0] + taken.mids[1])
    assert said(pins, taken, 1, {}) == [("retention", "", 1, False)]
