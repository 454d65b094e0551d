"""The engine of the diverts, on records that the tests encode."""

from __future__ import annotations

import pytest

from bascule.core.destination import Routing
from bascule.core.errors import BadRecord
from bascule.core.kafka_records import Output
from bascule.core.topics import DECISIONS, OUTBOUND, JournalTopics
from bascule.jms.message import JmsMessage, encode_message
from bascule.jms.sections import DATA, SEQUENCE, VALUE, section_bytes
from bascule.jms.to_kafka import target_topic
from bascule.journal.errors import DamagedRecord, NewerRecord
from bascule.journal.records import (
    HEADER_SIZE,
    MAGIC,
    VERSION,
    Kind,
    Op,
    Send,
    SendFlag,
    ack_entry,
    decode_send,
    encode_record,
    json_entry,
    send_entry,
)
from bascule.pipelines import divert
from bascule.pipelines.divert import DivertEngine, JournalReader, TransformedRecord
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.writer.position import Position

START = Position("journal", "id", 0, 0, epoch=-1, sequence=0)


def data(sequence: int, *sends: Send, epoch: int = 0) -> bytes:
    return encode_record(Kind.DATA, epoch, sequence, b"".join(map(send_entry, sends)))


def send(message: JmsMessage | None = None, address: str = "a.b", flags: int = SendFlag.DURABLE, diverts: tuple[str, ...] = ()) -> Send:
    body = encode_message(message or JmsMessage(body_kind="text", body="hello", message_id="ID:1"))
    marks = flags | (SendFlag.DIVERTS if diverts else 0)
    return Send(marks, Routing.ANYCAST, 4, 77, 0, 0, address, (), (), diverts, None, body)


def epoch_start(*exclusive: str, **more: object) -> bytes:
    return encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {"exclusive": list(exclusive), **more}))


def outputs(divert: DivertSpec, one: Send) -> list[Output]:
    reader = JournalReader(START, [divert])
    engine = DivertEngine("bridge", ("journal", 0), "dead", frozenset({"bascule.journal"}))
    return [output for taken in reader.take(1, b"D", data(1, one)) for _, output in engine.outputs(taken)]


def test_state_record_with_header_only_advances_fence() -> None:
    reader = JournalReader(START, [DivertSpec("d", "#")])
    reader.take(0, b"E", epoch_start())
    assert len(reader.take(1, b"D", data(1, send()))) == 1
    assert reader.take(2, b"S", encode_record(Kind.STATE, 0, 2, ack_entry(1, [1]))[:HEADER_SIZE]) == []
    assert len(reader.take(3, b"D", data(3, send()))) == 1
    assert reader.state() == {"epoch": 0, "sequence": 3, "exclusive": ()}


def test_duplicate_and_fenced_records_are_ignored_and_missing_sequence_is_damage() -> None:
    reader = JournalReader(START, [DivertSpec("d", "#")])
    reader.take(0, b"E", epoch_start())
    reader.take(1, b"D", data(1, send()))
    assert reader.take(2, b"D", data(1, send())) == []
    reader.take(3, b"E", epoch_start())
    assert reader.take(4, b"D", data(2, send(), epoch=0)) == []
    assert len(reader.take(5, b"D", data(2, send(), epoch=3))) == 1
    with pytest.raises(DamagedRecord, match="sequence 4 follows 2"):
        reader.take(6, b"D", data(4, send(), epoch=3))


def test_message_identity_counts_earlier_messages_without_matching_divert() -> None:
    record = data(1, send(address="other"), send(), send(address="other"), send())
    taken = JournalReader(START, [DivertSpec("d", "a.b")]).take(1, b"D", record)
    assert [each.index for each in taken] == [1, 3]
    every = JournalReader(START, [DivertSpec("d", "#")]).take(1, b"D", record)
    assert [each.identity for each in taken] == [every[1].identity, every[3].identity]


