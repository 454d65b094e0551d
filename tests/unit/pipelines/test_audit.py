"""The audit's result for lost, repeated, changed, reordered and foreign records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Message, Producer

from bascule.config.settings import Settings
from bascule.core.errors import InvalidInput
from bascule.pipelines.audit import AuditResult, audit, audit_diverts
from bascule.pipelines.spec import DivertSpec, StartPosition
from bascule.writer.position import EARLIEST
from tests.scenarios.sparkless import Bridge
from tests.support.journal import text_message
from tests.support.mock_cluster import MockCluster

#: Offsets of the messages "1" to "4", after the start of the epoch. Each journal record has one message.
FIRST, END = 1, 5


class Carried:
    """A divert that has carried four messages to its topic. A test then damages the topic."""

    def __init__(self, kafka: MockCluster, bridge: Bridge, **more: Any) -> None:
        self.kafka, self.bridge = kafka, bridge
        self.divert = bridge.divert("plain", start=StartPosition(EARLIEST), **more)
        self.topic = f"{bridge.pipelines.topics.prefix}.plain"
        kafka.create(self.topic)
        bridge.journal.start_epoch()
        bridge.send("1", "2", "3", "4")
        with bridge.running(self.divert) as running:
            running.settle()
        self.records = bridge.records("plain")
        self._producer = Producer(kafka.kafka)

    def lose(self, count: int = 1) -> None:
        """Delete the first records of the topic."""
        self.kafka.delete_records(self.topic, count)

    def put(self, like: Message, value: bytes | None = None, key: bytes | None = None, topic: str = "", **headers: bytes) -> None:
        """Produce a copy of a record, with changes, to the divert's topic or to ``topic``."""
        marks: dict[str, Any] = dict(like.headers() or ()) | {f"bascule.{name}": said for name, said in headers.items()}
        self._producer.produce(topic or self.topic, like.value() if value is None else value, key or like.key(), 0, headers=marks)
        assert self._producer.flush(30) == 0

    def found(self, *divert: DivertSpec, **limits: Any) -> AuditResult:
        (result,) = audit_diverts(replace(self.bridge.pipelines, diverts=divert or (self.divert,)), **limits)
        return result


@pytest.fixture
def carried(kafka: MockCluster, bridge: Bridge) -> Carried:
    return Carried(kafka, bridge)


def counts(result: AuditResult) -> dict[str, int]:
    names = ("lost", "duplicated", "unexpected", "different", "out_of_order")
    return {name: getattr(result, name) for name in names if getattr(result, name)}


def test_audit_is_exact_when_each_journaled_message_is_in_topic_once(carried: Carried) -> None:
    result = carried.found()
    assert result.exact
    assert (result.divert, result.start, result.end) == ("plain", 0, END)
    assert (result.expected, result.found, result.dead_lettered, result.first_difference) == (4, 4, 0, "")
    assert result.journal_digest == result.topic_digest


def test_audit_counts_missing_message_as_lost(carried: Carried) -> None:
    carried.lose(2)
    result = carried.found()
    assert counts(result) == {"lost": 2}
    assert not result.exact
    assert (result.found, result.first_difference) == (2, "0-1-0 lost")
    assert result.journal_digest != result.topic_digest


def test_audit_counts_repeated_message_as_doubled(carried: Carried) -> None:
    carried.put(carried.records[1])
    result = carried.found()
    assert counts(result) == {"duplicated": 1}
    assert (result.exact, result.first_difference) == (False, "0-2-0 duplicated")


@pytest.mark.parametrize("changed", [{"value": b"other"}, {"key": b"other"}])
def test_audit_counts_changed_key_or_value_as_different(carried: Carried, changed: Mapping[str, Any]) -> None:
    carried.lose(4)
    for record in carried.records:
        carried.put(record, **(changed if record is carried.records[2] else {}))
    result = carried.found()
    assert counts(result) == {"different": 1}
    assert (result.exact, result.first_difference) == (False, "0-3-0 different")
    assert result.journal_digest != result.topic_digest


def test_audit_counts_message_behind_later_one_as_out_of_order(carried: Carried) -> None:
    carried.lose()
    carried.put(carried.records[0])
    result = carried.found()
    assert counts(result) == {"out_of_order": 1}
    assert (result.exact, result.first_difference) == (False, "0-1-0 out of order")
    assert result.journal_digest == result.topic_digest


@pytest.mark.parametrize(
    ("identity", "unexpected"), [(b"0-2-1", 1), (b"0-1-0x", 0), (b"9", 0), (b"0-0-0", 0), (b"0-4-1", 0), (b"7-5-0", 0)]
)
def test_audit_counts_record_without_message_as_unexpected_only_within_audited_range(
    carried: Carried, identity: bytes, unexpected: int
) -> None:
    carried.put(carried.records[1], id=identity)
    result = carried.found()
    assert result.unexpected == unexpected
    assert result.exact == (not unexpected)


def test_audit_ignores_records_of_other_bridges_and_diverts(carried: Carried) -> None:
    for mark in ({"origin": b"another"}, {"divert": b"another"}):
        carried.put(carried.records[1], **mark)
    assert carried.found().exact


