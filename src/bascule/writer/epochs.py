"""The epochs of a journal and the exclusive diverts that its brokers applied, found backwards from its end.

Each record names its epoch, and an epoch is the offset of its own start record: one look at the records before a start finds the epoch
that it ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, Protocol

from bascule.journal.fence import STRAY_RECORDS_MAX
from bascule.journal.records import ForeignRecord, Kind, Op, decode_header, decode_json, decode_send, entries
from bascule.writer.position import Position


class StoredRecord(Protocol):
    """A record as it was read."""

    def offset(self) -> int | None:
        """Where it stands."""
        ...

    def value(self) -> Any:
        """Its octets."""
        ...


class JournalHistory(Protocol):
    """The records of a journal that are there. Each method may raise Unavailable."""

    def earliest(self) -> int:
        """The first offset that is still there."""
        ...

    def records(self, start: int, end: int) -> Iterable[StoredRecord]:
        """Those from ``start`` on and before ``end``."""
        ...


def taken_since(common: Position | None, history: JournalHistory, end: int) -> dict[str, int]:
    """Where what an exclusive divert took may begin, by its name: behind ``common``, up to which everything is answered for, or at all."""
    epochs = exclusive_diverts(history, common.epoch if common else 0, end)
    if common is not None and common.epoch not in epochs:
        # Its start is trimmed: the position knows what was in force, and perhaps more.
        epochs[-1] = common.exclusive
    since: dict[str, int] = {}
    for start in sorted(epochs):
        for name in epochs[start]:
            since.setdefault(name, max(start, common.offset if common else 0))
    return since


def first_marks(common: Position | None, history: JournalHistory, end: int) -> dict[str, int]:
    """Where, of an epoch whose start is trimmed, what each exclusive divert took begins: what ``taken_since`` finds where somebody knows.

    Reads the journal up to the first start that is there.
    """
    start = max(history.earliest(), common.offset if common else 0)
    found: dict[str, int] = {}
    for record in history.records(start, min(exclusive_diverts(history, start, end), default=end)):
        value = _value(record)
        with suppress(ForeignRecord):
            if decode_header(value).kind is Kind.DATA:
                sends = (decode_send(value, at, to) for op, at, to in entries(value) if op == Op.SEND)
                found |= {name: record.offset() or 0 for send in sends for name in send.diverts if name not in found}
    return found


def exclusive_diverts(history: JournalHistory, start: int, end: int) -> dict[int, Collection[str]]:
    """The exclusive diverts in force by epoch, of those that began from ``start`` on and before ``end``, as far as they are there.

    Raises DamagedRecord, NewerRecord or Unavailable.
    """
    first = history.earliest()
    found: dict[int, Collection[str]] = {}
    while end > max(start, first):
        back = max(first, end - STRAY_RECORDS_MAX)
        epoch = max(map(_epoch, history.records(back, end)), default=-1)
        if epoch >= max(start, first):
            for began in history.records(epoch, epoch + 1):
                found[epoch] = exclusive_of(_value(began))
            end = epoch
        elif epoch < 0:
            end = back  # foreign records, all of them
        else:
            break
    return found


def _epoch(record: StoredRecord) -> int:
    try:
        header = decode_header(_value(record))
    except ForeignRecord:
        return -1
    return (record.offset() or 0) if header.kind is Kind.EPOCH else header.epoch


def exclusive_of(value: bytes) -> tuple[str, ...]:
    """The exclusive diverts that an epoch's start names. Raises DamagedRecord."""
    for op, start, end in entries(value):
        if op == Op.EPOCH:
            return tuple(sorted(str(name) for name in decode_json(value, start, end).get("exclusive", ())))
    return ()


def _value(record: StoredRecord) -> bytes:
    return bytes(record.value() or b"")