def test_messages_of_addresses_without_a_divert_are_decoded_once_for_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def decode(value: bytes, start: int, end: int) -> Send:
        found = decode_send(value, start, end)
        decoded.append(found.address)
        return found

    monkeypatch.setattr(divert, "decode_send", decode)
    monkeypatch.setattr(divert, "_FOREIGN_ADDRESSES", 2)
    reader = JournalReader(START, [DivertSpec("d", "a.*"), DivertSpec("picky", "p", selector="FALSE")])
    reader.take(0, b"E", epoch_start())
    sends = [send(address=address) for address in ("b", "a.x", "b", "p", "p", "a.x")]
    assert [taken.identity for taken in reader.take(1, b"D", data(1, *sends))] == ["0-1-1", "0-1-5"]
    assert decoded == ["b", "a.x", "p", "p", "a.x"]
    marked = reader.take(2, b"D", data(2, send(address="b"), send(address="b", diverts=("d",))))
    assert [taken.identity for taken in marked] == ["0-2-1"], "the broker gave it to the divert"
    decoded.clear()
    reader.take(3, b"D", data(3, send(address="c"), send(address="e"), send(address="b")))
    assert decoded == ["c", "e", "b"], "so many addresses are not remembered"


def test_foreign_record_is_skipped_and_logged_with_offset(caplog: pytest.LogCaptureFixture) -> None:
    reader = JournalReader(START, [DivertSpec("d", "#")])
    assert reader.take(7, None, b"what is this?") == []
    assert caplog.messages == [
        f"foreign record skipped topic={START.topic} offset=7 error=\"not a journal record of Bascule (no magic 'BJ')\""
    ]


@pytest.mark.parametrize("key", [b"D", b"S"])
def test_record_of_later_version_is_named_with_offset(key: bytes) -> None:
    value = bytearray(data(1, send()))
    value[len(MAGIC)] = VERSION + 1
    with pytest.raises(NewerRecord, match=f"journal offset 7: journal format {VERSION + 1}; this version of Bascule reads up to {VERSION}"):
        JournalReader(START, [DivertSpec("d", "#")]).take(7, key, bytes(value))


def test_damaged_record_is_named_with_offset() -> None:
    reader = JournalReader(START, [DivertSpec("d", "#")])
    with pytest.raises(DamagedRecord, match="journal offset 7: checksum"):
        reader.take(7, b"D", data(1, send())[:-1] + b"!")


@pytest.mark.parametrize(
    ("in_force", "marked", "colour", "taken"),
    [
        (True, True, "blue", True),
        (True, False, "red", False),
        (False, True, "blue", True),
        (False, False, "red", True),
    ],
)
def test_exclusive_divert_follows_marks_of_epochs_in_which_broker_applied_it(
    in_force: bool, marked: bool, colour: str, taken: bool
) -> None:
    reader = JournalReader(START, [DivertSpec("x", "#", selector="colour = 'red'", exclusive=True)])
    reader.take(0, b"E", epoch_start(*(["x"] if in_force else [])))
    message = JmsMessage(body_kind="text", body="", properties={"colour": colour})
    found = reader.take(1, b"D", data(1, send(message, diverts=("x",) if marked else ())))
    assert bool(found) is taken


def test_exclusive_divert_unknown_to_broker_takes_nothing_and_plain_divert_takes_matching_messages() -> None:
    reader = JournalReader(START, [DivertSpec("x", "#", exclusive=True)])
    reader.take(0, b"E", epoch_start("x", diverts=["x"]))
    assert not reader.take(1, b"D", data(1, send(), epoch=0))
    reader.take(2, b"E", epoch_start(diverts=["another"]))
    assert not reader.take(3, b"D", data(2, send(), epoch=2))
    reader.take(4, b"E", epoch_start(diverts=["x"]))
    assert reader.take(5, b"D", data(3, send(), epoch=4))


