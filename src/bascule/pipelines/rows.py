"""A JMS message as a row: the input of a user's transformation, and the rows of ``spark.readStream.format("bascule")``."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

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
#: Columns that identify a message; a transformation must keep them.
IDENTITY = ("offset", "epoch", "sequence", "index")
#: Header with the reason why a row has only some columns. Dead letters use the same name.
REASON = f"{ERRORS}exception.message"


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


def _moment(timestamp_ms: int) -> datetime | None:
    """Return None if the message has no timestamp, or one outside the years 1 to 9999 (an expiry that means never)."""
    with suppress(ValueError, OverflowError):
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC) if timestamp_ms else None
    return None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
