"""The format of the log's records about branches in Kafka: earlier records are readable, later ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import pytest

from bascule.xa.errors import ResourceError
from bascule.xa.kafka_cleaning import Ages, KnownEnds
from bascule.xa.kafka_records import AGES, FORMAT, PreparedBranch, SideEnds, slots_of, started, started_ms, told_outcome
from bascule.xa.log import Outcome

#: As commit 2e1f389, the first version, wrote them.
FIRST_PREPARED = b'{"slot":"shop.0.a1","partition":2,"first":17,"last":19,"count":3,"at_ms":1700000000000}'
FIRST_STARTED = b'{"at_ms": 1700000000000, "slot": "shop.0.a1", "rolled_back": false}'
FIRST_MARK = b'{"at_ms": 1700000000000, "slot": "shop.0.a1", "rolled_back": true}'
PREPARED = PreparedBranch("shop.0.a1", 2, 17, 19, 3, 1_700_000_000_000)
ENDS = KnownEnds(0.0, 1, SideEnds("id", {0: 5}), {0: 7})


class Entry(NamedTuple):
    value: bytes
    partition: int = 0
    offset: int = 0

    def place(self, topic: str, key: bytes) -> str:
        return f"{topic}: {key!r}"


def later(value: bytes, **fields: object) -> bytes:
    """Return a record as a later version may write it."""
    return json.dumps({**json.loads(value), "format": FORMAT + 1, **fields}).encode()


def test_records_of_the_first_version_are_readable() -> None:
    assert PreparedBranch.decode(FIRST_PREPARED) == PREPARED
    assert told_outcome(Entry(FIRST_STARTED)) is None
    assert told_outcome(Entry(FIRST_MARK)) is Outcome.ROLLBACK
    assert started_ms(Entry(FIRST_STARTED)) == PREPARED.at_ms
    assert slots_of({b"x": Entry(FIRST_PREPARED), b"y/started": Entry(FIRST_STARTED)}) == {"shop.0.a1"}


def test_records_of_format_1_are_readable_by_the_first_version() -> None:
    """It refuses a record of a prepared branch with any other field, as the format's."""
    assert PREPARED.encode() == FIRST_PREPARED
    assert started("shop.0.a1", PREPARED.at_ms) == FIRST_STARTED
    assert started("shop.0.a1", PREPARED.at_ms, Outcome.ROLLBACK) == FIRST_MARK


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (PreparedBranch.decode, FIRST_PREPARED),
        (lambda value: told_outcome(Entry(value)), FIRST_MARK),
        (lambda value: started_ms(Entry(value)), FIRST_STARTED),
        (lambda value: slots_of({b"x": Entry(value)}), FIRST_PREPARED),
    ],
    ids=["prepared", "mark", "time", "slots"],
)
def test_record_of_a_later_format_is_refused_with_the_advice_to_upgrade(read: Callable[[bytes], object], value: bytes) -> None:
    with pytest.raises(ResourceError, match=r"format 2; this version of Bascule reads formats up to 1\. Upgrade Bascule"):
        read(later(value))
    for damaged in (b"[]", b"{", b"\xff", later(value, format=True), later(value, format=0), later(value, format="1")):
        with pytest.raises(ResourceError):
            read(damaged)


def test_ages_of_a_later_format_count_as_none(caplog: pytest.LogCaptureFixture) -> None:
    written = Ages(kept_s=100.0).stored([], ENDS, 0.0)
    for value, found in ((written, 1), (later(written), 0)):
        ages = Ages(kept_s=100.0)
        ages.see({AGES: Entry(value)}, 0.0)
        assert len(ages.measured(1.0, ENDS.side)) == found
    assert "Upgrade Bascule" in caplog.text