def test_message_taken_by_removed_exclusive_divert_is_dead_lettered() -> None:
    reader = JournalReader(START, [DivertSpec("y", "nowhere")], lambda name, epoch: (name, epoch) == ("x", 0))
    reader.take(0, b"E", epoch_start("x"))
    (taken,) = reader.take(1, b"D", data(1, send(diverts=("x",))))
    ((divert, output),) = DivertEngine("bridge", ("journal", 0), "dead").outputs(taken)
    assert (divert.name, output.topic, output.value) == ("x", "dead", taken.send.body)
    reason = dict(output.headers)["__connect.errors.exception.message"]
    assert reason == b"exclusive divert 'x' took the message and is no longer configured"
    with pytest.raises(BadRecord, match="no longer configured"):
        DivertEngine("bridge", ("journal", 0), None).outputs(taken)


def test_exclusive_divert_carries_marked_message_from_kafka_after_from_kafka_is_disabled() -> None:
    reader = JournalReader(START, [DivertSpec("x", "#", exclusive=True)])
    reader.take(0, b"E", epoch_start("x"))
    assert reader.take(1, b"D", data(1, send(flags=SendFlag.DURABLE | SendFlag.FROM_KAFKA, diverts=("x",))))
    assert not reader.take(2, b"D", data(2, send(flags=SendFlag.DURABLE | SendFlag.FROM_KAFKA)))


def test_message_from_kafka_is_diverted_only_with_from_kafka() -> None:
    one = send(flags=SendFlag.DURABLE | SendFlag.FROM_KAFKA)
    assert outputs(DivertSpec("d", "#"), one) == []
    assert len(outputs(DivertSpec("d", "#", from_kafka=True), one)) == 1


def test_divert_record_contains_key_value_headers_and_origin() -> None:
    message = JmsMessage(body_kind="text", body="grüße", message_id="ID:7", group_id="g", timestamp_ms=5, properties={"n": 3, "s": "t"})
    (output,) = outputs(DivertSpec("d", "a.*", "kafka.${address}", key="property:n"), send(message))
    assert (output.topic, output.key, output.value, output.timestamp_ms) == ("kafka.a.b", b"3", "grüße".encode(), 5)
    headers = dict(output.headers)
    assert headers["bascule.origin"] == b"bridge"
    assert headers["bascule.id"] == b"0-1-0"
    assert headers["jms.long.n"] == b"3"
    assert headers["jms.s"] == b"t"


@pytest.mark.parametrize(
    ("key", "expected"),
    [("none", None), ("message-id", b"ID:7"), ("correlation-id", b"c"), ("group-id", b"g"), ("property:b", b"true"), ("property:x", None)],
)
def test_record_key_is_taken_from_configured_message_field(key: str, expected: bytes | None) -> None:
    message = JmsMessage(message_id="ID:7", correlation_id="c", group_id="g", properties={"b": True})
    assert outputs(DivertSpec("d", "#", "t", key=key), send(message))[0].key == expected


def test_message_without_body_has_empty_record_value() -> None:
    assert outputs(DivertSpec("d", "#", "t"), send(JmsMessage()))[0].value == b""


@pytest.mark.parametrize("address", ["no/topic", "x" * 300])
def test_message_with_invalid_topic_name_is_dead_lettered_with_reason(address: str) -> None:
    (output,) = outputs(DivertSpec("d", "#"), send(address=address))
    headers = dict(output.headers)
    assert output.topic == "dead"
    assert b"not a valid name of a Kafka topic" in (headers["__connect.errors.exception.message"] or b"")  # type: ignore[operator]
    assert headers["__connect.errors.connector.name"] == b"d"


@pytest.mark.parametrize("other", [section_bytes(SEQUENCE, [1]), section_bytes(VALUE, "x"), section_bytes(VALUE, b"x")])
def test_a_message_with_two_kinds_of_body_is_dead_lettered(other: bytes) -> None:
    (output,) = outputs(DivertSpec("d", "a.b"), send()._replace(body=section_bytes(DATA, b"abc") + other))
    assert output.topic == "dead"
    assert b"may not follow data" in dict(output.headers)["__connect.errors.exception.message"]


