"""Queries about topics, and their creation, on Kafka in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.core.errors import Denied, InvalidInput, Unavailable
from bascule.core.topics import JournalTopics
from bascule.kafka import admin, guards
from bascule.kafka.admin import Topics
from bascule.kafka.guards import TopicRole, UnsafeTopic, guard_transactions, no_transaction
from bascule.kafka.history import TopicHistory, committed_offset
from bascule.kafka.lineage import PartitionLineage
from bascule.kafka.log import PartitionReader
from bascule.kafka.own_topics import DECISIONS, prepare
from bascule.kafka.retrying import LEAST_ANSWER_S
from bascule.threads.background import in_background
from bascule.writer.position import Position
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]  # imported fixtures


def test_topic_is_created_once_and_refusals_raise_different_errors(kafka: KafkaInMemory) -> None:
    topics = Topics(SETTINGS)
    assert topics.create("t", 3, {"retention.ms": "-1"})
    assert not topics.create("t", 3, {})
    assert topics.partitions() == {"t": 3}
    assert topics.config("t")["retention.ms"] == "-1"
    for code, kind in (
        (KafkaError.INVALID_CONFIG, InvalidInput),
        (KafkaError.POLICY_VIOLATION, Denied),
        (KafkaError.UNKNOWN, Unavailable),
    ):
        kafka.fail("create_topics", code)
        with pytest.raises(kind, match="cannot be created"):
            topics.create("u", 1, {})


def test_topic_id_changes_when_topic_is_recreated(kafka: KafkaInMemory) -> None:
    topics = Topics(SETTINGS)
    kafka.create("t")
    before = topics.id("t")
    kafka.create("t")
    assert topics.id("t") != before
    assert topics.ids(["missing"]) == topics.ids([]) == {}
    with pytest.raises(Unavailable, match="there is no topic missing"):
        topics.id("missing")
    kafka.fail("describe_topics", KafkaError.UNKNOWN, times=2)
    with pytest.raises(Unavailable, match="topics t: "):
        topics.id("t")


def test_later_calls_for_topic_id_take_one_request_and_find_recreated_topic(kafka: KafkaInMemory) -> None:
    topics = Topics(SETTINGS)
    kafka.create("t")
    before = topics.id("t")
    kafka.fail("list_topics", KafkaError.UNKNOWN)
    assert topics.id("t") == before  # without a list of all topics
    kafka.create("t")
    assert topics.id("t") != before
    kafka.faults.pop("list_topics")
    kafka.fail("describe_topics", KafkaError._TIMED_OUT)  # as if the controller had gone
    assert topics.id("t") == kafka.topics["t"].id
    del kafka.topics["t"]
    with pytest.raises(Unavailable, match="there is no topic t"):
        topics.id("t")
    kafka.fail("describe_topics", KafkaError._TIMED_OUT)
    kafka.fail("list_topics", KafkaError.UNKNOWN)
    with pytest.raises(Unavailable, match="Kafka does not answer"):
        topics.id("t")  # after a failure, the controller is looked for


def test_unwritable_topic_is_detected_before_write(kafka: KafkaInMemory) -> None:
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
    kafka.fail("describe_topics", KafkaError.UNKNOWN)
    with pytest.raises(Unavailable, match="cannot be described"):
        topics.check_writable("t")


def test_topic_creation_waits_for_live_broker(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    fenced = "Unable to replicate the partition 1 time(s): All brokers are currently fenced."
    topics = Topics(SETTINGS)
    kafka.fail("create_topics", KafkaError.INVALID_REPLICATION_FACTOR, 3, reason=fenced)
    assert topics.create("t", 1, {})
    assert "t" in kafka.topics
    assert not kafka.faults["create_topics"]
    monkeypatch.setattr(admin, "ADMIN_TIMEOUT_S", 0.0)
    kafka.fail("create_topics", KafkaError.INVALID_REPLICATION_FACTOR, 1000, reason=fenced)
    with pytest.raises(Unavailable, match=r"'u' cannot be created: .*fenced"):
        topics.create("u", 1, {})


def test_unanswered_admin_requests_raise_unavailable(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADMIN_TIMEOUT_S", "REACH_TIMEOUT_S", "VISIBLE_TIMEOUT_S"):
        monkeypatch.setattr(admin, name, 0.05)
    kafka.create("t")
    topics = Topics(SETTINGS)
    for ask in (topics.partitions, lambda: topics.in_sync("t", 0, 0.0), lambda: topics.facts(["t"])):
        kafka.fail("list_topics", KafkaError.UNKNOWN)
        with pytest.raises(Unavailable, match="Kafka does not"):
            ask()
    kafka.fail("describe_configs", KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert list(topics.facts(["t", "missing"])) == ["t"]
    assert topics.facts(["missing"]) == {}
    kafka.fail("describe_configs", KafkaError.UNKNOWN)
    with pytest.raises(Unavailable, match="'t' cannot be described"):
        topics.config("t")
    with pytest.raises(Unavailable, match=r"Kafka does not list topics that it has created: \['missing'\]"):
        topics.await_visible(["t", "missing"])
    kafka.brokers = 0
    with pytest.raises(Unavailable, match="Kafka does not answer"):
        topics.partitions()
    kafka.fail("admin", KafkaError._INVALID_ARG)
    with pytest.raises(Unavailable, match="could not create a client for topics"):
        Topics(SETTINGS)


#: Errors of a cluster while its leaders, coordinators or controller change, or disks fail.
MOVING = (
    KafkaError.OFFSET_NOT_AVAILABLE, KafkaError.KAFKA_STORAGE_ERROR, KafkaError.BROKER_NOT_AVAILABLE, KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR, KafkaError.NOT_CONTROLLER, KafkaError._TRANSPORT,
)  # fmt: skip


@pytest.mark.parametrize("code", MOVING)
@pytest.mark.parametrize(
    ("call", "ask"),
    [
        ("list_topics", lambda: Topics(SETTINGS).reach()),
        ("list_topics", lambda: Topics(SETTINGS).partitions()),
        ("describe_topics", lambda: Topics(SETTINGS).id("t")),
        ("describe_topics", lambda: Topics(SETTINGS).check_writable("t")),
        ("describe_configs", lambda: Topics(SETTINGS).config("t")),
        ("describe_configs", lambda: Topics(SETTINGS).facts(["t"])),
        ("create_topics", lambda: Topics(SETTINGS).create("new", 1, {})),
        ("list_offsets", lambda: TopicHistory(SETTINGS, "t", 0).latest()),
        ("list_offsets", lambda: PartitionLineage(SETTINGS, "t", 0).check_tail(Position("t", "id", 0, 0))),
        ("committed", lambda: committed_offset(SETTINGS, "g", "t", 0)),
        ("get_watermark_offsets", lambda: PartitionReader(SETTINGS, "t", 0).range()),
        ("fetch", lambda: list(TopicHistory(SETTINGS, "t", 0).records(0, 1))),
        ("fetch", lambda: read_some(PartitionReader(SETTINGS, "t", 0))),
    ],
    ids=[
        "reach",
        "partitions",
        "id",
        "check_writable",
        "config",
        "facts",
        "create",
        "latest",
        "lineage",
        "group",
        "range",
        "records",
        "read",
    ],
)
def test_admin_request_is_repeated_while_leaders_move(kafka: KafkaInMemory, call: str, ask: Callable[[], object], code: int) -> None:
    kafka.create("t")
    kafka.put("t", b"record")
    kafka.fail(call, code)
    ask()
    assert not kafka.faults[call]


def read_some(reader: PartitionReader) -> None:
    reader.seek(0)
    while not reader.read(timeout_s=0.01):
        pass


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
def test_admin_request_waits_for_live_node(kafka: KafkaInMemory, ask: Callable[[Topics], object]) -> None:
    kafka.create("t")
    kafka.brokers = 0
    topics = Topics(SETTINGS)
    asked = in_background(lambda: ask(topics), "asked")
    with pytest.raises(TimeoutError):
        asked.result(0.1)
    kafka.brokers = 1
    asked.result(10)


def test_internal_topics_are_created_and_unsafe_topics_are_refused(kafka: KafkaInMemory, caplog: pytest.LogCaptureFixture) -> None:
    names = JournalTopics("x")
    prepare(SETTINGS, {names.store: DECISIONS})
    assert kafka.topics[names.store].config["cleanup.policy"] == "compact"
    kafka.brokers = 3
    prepare(SETTINGS, {names.store: DECISIONS})
    assert "the loss of one disk loses all records" in caplog.text
    guards.ensure(SETTINGS, "log", TopicRole.LOG, 2, {"retention.ms": "-1"}, record_bytes=1000)
    assert len(kafka.topics["log"].partitions) == 2
    guards.ensure(SETTINGS, "waiting", TopicRole.WAITING, 1, {"retention.ms": "-1"}, record_bytes=1000)
    kafka.create("waiting", 5, retention_ms="1000")
    guards.ensure(SETTINGS, "waiting", TopicRole.WAITING, 1, {}, record_bytes=1000)
    assert "retention.ms=1000" in caplog.text
    with pytest.raises(UnsafeTopic, match="partitions=2"):
        guards.ensure(SETTINGS, "log", TopicRole.LOG, 1, {}, record_bytes=1000)


def test_reason_for_impossible_transactions_is_found_in_transaction_state_topic(kafka: KafkaInMemory) -> None:
    assert "transaction.state.log.replication.factor" in str(no_transaction(SETTINGS, "why"))
    topic = kafka.create(guards.TRANSACTION_STATE, 2, cleanup_policy="compact", min_insync_replicas="2")
    topic.replicas, topic.in_sync = 3, 1
    assert "has min.insync.replicas=2, but 2 of its 2 partitions have at most 1 replicas in sync" in str(no_transaction(SETTINGS, "why"))
    topic.in_sync = 3
    assert str(no_transaction(SETTINGS, "why")) == "no transaction can be started: why"
    kafka.fail("describe_topics", KafkaError.UNKNOWN)
    assert str(no_transaction(SETTINGS, "why")) == "no transaction can be started: why"
    assert guard_transactions(SETTINGS) == []
    topic.config["cleanup.policy"] = "delete"
    with pytest.raises(UnsafeTopic):
        guard_transactions(SETTINGS)
    kafka.fail("list_topics", KafkaError.UNKNOWN)
    assert guard_transactions(SETTINGS) == []


def test_change_without_an_answer_is_repeated(kafka: KafkaInMemory) -> None:
    """Kafka may have carried it out: a topic that exists then was created by the first request."""
    topics = Topics(SETTINGS)
    kafka.create("t")
    kafka.fail("create_topics", KafkaError._TIMED_OUT)
    assert topics.create("t", 1, {})
    kafka.fail("incremental_alter_configs", KafkaError._TIMED_OUT)
    topics.set("t", {"retention.ms": "7"})
    assert topics.config("t")["retention.ms"] == "7"
    kafka.fail("delete_topics", KafkaError._TIMED_OUT)
    topics.delete(["t"])
    assert "t" not in kafka.topics


@pytest.mark.parametrize(
    ("call", "change"),
    [
        ("create_topics", lambda topics: topics.create("new", 1, {})),
        ("delete_topics", lambda topics: topics.delete(["t"])),
        ("incremental_alter_configs", lambda topics: topics.set("t", {"retention.ms": "7"})),
    ],
    ids=["create", "delete", "set"],
)
def test_change_that_kafka_does_not_answer_ends_at_the_time_limit(
    kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch, call: str, change: Callable[[Topics], object]
) -> None:
    """A retry gets the time that is left."""
    begun_s = now_s = 1_000.0

    def pause(seconds_s: float) -> None:
        nonlocal now_s
        now_s += seconds_s

    def unanswered(*_: object, request_timeout: float, **__: object) -> None:
        pause(0.6 * request_timeout)  # the controller ends, and does not return
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    kafka.create("t")
    topics = Topics(SETTINGS)
    monkeypatch.setattr(topics._admin, call, unanswered)
    monkeypatch.setattr("bascule.kafka.retrying.time.monotonic", lambda: now_s)
    monkeypatch.setattr("bascule.kafka.retrying.time.sleep", pause)
    with pytest.raises(Unavailable):
        change(topics)
    assert now_s - begun_s <= admin.ADMIN_TIMEOUT_S + LEAST_ANSWER_S
