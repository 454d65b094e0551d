"""A JMS message as a row: the input of a user's transformation, and the rows of ``spark.readStream.format("bascule")``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from bascule.jms.message import decode_message
from bascule.jms.record import kafka_headers, record_value
from bascule.jms.record_headers import ERRORS, text_of_error
from bascule.jms.to_kafka import record_key, text_of
from bascule.journal.records import Send

ROW_SCHEMA = (
    "address string, offset long, epoch long, sequence long, index int, message_id string, correlation_id string, type string,"
    " reply_to string, group_id string, priority int, timestamp timestamp, expiration timestamp, properties map<string,string>,"
    " headers map<string,string>, body_kind string, text string, body binary, key binary, value binary"
)
#: Maximum rows in one Arrow batch: beyond some hundreds, larger batches are no faster, and a batch is held in memory three times.
ARROW_ROWS = 2_000
#: Maximum bytes of bodies and headers in one Arrow batch: a column of Arrow is limited to 2 GiB, and a message may have 64 MiB.
ARROW_BYTES = 16 << 20
#: Columns that identify a message; a transformation must keep them.
IDENTITY = ("offset", "epoch", "sequence", "index")
#: Header with the reason why a row has only some columns. Dead letters use the same name.
REASON = f"{ERRORS}exception.message"
_MOMENT = pa.timestamp("us", "UTC")
_TEXTS = pa.map_(pa.string(), pa.string())
ARROW_SCHEMA = pa.schema(
    [
        ("address", pa.string()),
        ("offset", pa.int64()),
        ("epoch", pa.int64()),
        ("sequence", pa.int64()),
        ("index", pa.int32()),
        ("message_id", pa.string()),
        ("correlation_id", pa.string()),
        ("type", pa.string()),
        ("reply_to", pa.string()),
        ("group_id", pa.string()),
        ("priority", pa.int32()),
        ("timestamp", _MOMENT),
        ("expiration", _MOMENT),
        ("properties", _TEXTS),
        ("headers", _TEXTS),
        ("body_kind", pa.string()),
        ("text", pa.string()),
        ("body", pa.binary()),
        ("key", pa.binary()),
        ("value", pa.binary()),
    ]
)
_BODY, _HEADERS = map(ARROW_SCHEMA.get_field_index, ("body", "headers"))


def message_row(send: Send, offset: int, epoch: int, sequence: int, index: int, key: str = "message-id") -> tuple[Any, ...]:
    """Return the row of a message. Raises InvalidInput if it is no AMQP message or contains a value that has no form outside AMQP."""
    message = decode_message(send.body)
    value = record_value(message)
    return (
        send.address, offset, epoch, sequence, index, message.message_id,
        None if message.correlation_id is None else _text(message.correlation_id),
        message.type, message.reply_to, message.group_id, message.priority,
        _moment(message.timestamp_ms or send.timestamp_ms), _moment(message.expiration_ms),
        {name: text_of(each) for name, each in message.properties.items()},
        {name: _text(each or b"") for name, each in kafka_headers(message)},
        message.body_kind, message.body if message.body_kind == "text" else None,
        message.body if isinstance(message.body, bytes) else value,
        record_key(key, message), value,
    )  # fmt: skip


def malformed_row(send: Send, offset: int, epoch: int, sequence: int, index: int, error: BaseException) -> tuple[Any, ...]:
    """Return the row of a message for which ``message_row`` raises ``error``: the fields of the journal, and the message as it was sent.

    The row has no ``body_kind``; the header REASON has the text of the error.
    """
    return (
        send.address, offset, epoch, sequence, index, None, None, None, None, None, send.priority,
        _moment(send.timestamp_ms), _moment(send.expiry_ms), {}, {REASON: text_of_error(error)}, None, None, send.body, None, None,
    )  # fmt: skip


def arrow_batches(rows: Iterable[tuple[Any, ...]]) -> Iterator[pa.RecordBatch]:
    """Yield rows as Arrow batches of bounded size. Without rows, yield no batch."""
    some: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        some.append(row)
        # Headers include the properties and all other parts of a message that can be large.
        size += len(row[_BODY]) + sum(len(name) + len(text) for name, text in row[_HEADERS].items())
        if len(some) >= ARROW_ROWS or size >= ARROW_BYTES:
            yield arrow_batch(some)
            some, size = [], 0
    if some:
        yield arrow_batch(some)


def arrow_batch(rows: Iterable[tuple[Any, ...]]) -> pa.RecordBatch:
    """Return the rows as one Arrow batch."""
    columns = list(zip(*rows, strict=True)) or [()] * len(ARROW_SCHEMA)
    arrays = [pa.array(_pairs(column, field.type), field.type) for column, field in zip(columns, ARROW_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def _pairs(column: tuple[Any, ...], kind: pa.DataType) -> list[Any]:
    return [list(item.items()) for item in column] if pa.types.is_map(kind) else list(column)


def _moment(timestamp_ms: int) -> datetime | None:
    """Return None if the message has no timestamp, or one outside the years 1 to 9999 (an expiry that means never)."""
    with suppress(ValueError, OverflowError):
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC) if timestamp_ms else None
    return None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
