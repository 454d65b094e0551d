"""Rows of messages as Arrow batches, for Spark. Resident tasks do without this module and without Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from bascule.pipelines.rows import ARROW_ROWS

#: Maximum bytes of bodies and headers in one Arrow batch: a column of Arrow is limited to 2 GiB, and a message may have 64 MiB.
ARROW_BYTES = 16 << 20
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
