"""The rule of the inbound log: an entry of an owner that follows the entry of a later owner does not count, even after compaction."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.adapter.inbound.state import (
    CLAIM,
    FAILED,
    FLIGHT,
    OWNER,
    READ,
    LogFold,
    LogUnreadable,
    Place,
    Ref,
    entry_of,
    key_of,
    owner_value,
)
from bascule.core.xid import Xid

PLACE = Place("payments.eu", 3)
XID = Xid(7, b"shop/1", b"inbound")


def owner(token: str) -> tuple[bytes, bytes]:
    return key_of(OWNER, Ref(PLACE, token, -1)), b"somebody"


def taken(token: str, after: str | None) -> tuple[bytes, bytes]:
    return key_of(OWNER, Ref(PLACE, token, -1)), owner_value("somebody", after)


def flight(token: str, offset: int) -> tuple[bytes, bytes]:
    return key_of(FLIGHT, Ref(PLACE, token, offset)), b"1"


def read(token: str, offset: int) -> tuple[bytes, bytes]:
    return key_of(READ, Ref(PLACE, token, offset)), b"1"


def claim(token: str, offset: int, xid: Xid = XID) -> tuple[bytes, bytes]:
    return key_of(CLAIM, Ref(PLACE, token, offset), xid), b"1"


def folded(*entries: tuple[bytes, bytes | None]) -> LogFold:
    fold = LogFold()
    for key, value in entries:
        fold.apply(key, value)
    return fold


@pytest.mark.parametrize("kind", [OWNER, FLIGHT, FAILED, CLAIM, READ])
def test_inbound_log_key_round_trips(kind: str) -> None:
    entry = entry_of(key_of(kind, Ref(PLACE, "5f", 17), XID))
    assert entry.kind == kind
    assert entry.ref == Ref(PLACE, "5f", -1 if kind == OWNER else 17)
    assert entry.xid == (XID if kind == CLAIM else None)


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"flight/payments/2",
        b"flight/payments/two/5f/1",
        b"claim/payments/2/5f/1/no-xid",
        b"\xff",
        b"more/a/1/b",
        b"read/a/1/b/2",
        b"v2/flight/a/1/b/2",
    ],
)
def test_unreadable_inbound_log_key_is_refused(key: bytes) -> None:
    with pytest.raises(LogUnreadable, match="unreadable key"):
        entry_of(key)


def test_inbound_log_entry_of_later_format_is_refused() -> None:
    with pytest.raises(LogUnreadable, match="has format 3; this version of Bascule reads formats up to 2"):
        entry_of(b"v3/flight/payments/2/5f/17")


def test_inbound_log_entries_of_version_1_stay_readable() -> None:
    """Version 1 wrote these entries."""
    golden: dict[bytes, bytes | None] = {
        b"owner/payments.eu/3/0f3a9c41d2be": b"shop-1/1b2c3d4e -",
        b"flight/payments.eu/3/0f3a9c41d2be/17": b"1",
        b"flight/payments.eu/3/0f3a9c41d2be/18": b"1",
        b"failed/payments.eu/3/0f3a9c41d2be/18": b"2",
        b"claim/payments.eu/3/0f3a9c41d2be/17/7:shop/1:inbound": b"1",
        b"owner/payments.eu/3/77aa00b1c2d3": b"shop-2/9f8e7d6c 0f3a9c41d2be",
        b"flight/payments.eu/3/0f3a9c41d2be/19": b"1",
    }
    state = folded(*golden.items()).place(PLACE)
    assert (state.owner, {offset: flight.failures for offset, flight in state.flights.items()}) == ("77aa00b1c2d3", {17: 0, 18: 2})
    assert {xid: claim.offset for xid, claim in state.claims.items()} == {XID: 17}
    assert state.void == {b"flight/payments.eu/3/0f3a9c41d2be/19"}
    keys = [key_of(OWNER, Ref(PLACE, "0f3a9c41d2be", -1)), key_of(CLAIM, Ref(PLACE, "0f3a9c41d2be", 17), XID)]
    assert set(keys) <= set(golden)
    assert owner_value("shop-2/9f8e7d6c", "0f3a9c41d2be") == golden[b"owner/payments.eu/3/77aa00b1c2d3"]


def test_entries_of_replaced_owner_do_not_count() -> None:
    state = folded(owner("a"), flight("a", 1), owner("b"), flight("a", 2), claim("a", 1)).place(PLACE)
    assert set(state.flights) == {1}
    assert state.claims == {}
    assert state.void == {flight("a", 2)[0], claim("a", 1)[0]}


@pytest.mark.parametrize("first", [None, "a"])
@pytest.mark.parametrize("compacted", [False, True])
def test_late_owner_entry_does_not_replace_current_owner(first: str | None, compacted: bool) -> None:
    """The group assigns the partition to b, whose append is delayed, and then to c. The append of b arrives after the takeover by c."""
    before = [taken("a", None)] if first and not compacted else []
    entries = [*before, taken("c", first), flight("c", 1), taken("b", first), flight("b", 1), flight("c", 2), claim("c", 2)]
    state = folded(*entries).place(PLACE)
    assert state.owner == "c"
    assert {offset: flight.keys for offset, flight in state.flights.items()} == {1: {flight("c", 1)[0]}, 2: {flight("c", 2)[0]}}
    assert list(state.claims) == [XID]
    assert state.void == {taken("b", first)[0], flight("b", 1)[0]}
    assert folded(*entries, taken("d", "c")).place(PLACE).owner == "d"


def test_flights_and_claims_of_previous_owner_stand_for_next_owner() -> None:
    state = folded(owner("a"), flight("a", 1), claim("a", 1), owner("b")).place(PLACE)
    assert set(state.flights) == {1}
    assert list(state.claims) == [XID]


def test_record_is_in_flight_until_all_its_flight_entries_are_deleted() -> None:
    failed = key_of(FAILED, Ref(PLACE, "b", 1))
    fold = folded(owner("a"), flight("a", 1), owner("b"), (failed, b"2"), flight("b", 1))
    assert fold.place(PLACE).flights[1].failures == 2
    fold.apply(flight("a", 1)[0], None)
    assert fold.place(PLACE).seen().keys == {1: (*fold.place(PLACE).flights[1].keys,)}
    assert fold.place(PLACE).flights[1].keys == {failed, flight("b", 1)[0]}
    fold.apply(flight("b", 1)[0], None)
    assert (fold.place(PLACE).flights, fold.place(PLACE).void) == ({}, {failed})
    fold.apply(failed, None)
    assert fold.place(PLACE).void == set()


def test_failure_count_stored_after_record_is_done_does_not_bring_it_back() -> None:
    failed = key_of(FAILED, Ref(PLACE, "a", 1))
    state = folded(owner("a"), flight("a", 1), (flight("a", 1)[0], None), (failed, b"1")).place(PLACE)
    assert (state.flights, state.void) == ({}, {failed})


def test_last_valid_read_entry_determines_read_position() -> None:
    assert folded(owner("a"), flight("a", 1)).place(PLACE).seen().read_to is None
    log = [owner("a"), read("a", 7), read("a", 9), taken("b", "a"), read("a", 12)]
    assert folded(*log).place(PLACE).seen().read_to == 9
    assert folded(*log).place(PLACE).void == {read("a", 12)[0]}
    # A smaller offset of a new owner: the topic was recreated.
    assert folded(*log, read("b", 2)).place(PLACE).seen().read_to == 2
    assert folded(*log, (read("a", 7)[0], None)).place(PLACE).seen().read_to == 9
    assert folded(*log, read("b", 11), read("b", 9), (read("b", 9)[0], None), read("b", 11)).place(PLACE).seen().read_to == 11


def test_inbound_log_entries_of_version_2_stay_readable() -> None:
    golden = [(b"owner/payments.eu/3/0f3a9c41d2be", b"shop-1/1b2c3d4e -"), (b"v2/read/payments.eu/3/0f3a9c41d2be/17", b"1")]
    assert folded(*golden).place(PLACE).seen().read_to == 17
    assert golden[1][0] == key_of(READ, Ref(PLACE, "0f3a9c41d2be", 17))


def test_deletion_of_void_entry_does_not_change_valid_state() -> None:
    fold = folded(owner("a"), flight("a", 1), owner("b"), flight("b", 2), claim("b", 2), claim("a", 2))
    fold.apply(claim("a", 2)[0], None)
    assert list(fold.place(PLACE).claims) == [XID]
    assert fold.place(PLACE).void == set()


Log = list[tuple[bytes, bytes | None]]
TOKENS = ["a", "b", "c", "d"]


@st.composite
def histories(draw: st.DrawFn) -> Log:
    """Draw the history of a log with several owners.

    Each owner may write after it was replaced, and cleans up before it deletes the entries of earlier owners. The entry of a late
    owner names an owner that another one has already replaced.
    """
    log: Log = []
    done: set[bytes] = set()
    for number, token in enumerate(TOKENS[: draw(st.integers(1, 4))]):
        log.append(taken(token, TOKENS[number - 1] if number else None))
        if draw(st.booleans()):
            log.append(taken(f"late-{token}", TOKENS[number - 1] if number else None))
        if draw(st.booleans()):
            state = folded(*log).place(PLACE)
            log += [(key, None) for key in state.void]
            log += [(state.owners[each], None) for each in list(state.owners)[:-1]]
        if draw(st.booleans()):
            log.append(taken(f"later-{token}", TOKENS[number - 1] if number else None))
        for _ in range(draw(st.integers(0, 6))):
            writer = draw(st.sampled_from(TOKENS[: number + 1]))
            offset = draw(st.integers(0, 3))
            # A transaction claims one record.
            kinds = (flight(writer, offset), claim(writer, offset, Xid(7, f"{writer}{offset}".encode(), b"inbound")), read(writer, offset))
            entry = draw(st.sampled_from(kinds))
            if entry[0] == kinds[2][0]:
                log += [entry] if entry not in log else []
                continue
            if entry[0] in done or entry in log:
                continue
            log.append(entry)
            if draw(st.integers(0, 3)) == 0:
                done.add(entry[0])
                log.append((entry[0], None))
    return log


@given(histories(), st.integers(0, 2**32))
def test_compacted_inbound_log_yields_same_state_as_whole_log(log: Log, seed: int) -> None:
    chosen = random.Random(seed)
    newest = {key: place for place, (key, _) in enumerate(log)}
    end = chosen.randint(0, len(log))  # entries after this index are not compacted yet
    compacted = [
        (key, value)
        for place, (key, value) in enumerate(log)
        if place >= end or newest[key] >= end or (newest[key] == place and (value is not None or chosen.random() < 0.5))
    ]
    whole, short = folded(*log).place(PLACE), folded(*compacted).place(PLACE)
    assert {offset: flight.keys for offset, flight in short.flights.items()} == {
        offset: flight.keys for offset, flight in whole.flights.items()
    }
    assert short.claims == whole.claims
    assert short.owner == whole.owner
    assert short.seen().read_to == whole.seen().read_to
