"""The product's readers and writers on Kafka in memory: what they find, what they make of faults, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError

from bascule.core.destination import Routing
from bascule.core.errors import Denied, InvalidInput, TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing, Output
from bascule.core.topics import JournalTopics
from bascule.journal.reading import CutOff, Trimmed
from bascule.journal.records import Kind, Op, Send, SendFlag, encode_record, json_entry, send_entry
from bascule.kafka import admin, clients, consumer, epochs, guards, history, incarnation, log, transactional
from bascule.kafka.admin import Topics
from bascule.kafka.consumer import GroupConsumer, read_again
from bascule.kafka.epochs import exclusive_diverts, first_marks, taken_since
from bascule.kafka.guards import TopicRole, UnsafeTopic, guard_transactions, no_transaction
from bascule.kafka.history import LagMirror, TopicHistory, committed_note
from bascule.kafka.log import PartitionReader, takes_appends
from bascule.kafka.own_topics import DECISIONS, prepare
from bascule.kafka.redrive import Redrive
from bascule.kafka.transactional import TransactionalWriter, end_open_transactions
from bascule.threads.background import in_background
from bascule.writer.errors import PositionMoved, Unwritable, WriteDenied
from bascule.writer.position import Position, position_partition
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.support.system import wait_for

FIRST, SECOND, THIRD = (Position("source", "id", 0, offset) for offset in (0, 5, 9))


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaInMemory:
    monkeypatch.setattr(incarnation, "SETTLE_S", 0.0)
    return KafkaInMemory(monkeypatch)


# -- the exactly-once writer -----------------------------------------------------------------------------------------------


@pytest.fixture
def writers(kafka: KafkaInMemory) -> Iterator[list[TransactionalWriter]]:
    """Two under one id."""
    kafka.create("out")
    kafka.create("positions", 16, cleanup_policy="compact")
    made = [TransactionalWriter(SETTINGS, "id", "positions", "key", deadline_s=1.0) for _ in range(2)]
    yield made
    for each in made:
        each.close()


def outputs(*values: str, topic: str = "out") -> list[Output]:
    return [Output(topic, None, value.encode(), [("h", b"1")]) for value in values]


def position(kafka: KafkaInMemory) -> Position:
    partition = kafka.partition("positions", position_partition("key"))
    (*_, value) = [
        each.value for _, each in sorted(partition.records.items()) if each.key == b"key" and each.transaction not in partition.aborted
    ]
    assert value is not None
    return Position.decode(value)


def test_output_and_position_are_written_together_one_transaction_after_another(
    kafka: KafkaInMemory, writers: list[TransactionalWriter]
) -> None:
    writer = writers[0]
    assert writer.current() is None
    writer.write(outputs("1", "2"), None, FIRST)
    assert writer.current() == FIRST
    writer.prepare()
    writer.write(outputs("3"), FIRST, SECOND, {"other": THIRD})
    assert kafka.values("out") == [b"1", b"2", b"3"]
    assert position(kafka) == SECOND
    assert kafka.partition("out").records[0].headers == [("h", b"1")]
    writer.write([], SECOND, None)
    assert kafka.values("positions", position_partition("key"))[-1] is None


def test_output_written_ahead_is_committed_once_and_abandoned_output_never(
    kafka: KafkaInMemory, writers: list[TransactionalWriter]
) -> None:
    writer = writers[0]
    writer.write([], None, FIRST)
    writer.ahead(outputs("1"), FIRST)
    writer.write(outputs("1", "2"), FIRST, SECOND)
    writer.ahead(outputs("lost"), SECOND)
    writer.abandon()
    assert kafka.values("out") == [b"1", b"2"]
    assert position(kafka) == SECOND


def test_writer_whose_twin_has_moved_the_position_writes_nothing(kafka: KafkaInMemory, writers: list[TransactionalWriter]) -> None:
    writer, twin = writers
    writer.write([], None, FIRST)
    twin.current()
    twin.write(outputs("twin"), FIRST, SECOND)
    with pytest.raises(PositionMoved) as moved:
        writer.write(outputs("doubled"), FIRST, SECOND)
    assert moved.value.found == SECOND
    assert kafka.values("out") == [b"twin"]


@pytest.mark.parametrize("call", ["init_transactions", "begin_transaction", "produce", "flush", "commit_transaction", "after_commit"])
@pytest.mark.parametrize("code", [KafkaError._TIMED_OUT, KafkaError._FENCED])
def test_call_that_fails_once_doubles_and_loses_nothing(
    kafka: KafkaInMemory, writers: list[TransactionalWriter], call: str, code: int
) -> None:
    """After ``after_commit`` the transaction is committed, and the writer does not know it."""
    writer = writers[0]
    writer.write([], None, FIRST)
    kafka.fail(call, code)
    writer.write(outputs("1", "2"), FIRST, SECOND)
    assert kafka.values("out") == [b"1", b"2"]
    assert position(kafka) == SECOND


def test_commit_that_takes_long_is_waited_for_while_records_are_taken(
    kafka: KafkaInMemory, writers: list[TransactionalWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "PROGRESS_S", 0.01)
    writer = writers[0]
    writer.write([], None, FIRST)
    kafka.fail("commit_transaction", KafkaError._TIMED_OUT, times=3, retriable=True)
    writer.write(outputs("1"), FIRST, SECOND)
    assert kafka.values("out") == [b"1"]
    assert kafka.transactional["id"].epoch == 1  # one incarnation for each transaction, and none for the three answers


def test_record_that_is_refused_is_named_and_nothing_is_written(kafka: KafkaInMemory, writers: list[TransactionalWriter]) -> None:
    writer = writers[0]
    writer.write([], None, FIRST)
    kafka.topics["out"].config["max.message.bytes"] = "3"
    with pytest.raises(Unwritable) as refused:
        writer.write(outputs("1", "large", "2"), FIRST, SECOND)
    assert list(refused.value.faults) == [1]
    assert kafka.values("out") == []
    assert position(kafka) == FIRST


def test_record_that_client_refuses_is_named(kafka: KafkaInMemory) -> None:
    kafka.create("out")
    kafka.create("positions", 16, cleanup_policy="compact")
    with closing(TransactionalWriter({**SETTINGS, "message.max.bytes": 200}, "id", "positions", "key", deadline_s=1.0)) as writer:
        refuse = pytest.raises(Unwritable)
        with refuse as refused:
            writer.write(outputs("1", "x" * 300), None, FIRST)
    assert list(refused.value.faults) == [1]


def test_topic_that_may_not_be_written_is_said(kafka: KafkaInMemory, writers: list[TransactionalWriter]) -> None:
    kafka.denied.add("out")
    with pytest.raises(WriteDenied):
        writers[0].write(outputs("1"), None, FIRST)


def test_what_an_earlier_writer_left_open_is_ended(kafka: KafkaInMemory) -> None:
    kafka.create("out")
    gone = clients.producer({**SETTINGS, "transactional.id": "id"})
    gone.init_transactions()
    gone.begin_transaction()
    gone.produce("out", b"open")
    assert kafka.partition("out").open
    kafka.fail("list_topics", KafkaError._TRANSPORT)
    end_open_transactions(SETTINGS, ["other"])
    assert kafka.partition("out").open
    end_open_transactions(SETTINGS, ["id", "other"])
    assert not kafka.partition("out").open
    assert kafka.values("out") == []


def test_writer_that_is_closed_leaves_no_client(kafka: KafkaInMemory) -> None:
    kafka.create("out")
    kafka.create("positions", 16, cleanup_policy="compact")
    with closing(TransactionalWriter(SETTINGS, "id", "positions", "key")) as writer:
        writer.write(outputs("1"), None, FIRST)
        assert kafka.open_clients()
    del writer
    wait_for(lambda: kafka.open_clients() == [], "all clients to be gone")


# -- history ---------------------------------------------------------------------------------------------------------------


def test_range_is_read_with_and_without_open_and_aborted_transactions(kafka: KafkaInMemory) -> None:
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


def test_range_behind_which_records_follow_ends_where_it_should(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    kafka.put("t", b"0")
    kafka.put("t", b"1", transaction="done")
    kafka.partition("t").mark("done", committed=True)
    kafka.put("t", b"3")
    assert [each.value() for each in TopicHistory(SETTINGS, "t", 0, 5).records(0, 3)] == [b"0", b"1"]


def test_error_that_passes_is_read_over_and_another_one_is_raised(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    kafka.put("t", b"0")
    read = TopicHistory(SETTINGS, "t", 0, 5)
    kafka.fail("fetch", KafkaError.NOT_LEADER_FOR_PARTITION)
    assert [each.value() for each in read.records(0, 1)] == [b"0"]
    kafka.fail("fetch", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(Unavailable, match="t-0 is not readable"):
        list(read.records(0, 1))
    kafka.partition("t").delete(1)
    with pytest.raises(Unavailable, match="t-0 is not readable"):
        list(read.records(0, 1))


def test_offset_by_time_is_first_of_that_age_or_the_end(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    for _ in range(3):
        kafka.put("t", b"")
    for offset, record in kafka.partition("t").records.items():
        record.timestamp_ms = 100 * offset
    read = TopicHistory(SETTINGS, "t", 0)
    assert [read.at_time(ms) for ms in (0, 1, 100, 201)] == [0, 1, 1, 3]


def test_offsets_are_asked_again_where_the_fault_passes(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    read = TopicHistory(SETTINGS, "t", 0, 5)
    kafka.fail("list_offsets", KafkaError.LEADER_NOT_AVAILABLE)
    assert read.latest() == 0
    kafka.fail("list_offsets", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(Unavailable, match="t does not tell its offsets"):
        read.latest()
    kafka.fail("admin", KafkaError._INVALID_ARG)
    with pytest.raises(Unavailable, match="no client to ask for offsets"):
        TopicHistory(SETTINGS, "t", 0)


def test_committed_offset_is_asked_again_while_coordinator_comes(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "RETRY_S", 0.01)
    kafka.create("t")
    assert committed_note(SETTINGS, "g", "t", 0)[0] < 0
    kafka.offsets["g"]["t", 0] = (7, "why")
    kafka.fail("committed", KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
    assert committed_note(SETTINGS, "g", "t", 0) == (7, "why")
    kafka.fail("committed", KafkaError.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(Unavailable, match="group g does not answer"):
        committed_note(SETTINGS, "g", "t", 0)
    assert kafka.open_clients() == []


def test_lag_that_is_not_stored_is_shown_again_and_a_note_is_cut(kafka: KafkaInMemory) -> None:
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


# -- the journal's partition -----------------------------------------------------------------------------------------------


def test_reader_tells_what_is_deleted_and_what_is_cut_off(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with pytest.raises(Trimmed, match="t begins at offset 3, behind what was to be read"):
            reader.read()
        reader.seek(9)
        with pytest.raises(CutOff, match="t ends at offset 5, and 9 was to be read"):
            reader.read()
        reader.seek(3)
        kafka.fail("fetch", KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(Unavailable, match="reading t"):
            reader.read()
        reader.seek(3)
        with pytest.raises(Unavailable, match="reading t: nothing for"):
            list(reader.up_to(9))
        monkeypatch.setattr(reader, "read", lambda **_: [])
        with pytest.raises(Unavailable, match="before its end"):
            list(reader.to_end())


def test_range_is_asked_again_where_the_connection_breaks(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    with closing(PartitionReader(SETTINGS, "t", 0)) as reader:
        kafka.fail("get_watermark_offsets", KafkaError._TRANSPORT)
        assert reader.range() == (0, 0)
        kafka.fail("get_watermark_offsets", KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(Unavailable, match="Kafka does not answer about t"):
            reader.range()


def test_whether_kafka_takes_appends(kafka: KafkaInMemory) -> None:
    topic = kafka.create("t", min_insync_replicas="2")
    topic.replicas = topic.in_sync = 2
    assert takes_appends(SETTINGS, "t", 0, 0.1)
    topic.in_sync = 1
    assert not takes_appends(SETTINGS, "t", 0, 0.1)
    topic.in_sync = 2
    kafka.fail("list_offsets", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert not takes_appends(SETTINGS, "t", 0, 0.1)
    assert not takes_appends(SETTINGS, "t", 1, 0.1)
    assert not takes_appends(SETTINGS, "missing", 0, 0.1)


# -- epochs of a journal ---------------------------------------------------------------------------------------------------


def start(kafka: KafkaInMemory, *exclusive: str) -> int:
    return kafka.put("j", encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {"exclusive": list(exclusive)})))


def data(kafka: KafkaInMemory, epoch: int, *diverts: str) -> int:
    flags = SendFlag.DURABLE | (SendFlag.DIVERTS if diverts else 0)
    send = Send(flags, Routing.ANYCAST, 4, 0, 0, 0, "q", (1,), (), diverts, None, b"")
    return kafka.put("j", encode_record(Kind.DATA, epoch, 1, send_entry(send)))


def test_epochs_are_found_backwards_with_the_exclusive_diverts_of_each(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "LOOK_BACK_RECORDS", 2)
    kafka.create("j")
    first = start(kafka, "a")
    data(kafka, first)
    kafka.put("j", b"foreign")
    kafka.put("j", b"foreign")
    kafka.put("j", b"foreign")
    second = start(kafka, "b", "a")
    data(kafka, first)  # of the broker that was replaced
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


def test_epoch_whose_start_is_trimmed_is_told_by_the_position_or_by_its_records(kafka: KafkaInMemory) -> None:
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


# -- members of a group ----------------------------------------------------------------------------------------------------


class Member:
    """A member of a group, and what it was told."""

    def __init__(self, *topics: str, group: str = "g", **settings: Any) -> None:
        self.told: list[tuple[str, list[tuple[str, int]]]] = []
        self.consumer = GroupConsumer(
            {**SETTINGS, **settings}, group, topics, start="earliest",
            on_assigned=lambda at: self.told.append(("assigned", at)), on_revoked=lambda at: self.told.append(("revoked", at)),
            on_lost=lambda at: self.told.append(("lost", at)),
        )  # fmt: skip


def test_partition_is_read_when_it_is_resumed_and_goes_on_at_another_member_where_it_was_committed(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    for number in range(4):
        kafka.put("t", bytes([number]), b"k", h=b"1")
    first, second = Member("t"), Member("^t.*")
    assert first.consumer.poll(10, 0) == []
    assert first.told == [("assigned", [("t", 0)])]
    assert first.consumer.hold([("t", 0)])["t", 0].offset == 0
    first.consumer.resume([("t", 0), ("other", 1)])
    records = first.consumer.poll(3, 1)
    assert [(each.offset, each.key, each.value, list(each.headers)) for each in records] == [
        (number, b"k", bytes([number]), [("h", b"1")]) for number in range(3)
    ]
    first.consumer.pause([("t", 0)])
    assert first.consumer.poll(1, 0) == []
    first.consumer.commit({("t", 0): 2})
    first.consumer.close()
    with pytest.raises(Unavailable, match="offsets are not committed"):
        first.consumer.commit({("t", 0): 3})
    assert second.consumer.poll(1, 0) == []
    second.consumer.resume([("t", 0)])
    assert [each.offset for each in second.consumer.poll(9, 1)] == [2, 3]
    assert second.consumer.read_on(("t", 0), 1) == 1
    assert [each.offset for each in second.consumer.poll(1, 1)] == [1]
    second.consumer.close()


@pytest.mark.parametrize("refused", [False, True])
def test_partition_that_is_lost_is_told(kafka: KafkaInMemory, refused: bool) -> None:
    kafka.create("t")
    member = Member("t")
    member.consumer.poll(1, 0)
    kafka.members["g"][0].expire()
    if refused:
        kafka.fail("incremental_unassign", KafkaError._STATE)
    member.consumer.poll(1, 0)
    assert member.told == [("assigned", [("t", 0)]), ("lost", [("t", 0)])]
    assert member.consumer._consumer.assignment() == []
    member.consumer.close()


def test_partition_that_goes_to_another_member_is_told_while_it_is_still_ours(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    member = Member("t")
    member.consumer.poll(1, 0)
    kafka.members["g"][0].target = set()
    member.consumer.poll(1, 0)
    assert member.told == [("assigned", [("t", 0)]), ("revoked", [("t", 0)])]
    member.consumer.close()


def test_fault_of_a_fetch_is_raised_behind_what_was_read_and_a_passing_one_never(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    kafka.put("t", b"1")
    member = Member("t")
    member.consumer.poll(1, 0)
    member.consumer.resume([("t", 0)])
    kafka.fail("fetch", KafkaError._TRANSPORT)
    kafka.fail("fetch", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    found = member.consumer.poll(5, 0)
    assert [each.value for each in found] == [b"1"]
    with pytest.raises(Unavailable, match="records are not readable"):
        member.consumer.poll(5, 0)
    for call, ask in (("committed", lambda: member.consumer.hold([("t", 0)])), ("seek", lambda: member.consumer.read_on(("t", 0), 0))):
        kafka.fail(call, KafkaError._TIMED_OUT)
        with pytest.raises(Unavailable):
            ask()
    member.consumer.close()


def test_records_are_read_again_by_offset_as_far_as_they_are_there(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "GAP_MAX", 3)
    kafka.create("t")
    for number in range(20):
        kafka.put("t", bytes([number]))
    kafka.partition("t").delete(2)
    assert {at: record.value for at, record in read_again(SETTINGS, "t", 0, [1, 2, 4, 15]).items()} == {2: b"\2", 4: b"\4", 15: b"\x0f"}
    assert read_again(SETTINGS, "t", 0, []) == {}


# -- topics ----------------------------------------------------------------------------------------------------------------


def test_topic_is_created_once_and_refusals_are_told_apart(kafka: KafkaInMemory) -> None:
    topics = Topics(SETTINGS)
    assert topics.create("t", 3, {"retention.ms": "-1"})
    assert not topics.create("t", 3, {})
    assert topics.partitions() == {"t": 3}
    assert topics.config("t")["retention.ms"] == "-1"
    for code, kind in (
        (KafkaError.INVALID_CONFIG, InvalidInput),
        (KafkaError.POLICY_VIOLATION, Denied),
        (KafkaError._TRANSPORT, Unavailable),
    ):
        kafka.fail("create_topics", code)
        with pytest.raises(kind, match="cannot be created"):
            topics.create("u", 1, {})


def test_id_of_a_topic_changes_when_it_is_recreated(kafka: KafkaInMemory) -> None:
    topics = Topics(SETTINGS)
    kafka.create("t")
    before = topics.id("t")
    kafka.create("t")
    assert topics.id("t") != before
    assert topics.ids(["missing"]) == topics.ids([]) == {}
    with pytest.raises(Unavailable, match="there is no topic missing"):
        topics.id("missing")
    kafka.fail("describe_topics", KafkaError._TRANSPORT)
    with pytest.raises(Unavailable, match="topic t: "):
        topics.id("t")


def test_topic_that_may_not_be_written_is_found_before_it_is_written(kafka: KafkaInMemory) -> None:
    topics = Topics(SETTINGS)
    kafka.create("t")
    topics.check_writable("t")
    topics.check_writable("missing")
    kafka.denied.add("t")
    with pytest.raises(Denied, match="may not be written"):
        topics.check_writable("t")
    kafka.fail("describe_topics", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(Denied, match="may not be described"):
        topics.check_writable("t")
    kafka.fail("describe_topics", KafkaError._TRANSPORT)
    with pytest.raises(Unavailable, match="cannot be described"):
        topics.check_writable("t")


def test_topic_is_created_when_kafka_has_a_live_broker_again(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    fenced = "Unable to replicate the partition 1 time(s): All brokers are currently fenced."
    monkeypatch.setattr(admin, "FENCED_PAUSE_S", 0.0)
    topics = Topics(SETTINGS)
    kafka.fail("create_topics", KafkaError.INVALID_REPLICATION_FACTOR, 3, reason=fenced)
    assert topics.create("t", 1, {})
    assert "t" in kafka.topics
    assert not kafka.faults["create_topics"]
    monkeypatch.setattr(admin, "ADMIN_TIMEOUT_S", 0.0)
    kafka.fail("create_topics", KafkaError.INVALID_REPLICATION_FACTOR, 1000, reason=fenced)
    with pytest.raises(Unavailable, match=r"'u' cannot be created: .*fenced"):
        topics.create("u", 1, {})


def test_questions_without_answer_are_unavailable(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADMIN_TIMEOUT_S", "REACH_TIMEOUT_S"):
        monkeypatch.setattr(admin, name, 0.05)
    kafka.create("t")
    topics = Topics(SETTINGS)
    for ask in (topics.partitions, lambda: topics.in_sync("t", 0, 0.0), lambda: topics.facts(["t"])):
        kafka.fail("list_topics", KafkaError._TRANSPORT)
        with pytest.raises(Unavailable, match="Kafka does not"):
            ask()
    kafka.fail("describe_configs", KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert list(topics.facts(["t", "missing"])) == ["t"]
    assert topics.facts(["missing"]) == {}
    kafka.fail("describe_configs", KafkaError._TRANSPORT)
    with pytest.raises(Unavailable, match="'t' cannot be described"):
        topics.config("t")
    with pytest.raises(Unavailable, match=r"Kafka does not show topics that it has created: \['missing'\]"):
        topics.await_visible(["t", "missing"])
    kafka.brokers = 0
    with pytest.raises(Unavailable, match="Kafka does not answer"):
        topics.partitions()
    kafka.fail("admin", KafkaError._INVALID_ARG)
    with pytest.raises(Unavailable, match="no client to look at topics"):
        Topics(SETTINGS)


@pytest.mark.parametrize(
    "ask",
    [
        lambda topics: topics.config("t"),
        lambda topics: topics.id("t"),
        lambda topics: topics.facts(["t"]),
        lambda topics: topics.check_writable("t"),
        lambda topics: topics.create("new", 1, {}),
    ],
    ids=["config", "id", "facts", "check_writable", "create"],
)
def test_client_that_met_a_cluster_without_live_nodes_waits_until_one_is_back(
    kafka: KafkaInMemory, ask: Callable[[Topics], object]
) -> None:
    kafka.create("t")
    kafka.brokers = 0
    topics = Topics(SETTINGS)
    asked = in_background(lambda: ask(topics), "asked")
    with pytest.raises(TimeoutError):
        asked.result(0.1)
    kafka.brokers = 1
    asked.result(10)


def test_own_topics_are_created_and_an_unsafe_one_is_refused(kafka: KafkaInMemory, caplog: pytest.LogCaptureFixture) -> None:
    names = JournalTopics("x")
    prepare(SETTINGS, {names.store: DECISIONS})
    assert kafka.topics[names.store].config["cleanup.policy"] == "compact"
    kafka.brokers = 3
    prepare(SETTINGS, {names.store: DECISIONS})
    assert "all is lost with one disk" in caplog.text
    guards.ensure(SETTINGS, "log", TopicRole.LOG, 2, {"retention.ms": "-1"}, record_bytes=1000)
    assert len(kafka.topics["log"].partitions) == 2
    guards.ensure(SETTINGS, "waiting", TopicRole.WAITING, 1, {"retention.ms": "-1"}, record_bytes=1000)
    kafka.create("waiting", 5, retention_ms="1000")
    guards.ensure(SETTINGS, "waiting", TopicRole.WAITING, 1, {}, record_bytes=1000)
    assert "retention.ms=1000" in caplog.text
    with pytest.raises(UnsafeTopic, match="partitions=2"):
        guards.ensure(SETTINGS, "log", TopicRole.LOG, 1, {}, record_bytes=1000)


def test_why_no_transaction_can_be_started_is_found_in_topic_of_the_coordinator(kafka: KafkaInMemory) -> None:
    assert "transaction.state.log.replication.factor" in str(no_transaction(SETTINGS, "why"))
    topic = kafka.create(guards.TRANSACTION_STATE, 2, cleanup_policy="compact", min_insync_replicas="2")
    topic.replicas, topic.in_sync = 3, 1
    assert "has min.insync.replicas=2, and in 2 of its 2 partitions no more than 1 in sync" in str(no_transaction(SETTINGS, "why"))
    topic.in_sync = 3
    assert str(no_transaction(SETTINGS, "why")) == "no transaction can be started: why"
    kafka.fail("describe_topics", KafkaError._TRANSPORT)
    assert str(no_transaction(SETTINGS, "why")) == "no transaction can be started: why"
    assert guard_transactions(SETTINGS) == []
    topic.config["cleanup.policy"] = "delete"
    with pytest.raises(UnsafeTopic):
        guard_transactions(SETTINGS)
    kafka.fail("list_topics", KafkaError._TRANSPORT)
    assert guard_transactions(SETTINGS) == []


# -- records moved to other topics -----------------------------------------------------------------------------------------


def test_letters_are_moved_with_their_offsets_in_one_transaction(kafka: KafkaInMemory) -> None:
    kafka.create("dead", 2)
    kafka.create("retry")
    for number in range(4):
        kafka.put("dead", str(number).encode(), partition=number % 2)
    letters = Redrive(SETTINGS, "dead", "g")
    assert letters.count() == len(letters.waiting()) == 4
    assert letters.move(lambda record: Outgoing("retry", None, record.value), 1) == 1
    assert letters.move(lambda record: None if record.value == b"1" else Outgoing("retry", None, record.value)) == 2
    assert kafka.values("retry") == [b"0", b"2", b"3"]
    assert letters.count() == 0
    assert letters.move(lambda record: Outgoing("retry", None, record.value)) == 0
    kafka.put("dead", b"large")
    kafka.topics["retry"].config["max.message.bytes"] = "2"
    with pytest.raises(TooLarge, match=r"dead-0, offset 2, of 5 bytes, is too large for retry.*; nothing is moved"):
        letters.move(lambda record: Outgoing("retry", None, record.value))
    assert letters.count() == 1
    kafka.create("dead", 2)
    kafka.offsets.clear()
    kafka.put("dead", b"new")
    assert letters.count() == 1
