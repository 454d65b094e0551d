from __future__ import annotations

import pytest

from bascule.journal.offsets import OffsetMap


def test_consecutive_offsets_form_one_run() -> None:
    offsets = OffsetMap()
    for sequence in range(1, 1000):
        offsets.note(sequence, sequence, 100)
    assert offsets.starts == [1]
    assert [offsets.offset_of(sequence) for sequence in (1, 500, 999)] == [1, 500, 999]


def test_each_gap_in_offsets_begins_a_new_run() -> None:
    offsets = OffsetMap()
    for sequence, offset in ((1, 1), (2, 2), (3, 5), (4, 6), (5, 9)):
        offsets.note(sequence, offset, 100)
    assert [offsets.offset_of(sequence) for sequence in range(1, 6)] == [1, 2, 5, 6, 9]
    assert len(offsets.starts) == 3


def test_sequence_before_the_first_noted_raises_index_error() -> None:
    offsets = OffsetMap()
    offsets.note(5, 10, 100)
    with pytest.raises(IndexError):
        offsets.offset_of(4)


def test_copy_of_offset_map_does_not_change_with_the_original() -> None:
    offsets = OffsetMap()
    offsets.note(1, 1, 100)
    copy = offsets.copy()
    offsets.note(2, 5, 100)
    assert (copy.starts, offsets.starts) == ([1], [1, 2])
