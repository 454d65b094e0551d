"""Dead letters that go back to their group."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from bascule.adapter.inbound import ActivationSpec, Record, dead_letters
from bascule.adapter.inbound.dead_letters import DeadLetters
from bascule.adapter.inbound.record import KEY_TOO, VALUE_AND_HEADERS, dead_letter_of
from bascule.core.kafka_records import KafkaRecord, Outgoing

SPEC = ActivationSpec(topics=("payments",), group="shop")
RECORD = Record("payments", 2, 17, b"key", b"value", (("own", b"1"),), 1000)


def letter(left_out: str) -> KafkaRecord:
    _, key, value, headers, _, timestamp_ms = dead_letter_of(RECORD, SPEC, ValueError("no"), left_out=left_out)
    return KafkaRecord("shop.dead-letter", 0, 0, key, value, headers, timestamp_ms)


@pytest.mark.parametrize("left_out", [VALUE_AND_HEADERS, KEY_TOO])
@pytest.mark.parametrize("kept", [True, False])
def test_incomplete_dead_letter_is_completed_from_origin_or_not_returned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool, left_out: str
) -> None:
    def read_again(_kafka: object, topic: str, partition: int, offsets: Collection[int]) -> dict[int, KafkaRecord]:
        assert (topic, partition, list(offsets)) == ("payments", 2, [17])
        return {17: KafkaRecord("payments", 2, 17, b"key", b"value", RECORD.headers, 1000)} if kept else {}

    monkeypatch.setattr(dead_letters, "read_again", read_again)
    dead = DeadLetters({}, "shop")
    whole: Any = dead._returned(letter(""))
    assert whole == Outgoing("shop.retry", b"key", b"value", [("own", b"1"), ("bascule.retry.origin", b"payments/2/17")], timestamp_ms=1000)
    assert dead._returned(letter(left_out)) == (whole if kept else None)
    assert ("payments/2/17" in caplog.text) is not kept
