"""Duplicate windows against a plain list of ids, across snapshots and restarts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.broker import duplicates, remembered_ids
from bascule.broker.duplicates import DuplicateWindow

COUNT_MAX = 10
PERIOD_MS = 100


class PlainWindow:
    """The same rules in the simplest form."""

    def __init__(self) -> None:
        self.ids: list[tuple[bytes, int]] = []

    def admit(self, digest: bytes, now_ms: int) -> bool:
        while self.ids and self.ids[0][1] < now_ms - PERIOD_MS:
            del self.ids[0]
        if digest in dict(self.ids):
            return False
        self.ids.append((digest, now_ms))
        del self.ids[:-COUNT_MAX]
        return True


def restarted(window: DuplicateWindow, unconfirmed: set[bytes]) -> DuplicateWindow:
    """Return the window that a snapshot of ``window`` gives to the next epoch."""
    loaded = DuplicateWindow(COUNT_MAX, PERIOD_MS)
    loaded.restore(window.remembered().without(unconfirmed))
    return loaded


steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 30), st.integers(0, 30)),
    st.tuples(st.just("restart"), st.sets(st.integers(0, 30), max_size=4), st.just(0)),
)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (duplicates, remembered_ids):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 3 * remembered_ids.ID_SIZE_BYTES)


@given(st.lists(steps, max_size=60))
def test_duplicate_window_admits_the_same_ids_as_a_plain_list(work: list[tuple[str, object, int]]) -> None:
    window, plain, now_ms = DuplicateWindow(COUNT_MAX, PERIOD_MS), PlainWindow(), 0
    for kind, what, pause_ms in work:
        if kind == "send":
            now_ms += pause_ms
            digest = str(what).encode().ljust(16)
            assert window.admit((digest,), now_ms) == plain.admit(digest, now_ms)
        else:
            assert isinstance(what, set)
            unconfirmed = {str(number).encode().ljust(16) for number in what}
            window.sequence = 1
            window = restarted(window, unconfirmed)
            plain.ids = [each for each in plain.ids if each[0] not in unconfirmed]
    ids = window.remembered().ids()
    assert list(ids) == plain.ids[len(plain.ids) - len(window.digests) :]


@given(st.integers(1, 12), st.integers(0, 12))
def test_ids_added_after_a_snapshot_do_not_change_its_full_segments(before: int, after: int) -> None:
    window = DuplicateWindow(1000, PERIOD_MS)
    for number in range(before):
        window.add(str(number).encode().ljust(16), 0)
    first = window.remembered()
    for number in range(before, before + after):
        window.add(str(number).encode().ljust(16), 0)
    second = window.remembered()
    assert second.segments[: len(first.segments)] == first.segments
    assert len(second.segments) == (before + after) // 3


@given(st.integers(0, 12), st.lists(st.integers(1, 25), max_size=4))
def test_ids_added_together_leave_the_same_window_as_ids_added_one_by_one(before: int, sizes: list[int]) -> None:
    together, one_by_one = DuplicateWindow(COUNT_MAX, PERIOD_MS), DuplicateWindow(COUNT_MAX, PERIOD_MS)
    ids = [str(number).encode().ljust(16) for number in range(before + sum(sizes))]
    for digest in ids:
        one_by_one.add(digest, 0)
    for digest in ids[:before]:
        together.add(digest, 0)
    added = before
    for size in sizes:
        together.add_all(ids[added : added + size], 0)
        added += size
    assert together.remembered() == one_by_one.remembered()
    assert (together.digests, together.added) == (one_by_one.digests, one_by_one.added)