def test_message_unreadable_for_selector_is_dead_lettered() -> None:
    garbage = send()._replace(body=b"\x00garbage")
    (output,) = outputs(DivertSpec("d", "#", "t", selector="n > 1"), garbage)
    assert (output.topic, output.value) == ("dead", b"\x00garbage")


@pytest.mark.parametrize("one", [send(address="no/topic"), send()._replace(body=b"\x00garbage")], ids=["no topic", "no message"])
def test_bad_record_stops_divert_without_dead_letter_topic(one: Send) -> None:
    reader = JournalReader(START, [DivertSpec("d", "#")])
    (taken,) = reader.take(1, b"D", data(1, one))
    with pytest.raises(BadRecord):
        DivertEngine("bridge", ("journal", 0), None).outputs(taken)


def test_transformation_overrides_only_returned_columns() -> None:
    divert = DivertSpec("d", "#", "t", key="message-id", select=("value",))
    reader = JournalReader(START, [divert])
    engine = DivertEngine("bridge", ("journal", 0), "dead")
    (taken,) = reader.take(1, b"D", data(1, send()))
    made = [
        TransformedRecord(None, False, None, b"new", {"jms.body": b"bytes"}),
        TransformedRecord("u", True, None, b"", {}),
    ]
    kept, moved = (output for _, output in engine.outputs(taken, lambda *_: made))
    assert (kept.topic, kept.key, kept.value, dict(kept.headers)["jms.body"]) == ("t", b"ID:1", b"new", b"bytes")
    assert (moved.topic, moved.key) == ("u", None)


def test_message_with_one_null_transformed_record_is_dead_lettered_as_whole() -> None:
    reader = JournalReader(START, [DivertSpec("d", "#", "t", select=("value",))])
    (taken,) = reader.take(1, b"D", data(1, send()))
    made = [TransformedRecord(None, False, None, b"good", {}), TransformedRecord(None, False, None, None, {})]
    ((_, output),) = DivertEngine("bridge", ("journal", 0), "dead").outputs(taken, lambda *_: made)
    assert (output.topic, output.value) == ("dead", taken.send.body)


def test_json_body_keeps_value_types() -> None:
    (output,) = outputs(DivertSpec("d", "#", "t"), send(JmsMessage(body_kind="map", body={"a": 1, "b": True})))
    assert output.value == b'{"a":{"type":"long","value":1},"b":{"type":"boolean","value":true}}'


@pytest.mark.parametrize(
    ("source", "target", "address", "topic"),
    [
        ("kafka.reply.#", "${rest}", "kafka.reply.rates.eu", "rates.eu"),
        ("kafka.reply.#", "re.${rest}", "kafka.reply.rates", "re.rates"),
        ("#", "${rest}", "rates.eu", "rates.eu"),
        ("*.reply.#", "${address}", "a.reply.b", "a.reply.b"),
    ],
)
def test_target_topic_is_built_from_address_or_its_rest(source: str, target: str, address: str, topic: str) -> None:
    assert [output.topic for output in outputs(DivertSpec("d", source, target), send(address=address))] == [topic]


@pytest.mark.parametrize("address", ["kafka.reply", "kafka.reply.__consumer_offsets", "kafka.reply.bascule.journal", "kafka.reply.a/b"])
def test_address_that_yields_invalid_or_internal_topic_is_dead_lettered(address: str) -> None:
    (output,) = outputs(DivertSpec("d", "kafka.reply.#", "${rest}"), send(address=address))
    assert output.topic == "dead"


@pytest.mark.parametrize(
    "name", [DECISIONS, "bascule.xa.side", "bascule.xa.log", OUTBOUND, "orders.journal", "orders.dead", "orders.audit"]
)
def test_message_and_pattern_cannot_name_internal_topic(name: str) -> None:
    own = PipelinesSpec("bridge", {}, topics=JournalTopics("orders", "orders.dead", audit_topic="orders.audit")).topics.reserved
    with pytest.raises(BadRecord, match="one of Bascule's own"):
        target_topic("${address}", name, own=own)
