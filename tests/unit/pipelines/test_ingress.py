"""Kafka records as JMS messages."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.config.settings import Settings
from bascule.core.destination import Routing
from bascule.core.errors import BadRecord
from bascule.core.kafka_records import KafkaRecord, Output
from bascule.jms.from_kafka import property_name
from bascule.jms.message import JmsMessage, decode_message
from bascule.jms.record import kafka_headers, record_value
from bascule.jms.record_headers import ERRORS
from bascule.journal.records import KafkaOrigin, Send, SendFlag, decode_send, entries
from bascule.pipelines.failures import CarriedError, encoded, error_from_spark
from bascule.pipelines.ingress import IngressEngine
from bascule.pipelines.redrive_engine import RedriveEngine
from bascule.pipelines.spec import IngressSpec, PipelinesSpec, from_settings
from bascule.writer.dead_letters import dead_letter_of

RECORD = KafkaRecord("topic.a", 3, 42, b"key", b'{"n": 1, "s": "t"}', [("plain", b"p"), ("jms.int.size", b"7")], 1_700_000_000_000)


def engine(dead_letter_topic: str | None = "dead", **choices: object) -> IngressEngine:
    ingress = IngressSpec("in", **{"target": "to.${topic}", "topics": ("topic.a",), **choices})  # type: ignore[arg-type]
    return IngressEngine(ingress, "bridge", "ingress", dead_letter_topic)


def sent(record: KafkaRecord, **choices: object) -> Send:
    output = engine(**choices).output(record)
    assert output is not None
    assert output.topic == "ingress"
    return send_in(output)


def send_in(output: Output) -> Send:
    """Return the message in a record for the broker."""
    value = output.value or b""
    ((_, start, end),) = entries(value)
    return decode_send(value, start, end)


def test_kafka_record_becomes_message_with_its_coordinates() -> None:
    send = sent(RECORD, routing=Routing.ANYCAST)
    assert (send.address, send.routing, send.source) == ("to.topic.a", Routing.ANYCAST, KafkaOrigin("topic.a", 3, 42))
    assert send.flags == SendFlag.DURABLE | SendFlag.FROM_KAFKA | SendFlag.SOURCE
    message = decode_message(send.body)
    assert (message.destination, message.destination_kind, message.timestamp_ms) == ("to.topic.a", "queue", RECORD.timestamp_ms)
    assert message.body == '{"n": 1, "s": "t"}'
    assert message.properties == {
        "plain": "p", "size": 7, "kafka_topic": "topic.a", "kafka_partition": 3, "kafka_offset": 42,
        "kafka_timestamp": RECORD.timestamp_ms, "kafka_key": "key",
    }  # fmt: skip


NAMING = RECORD._replace(headers=[("jms.JMSXUserID", b"mallory"), ("JMSXUserID", b"mallory")])


@pytest.mark.parametrize(
    ("validated", "keep", "expected"),
    [("off", "", "mallory"), ("check", "", None), ("require", "", None), ("set", "", None),
     ("off", "keep_user_id = false", None), ("set", "keep_user_id = true", "mallory")],
)  # fmt: skip
def test_record_names_a_user_only_if_the_settings_trust_it(validated: str, keep: str, expected: str | None) -> None:
    settings = Settings.model_validate(
        {"broker": {"validated_user": validated}, "ingress": [{"name": "in", "topics": ["topic.a"], **tomllib.loads(keep)}]}
    )
    (spec,) = from_settings(settings, "").ingresses
    output = IngressEngine(spec, "bridge", "ingress", None).output(NAMING)
    assert output is not None
    message = decode_message(send_in(output).body)
    assert message.user_id == expected
    assert message.properties["kafka_JMSXUserID"] == "mallory", "a header of another name is a property of another name"


@pytest.mark.parametrize(
    ("validated", "keep", "expected"),
    [("off", "", "mallory"), ("off", "keep_user_id = false", None), ("check", "", "stock"), ("require", "", "stock"), ("set", "", "stock"),
     ("set", "keep_user_id = false", None), ("set", "keep_user_id = true", "mallory")],
)  # fmt: skip
def test_user_of_an_ingress_is_in_each_record_for_the_broker_and_in_messages_if_the_broker_validates_users(
    validated: str, keep: str, expected: str | None
) -> None:
    settings = Settings.model_validate(
        {
            "broker": {"validated_user": validated},
            "ingress": [{"name": "in", "topics": ["topic.a"], "user": "stock", **tomllib.loads(keep)}],
        }
    )
    (spec,) = from_settings(settings, "").ingresses
    output = IngressEngine(spec, "bridge", "ingress", None).output(NAMING._replace(headers=[*NAMING.headers, ("user", b"mallory")]))
    assert output is not None
    assert output.headers == [("unbound", b"drop"), ("user", b"stock")]
    assert decode_message(send_in(output).body).user_id == expected


@pytest.mark.parametrize("header", ["jms.int.pin", "jms.long.card_pin"])
def test_reason_of_a_dead_letter_does_not_show_a_masked_property(header: str) -> None:
    record = RECORD._replace(headers=[(header, b"my secret")])
    for masked, shown in ((("*PIN*",), False), ((), True)):
        output = engine(masked=masked).output(record)
        assert output is not None
        assert output.topic == "dead"
        said = dict(output.headers)[f"{ERRORS}exception.message"].decode()
        assert (header in said, "my secret" in said) == (True, shown)


def test_record_key_can_become_message_group() -> None:
    assert sent(RECORD, key_as="group-id").flags & SendFlag.GROUPED
    assert decode_message(sent(RECORD, key_as="group-id").body).group_id == "key"


@pytest.mark.parametrize(("body", "expected"), [("bytes", b'{"n": 1, "s": "t"}'), ("map", {"n": 1, "s": "t"})])
def test_ingress_body_setting_determines_body_kind(body: str, expected: object) -> None:
    assert decode_message(sent(RECORD, body=body).body).body == expected


def test_record_that_exceeds_message_limit_is_dead_lettered() -> None:
    small = IngressEngine(IngressSpec("in", "queue", ("t",)), "bridge", "ingress", "dead", message_bytes_max=len(sent(RECORD).body))
    output, larger = small.output(RECORD), small.output(RECORD._replace(value=b"x" * 1000))
    assert output is not None
    assert larger is not None
    assert (output.topic, larger.topic) == ("ingress", "dead")
    assert b"; the limit is " in dict(larger.headers)["__connect.errors.exception.message"]  # type: ignore[operator]


def test_message_limit_of_ingress_is_broker_setting() -> None:
    settings = Settings.model_validate({"broker": {"max_message_bytes": 1 << 20}})
    assert from_settings(settings, "kafka:9092").message_bytes_max == 1 << 20


def test_records_written_by_same_bridge_are_skipped() -> None:
    assert engine().output(RECORD._replace(headers=[("bascule.origin", b"bridge")])) is None
    assert engine().output(RECORD._replace(headers=[("bascule.origin", b"another")])) is not None


@pytest.mark.parametrize(
    ("body", "value", "reason"),
    [
        ("text", b"\xff", b"not UTF-8"),
        ("map", b"no json", b"not valid JSON"),
        ("map", b"[" * 100_000, b"not valid JSON"),
        ("map", b"[1]", b"not a JSON object"),
        ("map", b'{"a": {"b": 1}}', b"'a' is nested"),
    ],
)
def test_unconvertible_record_value_is_dead_lettered_unchanged(body: str, value: bytes, reason: bytes) -> None:
    output = engine(body=body).output(RECORD._replace(value=value))
    assert output is not None
    assert (output.topic, output.key, output.value) == ("dead", b"key", value)
    headers = dict(output.headers)
    assert reason in (headers["__connect.errors.exception.message"] or b"")  # type: ignore[operator]
    assert headers["plain"] == b"p"
    with pytest.raises(BadRecord):
        engine(dead_letter_topic=None, body=body).output(RECORD._replace(value=value))


def test_error_text_with_lone_surrogate_is_stored_in_dead_letter() -> None:
    output = engine(body="map").output(RECORD._replace(value=b'{"\\ud800": 1}', headers=[("jms.body", b"map")]))
    assert output is not None
    assert b"\\ud800" in (dict(output.headers)["__connect.errors.exception.message"] or b"")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("record", "target"),
    [
        (RECORD._replace(value=b"\xff"), "to"),
        (RECORD._replace(headers=[("jms.int.size", b"much")]), "to"),
        (RECORD, "${header:to}"),
        (RECORD._replace(value=b'{"\\ud800": 1}', headers=[("jms.body", b"map")]), "to"),
    ],
    ids=["no text", "no number", "no header", "half a surrogate pair"],
)
def test_bad_record_stops_ingress_without_dead_letter_topic(record: KafkaRecord, target: str) -> None:
    with pytest.raises(BadRecord) as stopped:
        engine(None, target=target, body="map" if b"{" in (record.value or b"") else "text").output(record)
    found = error_from_spark(CarriedError(encoded(stopped.value)))
    assert (type(found), str(found)) == (BadRecord, str(stopped.value))


def test_tombstone_becomes_empty_message_with_property() -> None:
    message = decode_message(sent(RECORD._replace(value=None)).body)
    assert message.body is None
    assert message.properties["kafka_tombstone"] is True


@pytest.mark.parametrize("value", [None, b""])
def test_record_without_a_value_stays_one_as_a_dead_letter_and_when_it_is_redriven(value: bytes | None) -> None:
    record = RECORD._replace(value=value, headers=[("null", None), ("empty", b"")])
    buried = engine(target="${header:gone}").output(record)
    assert buried is not None
    assert (buried.topic, buried.value, buried.headers[:2]) == ("dead", value, record.headers)
    letter = dead_letter_of(KafkaRecord("dead", 0, 0, buried.key, buried.value, buried.headers, buried.timestamp_ms))  # type: ignore[arg-type]
    assert letter is not None
    assert letter.headers == tuple(record.headers)
    mended = PipelinesSpec("bridge", {}, ingresses=(IngressSpec("in", "queue", ("topic.a",)),))
    message = decode_message(send_in(RedriveEngine(mended).redriven(letter).output).body)
    assert message.properties.get("kafka_tombstone") is (True if value is None else None)


def test_tombstone_that_the_topic_of_the_broker_refused_is_complete_without_a_value() -> None:
    for value, said in ((None, ""), (b"", "the dead letter has no value: it was too large for the dead-letter topic")):
        buried = engine().dead_letter(RECORD._replace(value=value), "KAFKA_PRODUCE", BadRecord("refused"))
        letter = dead_letter_of(KafkaRecord("dead", 0, 0, buried.key, buried.value, buried.headers, 1))  # type: ignore[arg-type]
        assert letter is not None
        assert letter.incomplete == said


def test_non_utf8_key_and_header_are_base64_properties() -> None:
    message = decode_message(sent(RECORD._replace(key=b"\xff", headers=[("h", b"\xfe")])).body)
    assert message.properties["kafka_key_base64"] == "/w=="
    assert message.properties["h_base64"] == "/g=="


@pytest.mark.parametrize(("choice", "field", "expected"), [("correlation-id", "correlation_id", "key"), ("group-id", "group_id", "key")])
def test_record_key_goes_to_configured_message_field(choice: str, field: str, expected: str) -> None:
    assert getattr(decode_message(sent(RECORD, key_as=choice).body), field) == expected
    assert decode_message(sent(RECORD, key_as="property:k").body).properties["k"] == "key"


@pytest.mark.parametrize(("header", "name"), [("a-b.c", "a_b_c"), ("1x", "kafka_1x"), ("JMSFoo", "kafka_JMSFoo"), ("ok_$1", "ok_$1")])
def test_header_name_becomes_java_identifier(header: str, name: str) -> None:
    assert property_name(header) == name


@pytest.mark.parametrize(
    ("header", "address", "routing", "kind"),
    [
        (b"temporary-queue://temp.1", "temp.1", Routing.ANYCAST, "temporary-queue"),
        (b"queue://answers", "answers", Routing.ANYCAST, "queue"),
        (b"topic://answers", "answers", Routing.MULTICAST, "topic"),
        (b"answers", "answers", Routing.MULTICAST, "topic"),
    ],
)
def test_header_can_name_destination_and_its_type(header: bytes, address: str, routing: Routing, kind: str) -> None:
    record = RECORD._replace(headers=[("to", b"an earlier one"), ("to", header)])
    send = sent(record, target="${header:to}")
    assert (send.address, send.routing) == (address, routing)
    message = decode_message(send.body)
    assert (message.destination, message.destination_kind) == (address, kind)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], b"no header 'to', which the template '${header:to}' uses"),
        ([("to", b"")], b"no header 'to'"),
        ([("to", b"\xff")], b"header 'to' is not UTF-8 text"),
        ([("to", b"queue://")], b"an address has 1 to 1000 characters"),
        ([("to", b"x" * 1001)], b"an address has 1 to 1000 characters"),
        ([("to", b"$management")], b"invalid address $management: clients cannot consume"),
        ([("to", b"topic://$management")], b"invalid address $management: clients cannot consume"),
    ],
)
def test_record_without_valid_destination_header_is_dead_lettered(headers: list[tuple[str, bytes]], reason: bytes) -> None:
    output = engine(target="${header:to}").output(RECORD._replace(headers=headers))
    assert output is not None
    assert output.topic == "dead"
    assert reason in dict(output.headers)["__connect.errors.exception.message"]  # type: ignore[operator]


def test_reply_to_is_built_from_header_or_omitted() -> None:
    asked = decode_message(sent(RECORD._replace(headers=[("reply", b"rates.eu")]), reply_to="kafka.${header:reply}").body)
    assert (asked.reply_to, asked.reply_to_kind) == ("kafka.rates.eu", "queue")
    told = decode_message(sent(RECORD, reply_to="kafka.${header:reply}").body)
    assert told.reply_to is None


@given(st.text(max_size=50), st.dictionaries(st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True), st.integers(-(2**63), 2**63 - 1)))
def test_message_written_by_divert_round_trips_with_types(text: str, properties: dict[str, int]) -> None:
    message = JmsMessage(body_kind="text", body=text, message_id="ID:1", correlation_id="c", properties=dict(properties))
    record = KafkaRecord("t", 0, 0, None, record_value(message), kafka_headers(message), 1)
    back = decode_message(sent(record).body)
    # A message without a body and an empty text make the same record, because its value is never null.
    assert (back.body or "", back.message_id, back.correlation_id) == (text, "ID:1", "c")
    assert {name: back.properties[name] for name in properties} == properties