def test_audit_does_not_count_dead_letter_as_lost(carried: Carried) -> None:
    dead = carried.bridge.pipelines.topics.dead_letters
    carried.kafka.create(dead)
    carried.lose()
    carried.put(carried.records[0], topic=dead)
    carried.put(carried.records[0], topic=dead, id=b"0-2-9")  # an id that the audit does not look for
    carried.put(carried.records[1], topic=dead)  # the message is also in the divert's topic
    result = carried.found()
    assert result.exact
    assert (result.expected, result.found, result.dead_lettered) == (4, 3, 1)


@pytest.mark.parametrize(
    ("limits", "expected", "start", "end"),
    [
        ({"from_offset": FIRST + 1}, 3, 2, END),
        ({"to_offset": FIRST + 1}, 1, 0, 2),
        ({"from_offset": 2, "to_offset": 4}, 2, 2, 4),
        ({"to_offset": 0}, 0, 0, 0),
        ({"from_offset": 9, "to_offset": 3}, 0, 9, 9),
        ({"to_offset": 99}, 4, 0, END),
    ],
)
def test_audit_range_is_limited_to_requested_offsets(carried: Carried, limits: dict[str, int], expected: int, start: int, end: int) -> None:
    result = carried.found(**limits)
    assert (result.expected, result.found, result.start, result.end) == (expected, expected, start, end)
    assert result.exact


def test_audit_starts_after_trimmed_records(carried: Carried) -> None:
    carried.bridge.trim(3)
    result = carried.found()
    assert (result.start, result.expected, result.exact) == (3, 2, True)


def test_audit_ends_at_position_of_divert(carried: Carried) -> None:
    carried.bridge.send("5")
    assert carried.found().end == END
    late = carried.bridge.divert("late")
    assert (carried.found(late).expected, carried.found(late).end) == (0, 0)


def test_audit_of_separate_divert_covers_its_start_to_its_own_position(carried: Carried) -> None:
    bridge = carried.bridge
    late = bridge.divert("late")
    with bridge.running(carried.divert, late):
        pass
    bridge.send("5", "6")
    with bridge.running(carried.divert, replace(late, enabled=False)) as running:
        running.settle()
    assert (carried.found(late).start, carried.found(late).end) == (END, END)
    assert (carried.found().start, carried.found().end) == (0, END + 2)


def test_audit_verifies_only_named_diverts(carried: Carried) -> None:
    both = replace(carried.bridge.pipelines, diverts=(carried.divert, carried.bridge.divert("other")))
    assert [result.divert for result in audit_diverts(both)] == ["plain", "other"]
    assert [result.divert for result in audit_diverts(both, ["plain"])] == ["plain"]
    assert audit_diverts(both, ["missing"]) == []


def test_audit_includes_topics_named_by_messages(kafka: MockCluster, bridge: Bridge) -> None:
    carried = Carried(kafka, bridge)
    divert = replace(carried.divert, target=f"{bridge.pipelines.topics.prefix}.${{address}}")
    result = carried.found(divert)
    assert counts(result) == {"lost": 4}
    topic = f"{bridge.pipelines.topics.prefix}.flights"
    kafka.create(topic)
    for record in carried.records:
        carried.put(record, topic=topic)
    assert carried.found(divert).exact


def test_audit_of_transformation_accepts_any_number_and_content_of_records(carried: Carried) -> None:
    carried.put(carried.records[3])
    carried.put(carried.records[3], value=b"more of it")
    select = replace(carried.divert, select=("text AS value",))
    assert carried.found(select).exact
    carried.lose(1)
    assert counts(carried.found(select)) == {"lost": 1}
    assert carried.found(replace(carried.divert, function="module:function")).exact, "the audit allows a function to drop messages"


def test_audit_counts_unconvertible_message_as_dead_letter(kafka: MockCluster, bridge: Bridge) -> None:
    divert = bridge.divert("plain", start=StartPosition(EARLIEST))
    bridge.journal.start_epoch()
    bridge.journal.send(text_message("1"), b"no message", text_message("2"))
    bridge.journal.flush()
    kafka.create(f"{bridge.pipelines.topics.prefix}.plain")
    with bridge.running(divert) as running:
        running.settle()
    (result,) = audit_diverts(replace(bridge.pipelines, diverts=(divert,)))
    assert (result.expected, result.found, result.dead_lettered, result.exact) == (3, 2, 1, True)


def test_audit_without_kafka_settings_is_refused(carried: Carried) -> None:
    with pytest.raises(InvalidInput, match=r"no Kafka configured; set kafka\.bootstrap_servers"):
        audit(Settings())
    pipelines = carried.bridge.pipelines
    settings = Settings.model_validate(
        {
            "kafka": {"bootstrap_servers": pipelines.kafka["bootstrap.servers"]},
            "journal": {"prefix": pipelines.topics.prefix},
            "bridge": {"id": pipelines.bridge_id},
            "divert": [{"name": "plain", "from": "#", "to": carried.topic}],
        }
    )
    (result,) = audit(settings, to_offset=3)
    assert (result.expected, result.exact) == (2, True)
