"""The epochs of a journal and the exclusive diverts that its brokers applied, searched backwards from the end of the journal.

Each record names its epoch, and an epoch is the offset of its own start record. The records before a start record therefore name the epoch
that it ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, Protocol

from bascule.journal.errors import ForeignRecord
from bascule.journal.fence import STRAY_RECORDS_MAX
from bascule.journal.records import Kind, Op, decode_header, decode_json, decode_send, entries
from bascule.writer.position import Position


class StoredRecord(Protocol):
    """A record as it was read."""

    def offset(self) -> int | None:
        """Return the offset of the record."""
        ...

    def value(self) -> Any:
        """Return the value as bytes."""
        ...


class JournalHistory(Protocol):
    """The existing records of a journal. Each method may raise Unavailable."""

    def earliest(self) -> int:
        """Return the first offset that still exists."""
        ...

    def records(self, start: int, end: int) -> Iterable[StoredRecord]:
        """Return the records from ``start`` up to ``end`` (not included)."""
        ...


def taken_since(common: Position | None, history: JournalHistory, end: int) -> dict[str, int]:
    """Return, by divert, the first offset at which an exclusive divert may have taken messages that ``common`` does not cover."""
    epochs = exclusive_diverts(history, common.epoch if common else 0, end)
    if common is not None and common.epoch not in epochs:
        # The start record of the epoch was trimmed: the position contains all exclusive diverts that were in force, and perhaps more.
        epochs[-1] = common.exclusive
    since: dict[str, int] = {}
    for start in sorted(epochs):
        for name in epochs[start]:
            since.setdefault(name, max(start, common.offset if common else 0))
    return since


def first_marks(common: Position | None, history: JournalHistory, end: int) -> dict[str, int]:
    """Return, by divert, the offset of the first message that an exclusive divert took in an epoch whose start record was trimmed.

    For other epochs, ``taken_since`` has the answer. Reads the journal up to the first start record that exists.
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
    """Return, by epoch, the exclusive diverts in force, for epochs from ``start`` up to ``end`` (not included) whose start record exists.

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
            end = back  # only foreign records
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
    """Return the exclusive diverts that the start record of an epoch names. Raises DamagedRecord."""
    for op, start, end in entries(value):
        if op == Op.EPOCH:
            return tuple(sorted(str(name) for name in decode_json(value, start, end).get("exclusive", ())))
    return ()


def _value(record: StoredRecord) -> bytes:
    return bytes(record.value() or b"")
