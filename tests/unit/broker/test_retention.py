"""The offset up to which the journal may be deleted."""

from __future__ import annotations

import pytest

from bascule.broker.retention import Keeper, OwnersRetention, RetentionHold, holds_of, needed_from
from bascule.broker.snapshot import Snapshot
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes, snapshot_of


@pytest.fixture
def taken() -> Snapshot:
    """Return a snapshot of two queues; the older message is in ``first``."""
    broker, sender = BrokerInMemory(), Sender()
    for queue in ("first", "second"):
        broker.send(queue, message_bytes("x"), sender, queue)
        broker.settle()
    return snapshot_of(broker.engine, broker.offsets)


def said(taken: Snapshot, retained: int, branch: str = "", retention_bytes: int = 0) -> list[tuple[str, str, int, bool]]:
    found = holds_of(taken, [], retained, OwnersRetention(60.0, retention_bytes), branch)
    assert all(pin.offset + pin.records == taken.next_offset for pin in found)
    assert all(pin.bytes == taken.offsets.sizes.between(pin.offset, taken.next_offset) for pin in found)
    return [(pin.keeper, pin.name, pin.offset, pin.released) for pin in found]


def test_oldest_message_outside_of_store_pins_journal(taken: Snapshot) -> None:
    assert said(taken, taken.next_offset) == [("queue", "first", taken.first_offset(), False)]
    taken.stored = list(taken.mids[0])
    assert said(taken, taken.next_offset) == [("queue", "second", taken.first_offset(), False)]
    taken.stored = sorted([*taken.mids[0], *taken.mids[1]])
    assert said(taken, taken.next_offset) == []


def test_branch_that_received_oldest_message_pins_journal(taken: Snapshot) -> None:
    assert said(taken, taken.next_offset, "7:a:b") == [("branch", "7:a:b", taken.first_offset(), False)]


def test_configured_retention_keeps_the_journal(taken: Snapshot) -> None:
    taken.stored = sorted([*taken.mids[0], *taken.mids[1]])
    assert said(taken, 1) == [("retention", "", 1, False)]


def test_configured_retention_is_limited_in_bytes(taken: Snapshot) -> None:
    taken.stored = sorted([*taken.mids[0], *taken.mids[1]])
    last = taken.next_offset - 1
    size_bytes = taken.offsets.sizes.between(last, taken.next_offset)
    assert said(taken, 1, "", 1 << 30) == [("retention", "", 1, False)]
    assert said(taken, 1, "", size_bytes + 1) == [("retention", "", last, False)]
    assert said(taken, last, "", 1 << 30) == [("retention", "", last, False)]
    assert said(taken, 1, "", 1) == []


def test_the_lowest_pin_that_is_not_released_decides(taken: Snapshot) -> None:
    end, sizes = taken.next_offset, taken.offsets.sizes

    def pipeline(offset: int, quota_bytes: int = 0) -> RetentionHold:
        return RetentionHold.up_to(taken, Keeper.PIPELINE, "p", offset, "", quota_bytes)

    assert needed_from(taken, []) == end
    assert needed_from(taken, [pipeline(end + 5)]) == end
    assert needed_from(taken, [pipeline(2), pipeline(1)]) == 1
    beyond_quota = pipeline(0, quota_bytes=sizes.between(0, end) - 1)
    assert beyond_quota.released
    assert needed_from(taken, [beyond_quota, pipeline(2)]) == 2
    assert not pipeline(0, quota_bytes=sizes.between(0, end)).released
