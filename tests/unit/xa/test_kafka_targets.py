"""Records that a topic would refuse when a branch commits."""

from __future__ import annotations

import math

import pytest

from bascule.core.kafka_records import Outgoing
from bascule.xa.kafka_targets import CLOCKS_DIFFER_MS, TargetRules, size_bytes_of

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
SIZE = {"max.message.bytes": "1000"}


def refusal(settings: dict[str, str], *, key: bytes | None = b"k", partition: int = -1, at_ms: int = 0, size_bytes: int = 10) -> str:
    record = Outgoing("t", key, b"v", [], partition, at_ms)
    found = TargetRules.of(SIZE | settings, 3).refusal(record, size_bytes, NOW_MS)
    return "" if found is None else str(found)


def test_record_beyond_size_or_partitions_is_refused() -> None:
    assert refusal({}, size_bytes=1000) == ""
    assert "1001 bytes is too large for topic 't'" in refusal({}, size_bytes=1001)
    assert refusal({}, partition=2) == ""
    assert refusal({}, partition=3) == "topic 't' has no partition 3: it has 3 partitions"
    assert "no partition -2" in refusal({}, partition=-2)


@pytest.mark.parametrize(("policy", "refused"), [("delete", False), ("compact", True), ("compact,delete", True)])
def test_record_without_key_is_refused_by_compacted_topic(policy: str, refused: bool) -> None:
    assert ("needs a key" in refusal({"cleanup.policy": policy}, key=None)) is refused
    assert refusal({"cleanup.policy": policy}, key=b"") == ""


def test_timestamp_beyond_limits_of_topic_is_refused() -> None:
    limits = {"message.timestamp.before.max.ms": str(2 * HOUR_MS), "message.timestamp.after.max.ms": str(HOUR_MS)}
    assert refusal(limits, at_ms=NOW_MS + HOUR_MS - CLOCKS_DIFFER_MS) == ""
    assert "message.timestamp.after.max.ms is 3600000" in refusal(limits, at_ms=NOW_MS + HOUR_MS)
    assert refusal(limits, at_ms=NOW_MS - 2 * HOUR_MS + CLOCKS_DIFFER_MS) == ""
    assert "message.timestamp.before.max.ms is 7200000" in refusal(limits, at_ms=NOW_MS - 2 * HOUR_MS)
    assert refusal(limits) == ""  # the time of the commit
    assert "no time before 1970" in refusal({}, at_ms=-1)
    assert refusal({**limits, "message.timestamp.type": "LogAppendTime"}, at_ms=1) == ""


def test_limit_of_earlier_kafka_applies_in_both_directions() -> None:
    limits = {"message.timestamp.difference.max.ms": str(HOUR_MS)}
    assert "after.max.ms is 3600000" in refusal(limits, at_ms=NOW_MS + 2 * HOUR_MS)
    assert "before.max.ms is 3600000" in refusal(limits, at_ms=NOW_MS - 2 * HOUR_MS)
    assert TargetRules.of(SIZE, 1).after_ms == math.inf


def test_size_of_record_counts_bytes_of_header_names() -> None:
    plain = size_bytes_of(Outgoing("t", None, b"", [("n" * 100, None)], -1))
    assert size_bytes_of(Outgoing("t", None, b"", [("\u00e9" * 100, None)], -1)) == plain + 100
