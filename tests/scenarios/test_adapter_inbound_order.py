"""Order, failures and hanging endpoints of the adapter, and dead letters that are too large for their topic, on a real Kafka."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from bascule.adapter.inbound import ActivationSpec, Backoff, Order, Record
from bascule.adapter.inbound import activation as module
from bascule.adapter.inbound.dead_letters import DeadLetters
from bascule.adapter.inbound.record import dead_letter_of
from bascule.core.errors import InvalidInput
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from tests.scenarios.adapter_topics import Watcher, create, produce
from tests.scenarios.changed_topics import set_topic
from tests.scenarios.inbound_endpoints import HANGS_S, QUICK, Seen, active, nothing_in_flight, text, topic, values
from tests.support.system import wait_for
from tests.unit.cli.conftest import Bascule, bascule  # noqa: F401 - a fixture

__all__ = ["topic"]  # fixtures


def test_record_waiting_for_retry_blocks_no_other_record(kafka: EmbeddedKafka, topic: str) -> None:
    def act(record: Record) -> None:
        if record.key == b"slow":
            raise ValueError("later")

    seen = Seen(act)
    with active(kafka, ActivationSpec(topics=(topic,), group=topic, workers=1, backoff=Backoff(600.0, 2.0, 600.0)), seen) as activation:
        produce(kafka.bootstrap, topic, ["s"], keys=["slow"], partition=0)
        wait_for(lambda: activation.status().delayed == 1, "the wait for the next try")
        produce(kafka.bootstrap, topic, values(20), partition=0)
        seen.wait(20)
        assert activation.status().delayed == 1


@pytest.mark.parametrize("order", [Order.KEY, Order.PARTITION])
def test_records_of_one_key_or_partition_keep_their_order_when_a_record_fails(kafka: EmbeddedKafka, topic: str, order: Order) -> None:
    at_work: Counter[object] = Counter()
    overlaps = []

    def act(record: Record) -> None:
        lane = record.key if order is Order.KEY else record.partition
        at_work[lane] += 1
        if at_work[lane] > 1:
            overlaps.append(record)
        time.sleep(0.001)
        at_work[lane] -= 1
        if text(record).endswith("3") and record.failures < 2:
            raise ValueError("once more")

    seen = Seen(act)
    produce(kafka.bootstrap, topic, values(60), keys=["a", "b", "c"])
    with active(kafka, ActivationSpec(topics=(topic,), group=topic, workers=8, order=order, backoff=QUICK), seen):
        seen.wait(60)
        nothing_in_flight(kafka, topic)
    assert overlaps == []
    for lane in {record.key for record in seen.records} if order is Order.KEY else {0, 1}:
        offsets = [record.offset for record in seen.records if lane in (record.key, record.partition)]
        assert offsets == sorted(offsets)
    assert Counter(seen.values) == Counter(values(60))


def test_failure_count_survives_change_of_member_in_partition_order(kafka: EmbeddedKafka, topic: str) -> None:
    def act(record: Record) -> None:
        if record.failures < 2:
            raise ValueError("not yet")

    spec = ActivationSpec(topics=(topic,), group=topic, order=Order.PARTITION, backoff=Backoff(0.05, 1000.0, 3600.0))
    produce(kafka.bootstrap, topic, ["one"])
    seen = Seen(act)
    with active(kafka, spec, seen) as activation:
        wait_for(lambda: activation.status().counts["failed"] == 2, "two failures")
    with active(kafka, spec, seen):
        assert seen.wait(1) == ["one"]
    assert (seen.records[0].failures, seen.records[0].redelivered) == (2, True)


def test_hanging_worker_is_reported_and_replaced_and_its_late_result_is_ignored(
    kafka: EmbeddedKafka, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    def act(record: Record) -> None:
        if record.key == b"stuck" and record.failures == 0:
            go_on.wait(6 * HANGS_S)

    seen = Seen(act)
    spec = ActivationSpec(topics=(topic,), group=topic, workers=1, delivery_timeout_s=HANGS_S, backoff=QUICK)
    with active(kafka, spec, seen) as activation:
        produce(kafka.bootstrap, topic, ["s"], keys=["stuck"])
        wait_for(lambda: activation.status().hanging, "the worker to be given up")
        assert activation.status().hanging == (f"bascule-inbound-{topic}-1",)
        produce(kafka.bootstrap, topic, ["o"], keys=["other"])
        assert sorted(seen.wait(2)) == ["o", "s"]
        go_on.set()
        wait_for(lambda: not activation.status().hanging, "the late worker to end")
        wait_for(lambda: activation.status().counts["delivered"] == 2, "both to be counted")
        counts = activation.status().counts
    assert (counts["hung"], counts["delivered"], counts["retried"]) == (1, 2, 1)
    assert "go_on.wait" in caplog.text
    assert "was handled as failed before its endpoint returned" in caplog.text


@pytest.mark.slow
def test_partition_moves_to_another_member_after_its_running_records_finish(kafka: EmbeddedKafka, topic: str) -> None:
    seen = Seen(lambda _: time.sleep(0.005))
    spec = ActivationSpec(topics=(topic,), group=topic, workers=4)
    produce(kafka.bootstrap, topic, values(300))
    with active(kafka, spec, seen) as first:
        seen.wait(50)
        with active(kafka, spec, seen) as second:
            wait_for(lambda: "ready" in second.status().partitions.values(), "a partition for the second")
            seen.wait(300)
            produce(kafka.bootstrap, topic, ["x", "y"], partition=0)
            produce(kafka.bootstrap, topic, ["z"], partition=1)
            seen.wait(303)
            shared = [set(each.status().partitions) for each in (first, second)]
            assert shared[0] & shared[1] == set()
        produce(kafka.bootstrap, topic, ["last"])
        seen.wait(304)
    assert Counter(seen.values) == Counter([*values(300), "x", "y", "z", "last"])


def test_missing_source_topic_is_reported_and_read_after_its_creation(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOUSEKEEP_S", 0.2)
    seen = Seen()
    settings = {"topic_metadata_refresh_interval_ms": "200"}
    with active(kafka, ActivationSpec(topics=(topic_prefix,), group=topic_prefix), seen, **settings) as activation:
        assert activation.status().trouble == f"topics do not exist: {topic_prefix}"
        create(kafka.bootstrap, topic_prefix)
        produce(kafka.bootstrap, topic_prefix, ["first"])
        assert seen.wait(1) == ["first"]
        wait_for(lambda: not activation.status().trouble, "no trouble any more")


def limit(kafka: EmbeddedKafka, topic: str, size_bytes: int) -> None:
    set_topic(kafka.bootstrap, topic, "max.message.bytes", str(size_bytes))


def test_letter_too_large_for_retry_topic_is_named_and_returned_after_limit_is_raised(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    """Otherwise the record would block all others, and no operator would know which record it is."""
    retry, dead = f"{topic_prefix}.retry", f"{topic_prefix}.dead-letter"
    create(kafka.bootstrap, retry, dead, partitions=1)
    limit(kafka, retry, 10_000)
    spec = ActivationSpec(topics=(topic_prefix,), group=topic_prefix)
    producer = clients.producer({"bootstrap.servers": kafka.bootstrap})
    for offset, value in enumerate([b"small", b"x" * 20_000, b"small, too"]):
        letter = dead_letter_of(Record(topic_prefix, 0, offset, b"key", value), spec, ValueError("no"))
        producer.produce(dead, letter.value, letter.key, headers=letter.headers)
    assert producer.flush(60) == 0
    letters = DeadLetters({"bootstrap.servers": kafka.bootstrap}, topic_prefix)
    with pytest.raises(InvalidInput, match=rf"{dead}-0, offset 1, of 20000 bytes, is too large for {retry}; raise max.message.bytes"):
        letters.send_back()
    assert letters.send_back(1) == 1
    limit(kafka, retry, 30_000)
    assert letters.send_back() == 2
    watcher = Watcher(kafka.bootstrap, retry)
    assert watcher.wait(3) == ["small", "x" * 20_000, "small, too"]
    watcher.close()


def test_endpoint_reports_record_too_large_for_dead_letter_topic_until_limit_is_raised(kafka: EmbeddedKafka, topic: str) -> None:
    dead = f"{topic}.dead-letter"
    Topics({"bootstrap.servers": kafka.bootstrap}).create(dead, 1, {"max.message.bytes": "100"})

    def act(record: Record) -> None:
        if text(record) == "bad":
            raise ValueError("never")

    seen = Seen(act)
    with active(kafka, ActivationSpec(topics=(topic,), group=topic, retries=0), seen) as activation:
        produce(kafka.bootstrap, topic, ["bad"], keys=["bad"], partition=0)
        wait_for(lambda: activation.status().trouble, "the trouble")
        said = activation.status().trouble
        assert said.startswith(f"could not dead-letter record {topic}-0, offset 0: {dead}: ")
        assert said.endswith("; raise max.message.bytes of the dead-letter topic")
        produce(kafka.bootstrap, topic, ["good"], keys=["good"], partition=0)
        assert seen.wait(1) == ["good"]
        limit(kafka, dead, 20_000)
        wait_for(lambda: not activation.status().trouble, "no trouble any more")
        assert Watcher(kafka.bootstrap, dead).wait(1) == ["bad"]
