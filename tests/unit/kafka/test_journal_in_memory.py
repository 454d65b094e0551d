"""Readers of topics and of the journal on Kafka in memory: the records that they return, and their reactions to faults."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from confluent_kafka import KafkaError

from bascule.core.destination import Routing
from bascule.core.errors import Unavailable
from bascule.journal.reading import CutOff, Trimmed
from bascule.journal.records import Kind, Op, Send, SendFlag, encode_record, json_entry, send_entry
from bascule.kafka import history, log
from bascule.kafka.admin import ADMIN_TIMEOUT_S
from bascule.kafka.history import LagMirror, TopicHistory, committed_note
from bascule.kafka.log import PartitionReader, takes_appends
from bascule.writer import epochs
from bascule.writer.epochs import exclusive_diverts, first_marks, taken_since
from bascule.writer.position import Position
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]  # imported fixtures


def test_range_is_read_with_or_without_uncommitted_records(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    for value, transaction in ((b"0", None), (b"1", "aborted"), (b"2", None)):
        kafka.put("t", value, transaction=transaction)
    kafka.partition("t").mark("aborted", committed=False)
    kafka.put("t", b"4", transaction="open")
    read = TopicHistory(SETTINGS, "t", 0, 0.5)
    assert (read.earliest(), read.stable(), read.latest()) == (0, 4, 5)
    assert [each.value() for each in read.records(0, 5)] == [b"0", b"1", b"2", b"4"]
    assert [each.value() for each in read.records(0, 4, committed=True)] == [b"0", b"2"]
    assert [each.value() for each in read.records(1, 2)] == [b"1"]
    assert list(read.records(3, 3)) == []
    with pytest.raises(Unavailable, match="t-0 could not be read up to offset 5"):
        list(read.records(0, 5, committed=True))
    assert [kind for kind in kafka.open_clients() if kind == "consumer"] == []


def test_range_ends_at_its_end_offset_when_records_follow(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    kafka.put("t", b"0")
    kafka.put("t", b"1", transaction="done")
    kafka.partition("t").mark("done", committed=True)
    kafka.put("t", b"3")
    assert [each.value() for each in TopicHistory(SETTINGS, "t", 0, 5).records(0, 3)] == [b"0", b"1"]


def test_transient_read_error_is_retried_and_permanent_error_is_raised(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    kafka.put("t", b"0")
    read = TopicHistory(SETTINGS, "t", 0, 5)
    kafka.fail("fetch", KafkaError.NOT_LEADER_FOR_PARTITION)
    assert [each.value() for each in read.records(0, 1)] == [b"0"]
    kafka.fail("fetch", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(Unavailable, match="t-0 cannot be read"):
        list(read.records(0, 1))
    kafka.partition("t").delete(1)
    with pytest.raises(Unavailable, match="t-0 cannot be read"):
        list(read.records(0, 1))


def test_offset_by_time_is_first_record_at_or_after_time_or_end(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    for _ in range(3):
        kafka.put("t", b"")
    for offset, record in kafka.partition("t").records.items():
        record.timestamp_ms = 100 * offset
    read = TopicHistory(SETTINGS, "t", 0)
    assert [read.at_time(ms) for ms in (0, 1, 100, 201)] == [0, 1, 1, 3]


def test_transient_offset_query_error_is_retried(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    read = TopicHistory(SETTINGS, "t", 0, 5)
    kafka.fail("list_offsets", KafkaError.LEADER_NOT_AVAILABLE)
    assert read.latest() == 0
    kafka.fail("list_offsets", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(Unavailable, match="the offsets of t cannot be read"):
        read.latest()
    kafka.fail("admin", KafkaError._INVALID_ARG)
    with pytest.raises(Unavailable, match="could not create a client to read offsets"):
        TopicHistory(SETTINGS, "t", 0)


def test_committed_offset_query_is_retried_while_coordinator_loads(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    assert committed_note(SETTINGS, "g", "t", 0)[0] < 0
    kafka.offsets["g"]["t", 0] = (7, "why")
    kafka.fail("committed", KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
    assert committed_note(SETTINGS, "g", "t", 0) == (7, "why")
    kafka.fail("committed", KafkaError.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(Unavailable, match="group g does not answer"):
        committed_note(SETTINGS, "g", "t", 0)
    assert kafka.open_clients() == []


def test_unstored_lag_is_committed_again_and_note_is_truncated(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    mirror = LagMirror(SETTINGS, "g")
    kafka.fail("commit", KafkaError.COORDINATOR_NOT_AVAILABLE)
    mirror.show({("t", 0): 3}, "x" * 2000)
    mirror.show({})
    assert kafka.offsets["g"]["t", 0] == (3, "x" * history.NOTE_MAX)
    mirror.show({("t", 0): 5})
    mirror.close()
    assert kafka.offsets["g"]["t", 0] == (5, "")
    assert kafka.open_clients() == []


def test_partition_reader_raises_trimmed_or_cut_off(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "ANSWER_TIMEOUT_S", 0.1)
    kafka.create("t")
    for number in range(5):
        kafka.put("t", bytes([number]))
    with closing(PartitionReader(SETTINGS, "t", 0)) as reader:
        reader.seek(1)
        assert [each.value() for each in reader.up_to(4)] == [b"\1", b"\2", b"\3"]
        reader.seek()
        assert len(list(reader.to_end())) == 5
        kafka.partition("t").delete(3)
        reader.seek(1)
        with pytest.raises(Trimmed, match="t begins at offset 3, after the position"):
            reader.read()
        reader.seek(9)
        with pytest.raises(CutOff, match="t ends at offset 5, before the position 9"):
            reader.read()
        reader.seek(3)
        kafka.fail("fetch", KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(Unavailable, match="reading t"):
            reader.read()
        reader.seek(3)
        with pytest.raises(Unavailable, match="reading t: no record for"):
            list(reader.up_to(9))
        monkeypatch.setattr(reader, "read", lambda **_: [])
        with pytest.raises(Unavailable, match="before its end"):
            list(reader.to_end())


def test_partition_reader_replaces_client_that_receives_nothing(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the old client reads from a node that is cut off from the others."""
    monkeypatch.setattr(log, "RENEW_S", 0.1)
    kafka.create("t")
    for number in range(5):
        kafka.put("t", bytes([number]))

    def cut_off(reader: PartitionReader) -> None:
        reader.seek(1)
        monkeypatch.setattr(reader._consumer, "consume", lambda *_: [])

    with closing(PartitionReader(SETTINGS, "t", 0)) as reader:
        cut_off(reader)
        assert [each.value() for each in reader.up_to(4)] == [b"\1", b"\2", b"\3"]
        cut_off(reader)
        assert [each.value() for each in reader.to_end()] == [b"\1", b"\2", b"\3", b"\4"]
    assert kafka.open_clients() == []


