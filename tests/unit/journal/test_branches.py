from __future__ import annotations

from contextlib import suppress

import pytest

from bascule.core.xid import Xid
from bascule.journal.branches import (
    FORCED,
    Ended,
    Ending,
    PreparedEntry,
    decode_ended,
    decode_prepared,
    ended_entry,
    prepared_entry,
    prepared_sends,
)
from bascule.journal.errors import DamagedRecord
from bascule.journal.records import Op, ack_entry, entries, entry
from tests.unit.journal.samples import BRANCH, ENDS, PLAIN, XID


def payload(encoded: bytes) -> tuple[bytes, int, int]:
    ((_, start, end),) = entries(encoded, 0)
    return encoded, start, end


@pytest.mark.parametrize(
    "prepared",
    [
        BRANCH,
        BRANCH._replace(user="ann-ü"),
        BRANCH._replace(container="", user="x" * 300),
        PreparedEntry(Xid(0, b"g" * 64, b""), 0, "", (), ()),
        PreparedEntry(XID, 1, "c", (PLAIN, PLAIN), ()),
    ],
)
def test_prepared_branch_round_trips(prepared: PreparedEntry) -> None:
    assert decode_prepared(*payload(prepared_entry(*prepared))) == prepared


@pytest.mark.parametrize(
    "ended",
    [
        *ENDS,
        *(end._replace(user="ann-ü") for end in ENDS if end.ending in FORCED),
        Ended(Xid((1 << 31) - 1, b"g", b"b" * 64), Ending.FORGOTTEN, 0),
    ],
)
def test_end_of_branch_round_trips(ended: Ended) -> None:
    assert decode_ended(*payload(ended_entry(*ended))) == ended


@pytest.mark.parametrize("size", range(5, len(prepared_entry(*BRANCH)), 7))
def test_truncated_prepared_branch_is_damaged_or_differs(size: int) -> None:
    with suppress(DamagedRecord):
        assert decode_prepared(*payload(entry(Op.PREPARED, prepared_entry(*BRANCH)[5:size]))) != BRANCH


@pytest.mark.parametrize("more", [b"x", ack_entry(1, [2])])
def test_foreign_content_in_prepared_branch_is_damage(more: bytes) -> None:
    with pytest.raises(DamagedRecord):
        decode_prepared(*payload(entry(Op.PREPARED, prepared_entry(*BRANCH)[5:] + more)))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:-9] + b"\x09" + data[-8:]])
def test_invalid_end_of_branch_is_damage(change: object) -> None:
    with pytest.raises(DamagedRecord, match="end of a branch"):
        decode_ended(*payload(entry(Op.ENDED, change(ended_entry(*ENDS[0])[5:]))))  # type: ignore[operator]


def test_user_does_not_hide_the_container_and_messages_of_a_branch() -> None:
    container, sends = prepared_sends(*payload(prepared_entry(*BRANCH._replace(user="ann"))))
    assert (container, tuple(sends)) == (BRANCH.container, BRANCH.sends)


@pytest.mark.parametrize("size", range(5, 60))
def test_truncated_branch_with_a_user_is_damaged_or_differs(size: int) -> None:
    owned = BRANCH._replace(user="ann")
    with suppress(DamagedRecord):
        assert decode_prepared(*payload(entry(Op.PREPARED, prepared_entry(*owned)[5:size]))) != owned
