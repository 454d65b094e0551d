"""Bascule's topics with settings that a user has changed: the broker names, refuses or reports them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bascule.adapter.inbound import ActivationSpec, ResourceAdapter
from bascule.client import Acknowledge, Message, Queue, connect
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.topics import DECISIONS, JournalTopics
from bascule.core.xid import Xid
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import guards, slot, transactional
from bascule.kafka.admin import Topics
from bascule.kafka.guards import TRANSACTION_STATE, UnsafeTopic
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import PipelinesSpec
from bascule.writer.position import PositionLost
from bascule.xa import TransactionManager
from bascule.xa.errors import BranchRolledBack, ResourceError
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_log import KafkaLog
from bascule.xa.log import LogDamaged
from tests.scenarios.changed_topics import ORDERS, Hand, hand, make_transactions, refused, send, set_topic, system
from tests.scenarios.sparkless import Bridge, without_spark
from tests.support.system import WAIT_S, System, paused, wait_for

__all__ = ["hand", "system"]  # fixtures

#: Time to live of a message: longer than a busy machine needs from its send to the next step.
LIFE_S = 6.0


@pytest.mark.slow
def test_broker_refuses_to_start_with_unsafe_topic_settings(system: System, hand: Hand) -> None:
    send(system, "before")
    system.broker.stop()
    for topic, setting, wrong, right in (
        ("journal", "cleanup.policy", "compact,delete", "delete"),
        ("journal", "retention.ms", "604800000", "-1"),
        ("ingress", "retention.bytes", "1000000", "-1"),
        ("store", "cleanup.policy", "delete", "compact"),
        ("journal", "min.insync.replicas", "2", "1"),
        ("journal", "max.message.bytes", "73400319", "73400320"),
        ("store", "max.message.bytes", "1000000", "73400320"),
    ):
        hand.set(topic, setting, wrong)
        said = refused(system)
        assert f"error: topic '{system.prefix}.{topic}' has {setting}={wrong}: " in said
        hand.set(topic, setting, right)
    system.broker.start()
    assert system.depth("orders") == 1


def test_broker_warns_about_weak_topic_settings(system: System, hand: Hand) -> None:
    system.broker.stop()
    hand.set("ingress", "max.message.bytes", "1000000")
    hand.set("ingress", "unclean.leader.election.enable", "true")  # harmless with one replica
    system.broker.start()
    for said in ("has max.message.bytes=1000000: large transactions", "has unclean.leader.election.enable=true: a replica that lags"):
        assert f"WARNING bascule.server.life: weak topic setting finding=\"topic '{system.prefix}.ingress' {said}" in system.broker.said()


def test_unsafe_topic_setting_at_runtime_is_reported_until_corrected(system: System, hand: Hand) -> None:
    hand.set("journal", "retention.ms", "604800000")
    broken = f"topic '{system.prefix}.journal' has retention.ms=604800000: Kafka deletes messages that a queue still needs; set -1"
    wait_for(lambda: system.status()["reason"] == broken, "the status to say so")
    assert f'unsafe topic setting reason="{broken}' in system.broker.said()
    send(system, "it serves all the same")
    hand.set("journal", "retention.ms", "-1")
    wait_for(lambda: system.status()["reason"] == "", "the status to be well")
    assert system.broker.said().count("unsafe topic setting") == 1


@pytest.mark.slow
def test_running_broker_checks_settings_of_dead_letter_and_decision_topics(system: System, hand: Hand) -> None:
    dead_letters = f"{system.prefix}.dead-letter"
    Topics(hand.kafka).create(dead_letters, 1, {"cleanup.policy": "delete"})
    with closing(KafkaLog(hand.kafka)) as log:
        log.read()
    try:
        for topic, wrong in ((dead_letters, "compact"), (DECISIONS, "delete")):
            set_topic(system.bootstrap, topic, "cleanup.policy", wrong)
            wait_for(lambda topic=topic: f"topic '{topic}' has cleanup.policy=" in system.status()["reason"], "the status to say so")  # type: ignore[misc]
    finally:  # other tests write to this log, too
        set_topic(system.bootstrap, DECISIONS, "cleanup.policy", "compact")
    set_topic(system.bootstrap, dead_letters, "cleanup.policy", "delete")
    wait_for(lambda: system.status()["reason"] == "", "the status to be well")


def test_lower_record_limit_of_the_journal_is_enough_for_a_lower_message_limit(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path
) -> None:
    with System(kafka.bootstrap, tmp_path, prefix=topic_prefix, config='[broker]\nmax_message_bytes = "4 MiB"') as system:
        system.broker.stop()
        hand = Hand(system.bootstrap, system.prefix)
        for topic in ("journal", "store"):
            hand.set(topic, "max.message.bytes", str(8 << 20))
        system.broker.start()
        send(system, "x" * (3 << 20))
        with connect(system.url, acknowledge=Acknowledge.TRANSACTED) as context:
            for _ in range(2):
                context.send(ORDERS, "x" * (3 << 20))
            with pytest.raises(BasculeError, match="transaction is larger than 4194304 bytes"):
                context.commit()


def test_record_limit_lowered_at_runtime_ends_one_epoch_and_then_refuses_large_messages(system: System, hand: Hand) -> None:
    large = "x" * 600_000
    send(system, large)
    hand.set("journal", "max.message.bytes", "1000000")
    with pytest.raises(BasculeError):
        send(system, 2 * large)
    wait_for(system.serves, "the next epoch")
    assert f"topic '{system.prefix}.journal' has max.message.bytes=1000000: large transactions" in system.broker.said()
    for _ in range(2):
        with pytest.raises(BasculeError, match="the broker accepts 500000"):
            send(system, large)
    send(system, "small")
    assert system.depth("orders") == 2
    assert system.broker.said().count("the epoch ends") == 1


@pytest.mark.slow
def test_broker_keeps_expired_message_too_large_for_the_journal_and_serves_others(system: System, hand: Hand) -> None:
    """The broker has to move the message, and no sender could be told that it is too large."""
    with connect(system.url) as context:
        context.send(ORDERS, Message("x" * 1_200_000, time_to_live_s=LIFE_S))
    with paused(system.broker.pid):  # its time does not expire before the limit is active
        hand.set("journal", "max.message.bytes", "1000000")
    kept = "error contained kind=move error=\"RecordTooLarge('a journal record has"
    wait_for(lambda: kept in system.broker.said(), "the broker to keep the message")
    assert system.broker.said().count("the epoch ends") == 1
    send(system, "small")
    hand.set("journal", "max.message.bytes", str(70 << 20))
    system.broker.kill()
    system.broker.start()
    with connect(system.url) as context:
        assert context.consumer(Queue("ExpiryQueue")).receive(WAIT_S).body == "x" * 1_200_000
        assert context.consumer(ORDERS).receive(WAIT_S).body == "small"


def test_journal_with_more_than_one_partition_is_refused(system: System, hand: Hand) -> None:
    system.broker.stop()
    hand.add_partitions("journal", 2)
    assert f"topic '{system.prefix}.journal' has partitions=2" in refused(system)


def test_endpoint_refuses_to_start_with_unsafe_internal_topics(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    hand = Hand(kafka.bootstrap, topic_prefix)
    adapter = ResourceAdapter(hand.kafka)
    adapter.activate(ActivationSpec(topics=(f"{topic_prefix}.source",), group=topic_prefix), lambda _: None)
    with adapter:
        pass
    for topic, setting, wrong, right in (
        ("inbound", "cleanup.policy", "delete", "compact,delete"),
        ("inbound", "retention.ms", "604800000", "-1"),
        ("retry", "cleanup.policy", "compact", "delete"),
    ):
        hand.set(topic, setting, wrong)
        with pytest.raises(UnsafeTopic, match=rf"topic '{topic_prefix}\.{topic}' has {setting}={wrong}: .*; set {right}"):
            adapter.start()
        hand.set(topic, setting, right)
    with adapter:
        assert adapter.status()[0].running


def test_decision_log_and_kafka_resource_refuse_unsafe_internal_topics(
    kafka: EmbeddedKafka, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    hand = Hand(kafka.bootstrap, topic_prefix)

    def begin() -> None:
        log = KafkaLog(hand.kafka, topic=f"{topic_prefix}.decisions")
        with closing(log), closing(KafkaResource("kafka", hand.kafka, prefix=topic_prefix)) as resource:
            log.read()
            resource.recover()

    begin()
    for topic, setting, wrong, right in (
        ("decisions", "cleanup.policy", "delete", "compact"),
        ("log", "cleanup.policy", "delete", "compact"),
        ("side", "cleanup.policy", "compact", "delete"),
        ("side", "retention.ms", "604800000", "-1"),
    ):
        hand.set(topic, setting, wrong)
        with pytest.raises(UnsafeTopic, match=rf"topic '{topic_prefix}\.{topic}' has {setting}={wrong}: .*; set {right}"):
            begin()
        hand.set(topic, setting, right)
    hand.set("side", "max.message.bytes", "1000000")
    begin()
    assert f"topic '{topic_prefix}.side' has max.message.bytes=1000000: large transactions and messages cannot be stored" in caplog.text
    hand.add_partitions("decisions", 2)
    with pytest.raises(UnsafeTopic, match=r"decisions' has partitions=2"):
        begin()


def test_settings_of_decision_log_are_checked_at_manager_start_and_during_recovery(
    kafka: EmbeddedKafka, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    hand = Hand(kafka.bootstrap, topic_prefix)

    def manager() -> TransactionManager:
        return TransactionManager("shop", KafkaLog(hand.kafka, topic=f"{topic_prefix}.decisions"), [], recovery_interval_s=0.1)

    unsafe = f"topic '{topic_prefix}.decisions' has cleanup.policy=delete: Kafka deletes records by age although"
    with manager():
        hand.set("decisions", "cleanup.policy", "delete")
        wait_for(lambda: f'recovery failed, will retry error="{unsafe}' in caplog.text, "the recovery to say so")
    with pytest.raises(UnsafeTopic, match=unsafe), manager():
        pass


def test_unreadable_entries_of_decision_and_branch_logs_are_named_with_their_offset(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    hand = Hand(kafka.bootstrap, topic_prefix)
    log = KafkaLog(hand.kafka, topic=f"{topic_prefix}.decisions")
    with closing(log), closing(KafkaResource("kafka", hand.kafka, prefix=topic_prefix)) as resource:
        assert log.read().decisions == {}
        assert resource.recover() == []
        offset = hand.put(b"what is this?", b"somebody's", "decisions")
        named = rf"^decision log '{topic_prefix}\.decisions': offset {offset}, key b\"somebody's\": unreadable entry b'what"
        with pytest.raises(LogDamaged, match=named):
            log.read()
        offset = hand.put(b"what is this?", b"\xff", "log")
        named = rf"kafka: {topic_prefix}\.log, partition 0, offset {offset}, key b'\\xff': the key is not a branch id"
        with pytest.raises(ResourceError, match=named):
            resource.recover()


def test_pipelines_refuse_unsafe_topic_settings(system: System, hand: Hand) -> None:
    positions = Positions(PipelinesSpec(system.prefix, hand.kafka, topics=JournalTopics(system.prefix)), "test")
    positions.prepare_topics()
    hand.set("positions", "cleanup.policy", "delete")
    with pytest.raises((PositionLost, UnsafeTopic), match=r"positions' has cleanup\.policy=.*; set '?compact"):
        positions.prepare_topics()
    hand.set("positions", "cleanup.policy", "compact")
    hand.set("ingress", "retention.ms", "1000")
    with pytest.raises(UnsafeTopic, match=r"ingress' has retention\.ms=1000: Kafka deletes messages that a queue still needs; set -1"):
        positions.prepare_topics()
    hand.set("ingress", "retention.ms", "-1")
    hand.set("journal", "cleanup.policy", "compact")
    with pytest.raises(UnsafeTopic, match=r"journal' has cleanup\.policy=compact"):
        positions.prepare_topics()


@pytest.fixture
def unclean(kafka: EmbeddedKafka) -> Iterator[None]:
    """One replica makes a setting of Kafka's own topic harmless."""
    positions = Positions(PipelinesSpec("unclean", {"bootstrap.servers": kafka.bootstrap}, topics=JournalTopics("unclean")), "test")
    positions.prepare_topics()
    make_transactions(positions)
    set_topic(kafka.bootstrap, TRANSACTION_STATE, "unclean.leader.election.enable", "true")
    yield
    set_topic(kafka.bootstrap, TRANSACTION_STATE, "unclean.leader.election.enable", "false")


