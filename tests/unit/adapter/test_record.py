"""A record that goes to the retry topic or the dead-letter topic can be restored from there."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.adapter.inbound import ActivationSpec, Record
from bascule.adapter.inbound.record import CAUSE_LENGTH_MAX, dead_letter_of, retry_of, returned
from bascule.adapter.inbound.record import record_of as as_delivered
from bascule.core.kafka_records import KafkaRecord, Outgoing

SPEC = ActivationSpec(topics=("payments",), group="shop")
RECORD = Record("payments", 2, 17, b"key", b"value", (("kept", b"1"), ("kept", b"2")), 1000)


def record_of(received: KafkaRecord) -> tuple[Record, int]:
    return as_delivered(received, SPEC.retry_topic)


def read(outgoing: Outgoing) -> KafkaRecord:
    return KafkaRecord(outgoing.topic, 0, 99, outgoing.key, outgoing.value, outgoing.headers, outgoing.timestamp_ms)


def test_retry_record_keeps_original_record_with_failure_count_and_due_time() -> None:
    record, due_ms = record_of(read(retry_of(RECORD, SPEC, ValueError("no"), 5000)))
    assert record == Record("payments", 2, 17, b"key", b"value", RECORD.headers, 1000, failures=1)
    assert due_ms == 5000
    again, _ = record_of(read(retry_of(record, SPEC, ValueError("no"), 6000)))
    assert (again.failures, again.headers) == (2, RECORD.headers)


def test_dead_letter_contains_origin_and_cause_and_is_returned_without_failure_headers() -> None:
    letter = read(dead_letter_of(RECORD, SPEC, ValueError("x" * 5000)))
    said: dict[str, Any] = dict(letter.headers)
    assert letter.topic == "shop.dead-letter"
    assert said["__connect.errors.offset"] == b"17"
    assert said["__connect.errors.stage"] == b"ENDPOINT"
    assert len(said["__connect.errors.exception.message"]) == CAUSE_LENGTH_MAX
    back = returned(letter)
    assert back is not None
    assert back.topic == "shop.retry"
    record, due_ms = record_of(read(back))
    assert (record, due_ms) == (RECORD, 0)


class Invalid(Exception):
    """An exception with two arguments, like those of many libraries, which a text alone cannot rebuild."""

    def __init__(self, field: str, errors: list[str]) -> None:
        super().__init__(f"{field}: {errors}")


def test_failure_with_unrebuildable_exception_is_described() -> None:
    said: dict[str, Any] = dict(dead_letter_of(RECORD, SPEC, Invalid("amount", ["x" * 5000])).headers)
    assert said["__connect.errors.exception.class.name"] == b"Invalid"
    assert said["__connect.errors.exception.message"].startswith(b"amount: ['xxx")
    assert len(said["__connect.errors.exception.message"]) == CAUSE_LENGTH_MAX


def test_failure_text_with_lone_surrogate_is_encoded() -> None:
    error = ValueError("no account \ud800")
    assert dict(retry_of(RECORD, SPEC, error, 0).headers)["bascule.retry.cause"] == b"ValueError: no account ?"
    assert dict(dead_letter_of(RECORD, SPEC, error).headers)["__connect.errors.exception.message"] == b"no account ?"


def test_foreign_record_in_dead_letter_topic_is_not_returned() -> None:
    assert returned(KafkaRecord("shop.dead-letter", 0, 1, None, b"x", (), 0)) is None


def test_foreign_record_in_retry_topic_is_record_of_retry_topic() -> None:
    headers = [("bascule.retry.origin", b"nowhere"), ("bascule.retry.due", b"soon")]
    record, due_ms = record_of(KafkaRecord("shop.retry", 0, 5, None, b"x", headers, 0))
    assert (record.topic, record.offset, due_ms) == ("shop.retry", 5, 0)


OF_ANOTHER_GROUP = [("bascule.retry.origin", b"orders/0/1"), ("bascule.retry.count", b"4"), ("bascule.retry.due", b"9" * 400)]


def test_dead_letter_of_other_group_is_record_without_failures() -> None:
    received = KafkaRecord("other.dead-letter", 0, 5, None, b"x", OF_ANOTHER_GROUP, 0)
    assert record_of(received) == (Record("other.dead-letter", 0, 5, None, b"x", tuple(OF_ANOTHER_GROUP)), 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("due", b"9" * 400), ("count", b"9" * 5000), ("origin", b"orders/0/" + b"9" * 5000), ("origin", b"orders/99999999999/1")],
)
def test_invalid_number_in_retry_header_is_ignored(name: str, value: bytes) -> None:
    headers = {"origin": b"orders/0/1", name: value}
    record, due_ms = record_of(
        KafkaRecord("shop.retry", 0, 5, None, b"x", [(f"bascule.retry.{each}", said) for each, said in headers.items()], 0)
    )
    assert (record.failures, due_ms) == (0, 0)


def test_last_header_with_same_name_counts() -> None:
    assert RECORD.header("kept") == b"2"
    assert RECORD.header("other") is None
