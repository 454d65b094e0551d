from __future__ import annotations

import pytest

from bascule.journal.errors import DamagedRecord
from bascule.journal.fence import Fence
from bascule.journal.records import Header, Kind


def admitted(fence: Fence, *records: tuple[int, Kind, int, int]) -> list[int]:
    """Return the offsets of the records (offset, kind, epoch, sequence) that the fence admits."""
    return [offset for offset, kind, epoch, sequence in records if fence.admits(offset, Header(kind, epoch, sequence))]


def test_records_of_one_epoch_count_in_order() -> None:
    assert admitted(Fence(), (0, Kind.EPOCH, 0, 0), (1, Kind.DATA, 0, 1), (2, Kind.STATE, 0, 2)) == [0, 1, 2]


def test_sequence_numbers_continue_across_epochs() -> None:
    assert admitted(Fence(), (0, Kind.EPOCH, 0, 0), (1, Kind.DATA, 0, 1), (2, Kind.EPOCH, 0, 0), (3, Kind.DATA, 2, 2)) == [0, 1, 2, 3]


def test_records_of_former_epoch_after_a_newer_start_do_not_count() -> None:
    records = ((0, Kind.EPOCH, 0, 0), (1, Kind.DATA, 0, 1), (2, Kind.EPOCH, 0, 0), (3, Kind.DATA, 0, 2), (4, Kind.DATA, 2, 2))
    assert admitted(Fence(), *records) == [0, 1, 2, 4]


def test_of_two_concurrent_epochs_only_the_last_started_counts() -> None:
    starts = ((0, Kind.EPOCH, 0, 0), (1, Kind.EPOCH, 0, 0))
    records = ((2, Kind.DATA, 0, 1), (3, Kind.DATA, 1, 1), (4, Kind.DATA, 0, 2), (5, Kind.DATA, 1, 2))
    assert admitted(Fence(), *starts, *records) == [0, 1, 3, 5]


def test_repeated_sequence_number_counts_once() -> None:
    assert admitted(Fence(), (0, Kind.EPOCH, 0, 0), (1, Kind.DATA, 0, 1), (2, Kind.DATA, 0, 1), (3, Kind.DATA, 0, 2)) == [0, 1, 3]


def test_gap_in_sequence_numbers_is_reported_with_its_offset() -> None:
    fence = Fence()
    admitted(fence, (0, Kind.EPOCH, 0, 0), (1, Kind.DATA, 0, 1))
    with pytest.raises(DamagedRecord, match="offset 7: sequence 3 follows 1"):
        fence.admits(7, Header(Kind.DATA, 0, 3))


def test_gap_before_the_first_record_is_reported() -> None:
    fence = Fence()
    fence.admits(0, Header(Kind.EPOCH, 0, 0))
    with pytest.raises(DamagedRecord, match="sequence 2 follows 0"):
        fence.admits(1, Header(Kind.DATA, 0, 2))


def test_epoch_without_start_record_is_reported() -> None:
    fence = Fence()
    fence.admits(0, Header(Kind.EPOCH, 0, 0))
    with pytest.raises(DamagedRecord, match="epoch 5, whose start is missing"):
        fence.admits(6, Header(Kind.DATA, 5, 1))


def test_reader_that_starts_mid_journal_accepts_the_first_record() -> None:
    fence = Fence(sequence=-1)
    assert admitted(fence, (40, Kind.DATA, 3, 17), (41, Kind.DATA, 3, 18)) == [40, 41]
    with pytest.raises(DamagedRecord):
        fence.admits(42, Header(Kind.DATA, 3, 20))
