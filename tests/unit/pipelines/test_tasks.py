"""The rows that transformations get, and the output that the writer makes of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pytest

from bascule.amqp.types import Symbol
from bascule.core.destination import Routing
from bascule.jms.message import JmsMessage, encode_message
from bascule.jms.sections import DATA, PROPERTIES, section_bytes
from bascule.journal.records import Kind, Send, SendFlag, encode_record, send_entry
from bascule.pipelines import arrow_rows as row_batches
from bascule.pipelines import tasks
from bascule.pipelines.divert import DivertEngine, JournalReader, TransformedRecord
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.pipelines.tasks import DATA_KEY, BatchTooLarge, DivertTask, ForeignRow, RowsTask, transformed_of
from bascule.writer.claims import Claim
from bascule.writer.position import Position

UPPER = DivertSpec("upper", "orders", "out", select=("upper(text) AS value",))
START = Position("journal", "id", 0, 0, epoch=-1, sequence=0)
#: A message with the content type of text, and a body that is not text. The broker does not decode bodies, so it accepts the message.
NO_TEXT = section_bytes(PROPERTIES, [None] * 6 + [Symbol("text/plain")]) + section_bytes(DATA, b"\xff")


def text(body: str, expiration_ms: int = 0) -> bytes:
    return encode_message(JmsMessage(message_id=f"ID:{body}", body_kind="text", body=body, timestamp_ms=1, expiration_ms=expiration_ms))


def journal(*bodies: bytes, addresses: Sequence[str] = ()) -> bytes:
    """Return a journal record with a message for each body. The default of ``addresses`` is "orders" for all messages."""
    places = zip(addresses or ["orders"] * len(bodies), bodies, strict=True)
    sends = (Send(SendFlag.DURABLE, Routing.ANYCAST, 4, 1, 0, 0, address, (), (), (), None, body) for address, body in places)
    return encode_record(Kind.DATA, 0, 1, b"".join(map(send_entry, sends)))


RECORDS = pa.schema(
    [
        ("divert", pa.string()), ("offset", pa.int64()), ("index", pa.int32()), ("topic", pa.string()), ("has_key", pa.bool_()),
        ("key", pa.binary()), ("value", pa.binary()), ("headers", pa.map_(pa.string(), pa.string())),
    ]
)  # fmt: skip


class Idle:
    """A carrier of a position behind the first journal record."""

    begun_at = 2
    written = 0
    spans = None

    def __init__(self, *_: object, unseen: bool) -> None:
        """Ignore the position. The rows are those of Spark's consumer, which does not say from which leader it reads."""
        assert unseen

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing."""

    def commit(self) -> None:
        """Commit nothing."""


def rows(value: bytes, task: RowsTask | None = None) -> pa.Table:
    batch = pa.RecordBatch.from_pydict({"offset": [1], "key": [DATA_KEY], "value": [value]})
    return pa.Table.from_batches((task or RowsTask(UPPER))(iter([batch])))


def written(
    value: bytes, made: dict[tuple[str, int, int], list[TransformedRecord]], failed: dict[tuple[str, int, int], str] | None = None
) -> Sequence[tuple[str, bytes]]:
    """Return (topic, value) of each output of a divert for the rows that its transformation made."""
    task = DivertTask(PipelinesSpec("bridge", {}), Claim("diverts/journal/0", "journal", "id", 0, "me"), (UPPER,), failed=failed or {})
    engine = DivertEngine("bridge", ("journal", 0), "dead")
    transformed = partial(transformed_of, made, task.failed)
    found = JournalReader(START, [UPPER]).take(1, DATA_KEY, value)
    return [(output.topic, output.value) for taken in found for _, output in engine.outputs(taken, transformed)]


@pytest.mark.parametrize("expiration_ms", [2**63 - 1, -(2**63), 253_402_300_800_000])
def test_message_with_expiry_beyond_calendar_has_row_without_expiration(expiration_ms: int) -> None:
    assert rows(journal(text("never", expiration_ms)))["expiration"].to_pylist() == [None]


def test_message_unreadable_for_transformation_is_dead_lettered_and_filtered_message_is_not() -> None:
    value = journal(text("left out"), NO_TEXT, text("kept"))
    assert rows(value)["index"].to_pylist() == [0, 2]
    made = {("upper", 1, 2): [TransformedRecord(None, False, None, b"KEPT", {})]}
    assert written(value, made) == [("dead", NO_TEXT), ("out", b"KEPT")]


def test_failed_transformation_of_message_does_not_affect_other_messages_of_record() -> None:
    bodies = [text(str(number)) for number in range(4)]
    value = journal(*bodies)
    assert rows(value, RowsTask(UPPER, frozenset({(1, 1)})))["index"].to_pylist() == [0, 2, 3]
    assert rows(value, RowsTask(UPPER, first=(1, 1), last=(1, 2)))["index"].to_pylist() == [1, 2]
    made = {("upper", 1, index): [TransformedRecord(None, False, None, b"good", {})] for index in (0, 2, 3)}
    assert written(value, made, {("upper", 1, 1): "unlucky"}) == [("out", b"good"), ("dead", bodies[1]), ("out", b"good"), ("out", b"good")]


def test_transformed_message_is_matched_by_index_among_all_messages_of_record() -> None:
    bodies = [text(str(number)) for number in range(4)]
    value = journal(*bodies, addresses=("others", "orders", "others", "orders"))
    assert rows(value)["index"].to_pylist() == [1, 3]
    made = {("upper", 1, index): [TransformedRecord(None, False, None, b"%d" % index, {})] for index in (1, 3)}
    assert written(value, made) == [("out", b"1"), ("out", b"3")]


@pytest.mark.parametrize(
    ("bound", "most", "message"),
    [
        ("ARROW_ROWS", 2, text("small")),
        ("ARROW_BYTES", 15_000, encode_message(JmsMessage(body_kind="bytes", body=bytes(10_000)))),
        ("ARROW_BYTES", 15_000, encode_message(JmsMessage(properties={"large": 10_000 * "x"}))),
    ],
    ids=["rows", "bodies", "properties"],
)
def test_message_rows_are_split_into_bounded_arrow_batches(monkeypatch: pytest.MonkeyPatch, bound: str, most: int, message: bytes) -> None:
    monkeypatch.setattr(row_batches, bound, most)
    found = rows(journal(*[message] * 5))
    assert [batch.num_rows for batch in found.to_batches()] == [2, 2, 1]
    assert found["index"].to_pylist() == list(range(5))


@pytest.mark.parametrize(("room", "fits"), [(20_000, True), (10_000, False), (None, True)])
def test_transformed_output_is_held_up_to_byte_limit(monkeypatch: pytest.MonkeyPatch, room: int | None, fits: bool) -> None:
    monkeypatch.setattr(tasks, "held_position", lambda *_: START)
    monkeypatch.setattr(tasks, "Carrier", Idle)
    made = [{"divert": "upper", "offset": 1, "index": index, "has_key": False, "value": bytes(500)} for index in range(10)]
    own = {"offset": 1, "has_key": False, "key": DATA_KEY, "value": journal(text("carried"))}
    batches = [pa.RecordBatch.from_pylist(some, schema=RECORDS) for some in (made[:5], made[5:], [own])]
    task = DivertTask(PipelinesSpec("bridge", {}), Claim("diverts/journal/0", "journal", "id", 0, "me"), (UPPER,), made_bytes_max=room)
    if fits:
        assert len(list(task(iter(batches)))) == 1
    else:
        with pytest.raises(BatchTooLarge):
            list(task(iter(batches)))


@pytest.mark.parametrize(
    ("offset", "index"), [(0, 0), (3, 0), (1, 1), (1, 2), (2, 0), (None, 0), (1, None)],
    ids=["earlier offset", "later offset", "message of another divert", "no such message", "no message at all", "no offset", "no index"],
)  # fmt: skip
def test_row_of_no_message_that_the_transformation_got_is_an_error(
    monkeypatch: pytest.MonkeyPatch, offset: int | None, index: int | None
) -> None:
    """Otherwise its message would be taken for one that the transformation leaves out."""
    monkeypatch.setattr(tasks, "held_position", lambda *_: START)
    monkeypatch.setattr(tasks, "Carrier", Idle)
    monkeypatch.setattr(tasks, "carry_messages", lambda *_: None)
    monkeypatch.setattr(Idle, "begun_at", 0)
    value = journal(text("own"), text("other"), addresses=("orders", "elsewhere"))
    own = [
        {"offset": 1, "has_key": False, "key": DATA_KEY, "value": value},
        {"offset": 2, "has_key": False, "key": b"S", "value": b"a foreign record"},
    ]
    good = {"divert": "upper", "offset": 1, "index": 0, "has_key": False, "value": b"OWN"}
    task = DivertTask(PipelinesSpec("bridge", {}), Claim("diverts/journal/0", "journal", "id", 0, "me"), (UPPER,))
    assert list(task(iter([pa.RecordBatch.from_pylist([good, *own], schema=RECORDS)])))
    with pytest.raises(ForeignRow, match=f"offset {offset} and index {index}"):
        list(task(iter([pa.RecordBatch.from_pylist([good, {**good, "offset": offset, "index": index}, *own], schema=RECORDS)])))


def test_row_of_a_message_that_the_fence_drops_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "held_position", lambda *_: replace(START, epoch=5))
    monkeypatch.setattr(tasks, "Carrier", Idle)
    monkeypatch.setattr(tasks, "carry_messages", lambda *_: None)
    monkeypatch.setattr(Idle, "begun_at", 0)
    rows = [
        {"divert": "upper", "offset": 1, "index": 0, "has_key": False, "value": b"LATE"},
        {"offset": 1, "has_key": False, "key": DATA_KEY, "value": journal(text("late"))},
    ]
    task = DivertTask(PipelinesSpec("bridge", {}), Claim("diverts/journal/0", "journal", "id", 0, "me"), (UPPER,))
    assert list(task(iter([pa.RecordBatch.from_pylist(rows, schema=RECORDS)])))