def test_pipelines_warn_about_unclean_leader_election_of_the_transaction_state_topic(
    kafka: EmbeddedKafka, topic_prefix: str, unclean: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_spark(monkeypatch)
    bridge = Bridge(kafka, topic_prefix)
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x")):
        pass
    assert "topic '__transaction_state' has unclean.leader.election.enable=true: a replica that lags" in caplog.text


class Lonely(EmbeddedKafka):
    """A single node that is configured to keep three replicas of the state of transactions."""

    def _server_properties(self) -> str:
        setting = "transaction.state.log.replication.factor={}"
        return super()._server_properties().replace(setting.format(1), setting.format(3))


def test_error_explains_why_kafka_cannot_start_a_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = (
        "Kafka has not created its topic '__transaction_state': transaction.state.log.replication.factor (default: 3) must be"
        " at most the number of running brokers, 1"
    )
    for module in (slot, transactional):
        monkeypatch.setattr(module, "COORDINATOR_TIMEOUT_S", 2.0)
    monkeypatch.setattr(slot, "TRANSACT_DEADLINE_S", 1.0)
    monkeypatch.setattr(guards, "EXPLAIN_TIMEOUT_S", 30.0)
    with Lonely(tmp_path) as lonely:
        positions = Positions(PipelinesSpec("lonely", {"bootstrap.servers": lonely.bootstrap}, topics=JournalTopics("lonely")), "test")
        positions.prepare_topics()
        with closing(positions.writer("any", deadline_s=1.0)) as writer, pytest.raises(Unavailable) as said:
            writer.current()
        assert str(said.value) == f"no transaction can be started: Kafka does not answer in time; {why}"
        resource = KafkaResource("kafka", {"bootstrap.servers": lonely.bootstrap})
        xid = Xid(1, b"transaction", b"branch")
        with closing(resource):
            resource.start(xid, timeout_s=60.0).send("lonely.positions", b"value", b"key")
            resource.end(xid, success=True)
            with pytest.raises(BranchRolledBack, match=re.escape(why)):
                resource.prepare(xid)
            assert resource.recover() == []