def test_offset_range_query_is_retried_after_broken_connection(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    with closing(PartitionReader(SETTINGS, "t", 0)) as reader:
        kafka.fail("get_watermark_offsets", KafkaError._TRANSPORT)
        assert reader.range() == (0, 0)
        kafka.fail("get_watermark_offsets", KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(Unavailable, match="Kafka does not answer for topic t"):
            reader.range()


def test_takes_appends_requires_min_in_sync_replicas_and_readable_offsets(kafka: KafkaInMemory) -> None:
    topic = kafka.create("t", min_insync_replicas="2")
    topic.replicas = topic.in_sync = 2
    assert takes_appends(SETTINGS, "t", 0, 0.1)
    topic.in_sync = 1
    assert not takes_appends(SETTINGS, "t", 0, 0.1)
    topic.in_sync = 2
    kafka.fail("list_offsets", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert not takes_appends(SETTINGS, "t", 0, 0.1)
    assert not takes_appends(SETTINGS, "t", 1, 0.1)


@pytest.mark.parametrize("failing", ["describe_configs", "list_offsets"])
def test_takes_appends_is_false_when_kafka_does_not_answer_in_time(kafka: KafkaInMemory, failing: str) -> None:
    kafka.create("t", min_insync_replicas="1")
    kafka.fail(failing, KafkaError.UNKNOWN_TOPIC_OR_PART, times=1_000)
    begun_s = time.monotonic()
    assert not takes_appends(SETTINGS, "t", 0, 0.1)
    assert not takes_appends(SETTINGS, "missing", 0, 0.1)
    assert time.monotonic() - begun_s < ADMIN_TIMEOUT_S / 2


def start(kafka: KafkaInMemory, *exclusive: str) -> int:
    return kafka.put("j", encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {"exclusive": list(exclusive)})))


def data(kafka: KafkaInMemory, epoch: int, *diverts: str) -> int:
    flags = SendFlag.DURABLE | (SendFlag.DIVERTS if diverts else 0)
    send = Send(flags, Routing.ANYCAST, 4, 0, 0, 0, "q", (1,), (), diverts, None, b"")
    return kafka.put("j", encode_record(Kind.DATA, epoch, 1, send_entry(send)))


def test_epochs_and_their_exclusive_diverts_are_found_backwards(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "STRAY_RECORDS_MAX", 2)
    kafka.create("j")
    first = start(kafka, "a")
    data(kafka, first)
    kafka.put("j", b"foreign")
    kafka.put("j", b"foreign")
    kafka.put("j", b"foreign")
    second = start(kafka, "b", "a")
    data(kafka, first)  # a record of the replaced broker
    data(kafka, second, "b")
    third = start(kafka)
    read = TopicHistory(SETTINGS, "j", 0, 5)
    end = read.latest()
    assert exclusive_diverts(read, 0, end) == {first: ("a",), second: ("a", "b"), third: ()}
    assert exclusive_diverts(read, second, end) == {second: ("a", "b"), third: ()}
    assert exclusive_diverts(read, 0, second) == {first: ("a",)}
    assert taken_since(None, read, end) == {"a": first, "b": second}
    common = Position("j", "id", 0, second + 2, epoch=second, exclusive=("a", "b"))
    assert taken_since(common, read, end) == {"a": second + 2, "b": second + 2}
    assert first_marks(None, read, end) == {}


def test_exclusive_diverts_of_epoch_with_trimmed_start_come_from_position_or_records(kafka: KafkaInMemory) -> None:
    kafka.create("j")
    first = start(kafka, "a", "b")
    data(kafka, first)
    kafka.partition("j").delete(1)
    kafka.put("j", b"foreign")
    marked = data(kafka, first, "b")
    data(kafka, first, "b", "a")
    second = start(kafka, "c")
    data(kafka, second, "c")
    read = TopicHistory(SETTINGS, "j", 0, 5)
    common = Position("j", "id", 0, 2, epoch=first, exclusive=("a", "b"))
    assert taken_since(common, read, read.latest()) == {"a": 2, "b": 2, "c": second}
    assert first_marks(None, read, read.latest()) == {"b": marked, "a": marked + 1}
    assert epochs.exclusive_of(encode_record(Kind.DATA, 0, 0, b"")) == ()
