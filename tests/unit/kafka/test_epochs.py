"""Epochs found in a journal that is trimmed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bascule.journal.records import Kind, Op, encode_record, json_entry
from bascule.kafka.epochs import exclusive_diverts


class Record:
    """An epoch's start."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {"exclusive": ["x"]}))


class Trimming:
    """Of ten starts, those up to ``first`` go after the first look at the records."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._looked = False

    def earliest(self) -> int:
        return 0

    def records(self, start: int, end: int) -> Iterator[Record]:
        first, self._looked = self._first if self._looked else 0, True
        return iter([Record(offset) for offset in range(max(start, first), end)])


def test_an_epoch_whose_start_is_trimmed_between_two_looks_is_not_there() -> None:
    untouched: Any = Trimming(0)
    assert sorted(exclusive_diverts(untouched, 0, 10)) == list(range(10))
    trimmed: Any = Trimming(10)
    assert exclusive_diverts(trimmed, 0, 10) == {}
