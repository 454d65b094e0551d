"""Endpoints of the adapter on a real Kafka: at least once, retries, dead letters, order, hanging endpoints, handover."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections import Counter
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from bascule.adapter.inbound import Activation, ActivationSpec, InboundLog, Order, Record, ResourceAdapter, Start
from bascule.adapter.inbound.metrics import AdapterCollector, serve_metrics
from bascule.adapter.inbound.state import LogUnreadable, Ref
from bascule.core.errors import Unavailable
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.admin import Topics
from tests.scenarios.adapter_topics import Watcher, create, produce
from tests.scenarios.inbound_endpoints import QUICK, Seen, active, nothing_in_flight, text, topic, values
from tests.support.kafka_proxy import Action, Api, KafkaProxy
from tests.support.system import wait_for
from tests.unit.cli.conftest import Bascule, bascule  # noqa: F401 - a fixture

__all__ = ["topic"]  # fixtures


def test_each_record_is_delivered_once_and_no_record_stays_in_flight(kafka: EmbeddedKafka, topic: str) -> None:
    produce(kafka.bootstrap, topic, values(1000))
    seen = Seen()
    with active(kafka, ActivationSpec(topics=(topic,), group=topic), seen):
        seen.wait(1000)
        produce(kafka.bootstrap, topic, ["last"])
        seen.wait(1001)
        nothing_in_flight(kafka, topic)
    assert Counter(seen.values) == Counter([*values(1000), "last"])


def test_metrics_have_position_lag_and_latency_of_an_endpoint(kafka: EmbeddedKafka, topic: str) -> None:
    records, size, go_on = 50, 1000, threading.Event()
    produce(kafka.bootstrap, topic, [f"{number}".ljust(size) for number in range(records)])
    adapter = ResourceAdapter({"bootstrap.servers": kafka.bootstrap})
    adapter.activate(ActivationSpec(topics=(topic,), group=topic, batch=1, start=Start.EARLIEST), lambda _: go_on.wait() and None)
    registry = CollectorRegistry()
    registry.register(AdapterCollector(adapter))

    def values_now() -> dict[str, float]:
        """Return the sum of each metric over the partitions."""
        found: dict[str, float] = {}
        for family in registry.collect():
            for sample in family.samples:
                if "le" not in sample.labels:
                    name = sample.name.removeprefix("bascule_adapter_")
                    found[name] = found.get(name, 0) + sample.value
        return found

    def lags() -> bool:
        nonlocal now
        now = values_now()
        return all(now.get(name) for name in ("position_offset", "lag_records", "lag_bytes", "lag_seconds"))

    now: dict[str, float] = {}
    with adapter:
        try:
            wait_for(lags, "the endpoint to be behind")
            assert now["position_offset"] + now["lag_records"] == records
            assert now["lag_bytes"] == pytest.approx(now["lag_records"] * 2 * size, rel=0.1), "a header has the value, too"
            assert (now["running"], now["latency_seconds_count"]) == (1, 0)
        finally:
            go_on.set()
        wait_for(lambda: values_now()["latency_seconds_count"] == records, "the records to be handled")
        now = values_now()
        assert (now["position_offset"], now["lag_records"], now["lag_bytes"], now["lag_seconds"]) == (records, 0, 0, 0)
        assert now["latency_seconds_sum"] > 0


def test_failed_append_retakes_the_partition_and_a_late_entry_is_ignored(
    kafka: EmbeddedKafka, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, doubtful = InboundLog.schedule, list[Ref]()

    def failing(log: InboundLog, refs: Sequence[Ref]) -> None:
        if not doubtful and any(ref.offset > 0 for ref in refs):
            doubtful.extend(refs)
            raise Unavailable("the append timed out")
        schedule(log, refs)

    monkeypatch.setattr(InboundLog, "schedule", failing)
    seen = Seen()
    with active(kafka, ActivationSpec(topics=(topic,), group=topic, batch=5), seen) as activation:
        produce(kafka.bootstrap, topic, values(200))
        assert Counter(seen.wait(200)) == Counter(values(200))
        assert doubtful
        schedule(activation._log, doubtful)
        nothing_in_flight(kafka, topic)
    assert Counter(seen.values) == Counter(values(200))


def test_topic_pattern_subscribes_to_all_matching_topics(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    create(kafka.bootstrap, f"{topic_prefix}.in.a", f"{topic_prefix}.in.b")
    for name in "ab":
        produce(kafka.bootstrap, f"{topic_prefix}.in.{name}", [name])
    seen = Seen()
    with active(kafka, ActivationSpec(topics=(f"^{topic_prefix}\\.in\\..*",), group=topic_prefix), seen):
        assert sorted(seen.wait(2)) == ["a", "b"]


class Counting:
    """An asynchronous endpoint class, of which each worker has an instance."""

    made: list[Counting] = []  # noqa: RUF012 - of the class, on purpose
    seen: list[str] = []  # noqa: RUF012
    workers = 3
    most = 0
    at_work = 0

    def __init__(self) -> None:
        self.closed = False
        Counting.made.append(self)

    async def on_record(self, record: Record) -> None:
        Counting.at_work += 1
        Counting.most = max(Counting.most, Counting.at_work)
        while len(Counting.made) < Counting.workers:  # leaves work for a thread that is scheduled late
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        Counting.seen.append(text(record))
        Counting.at_work -= 1

    def close(self) -> None:
        self.closed = True


def test_each_worker_has_its_own_endpoint_instance_and_workers_limit_concurrency(kafka: EmbeddedKafka, topic: str) -> None:
    produce(kafka.bootstrap, topic, values(100))
    with active(kafka, ActivationSpec(topics=(topic,), group=topic, workers=Counting.workers), Counting):
        wait_for(lambda: len(Counting.seen) >= 100, "all records")
    assert sorted(Counting.seen) == sorted(values(100))
    assert len(Counting.made) == Counting.workers
    assert Counting.most <= Counting.workers
    assert all(instance.closed for instance in Counting.made)


def test_failing_record_is_retried_then_dead_lettered_and_can_be_returned(
    kafka: EmbeddedKafka,
    topic: str,
    bascule: Bascule,  # noqa: F811
) -> None:
    broken = threading.Event()
    broken.set()

    def act(record: Record) -> None:
        if record.key == b"never" and broken.is_set():
            raise ValueError("not this one")
        if record.key == b"twice" and record.failures < 2:
            raise KeyError(record.failures)

    seen = Seen(act)
    at = ("--group", topic, "--kafka", kafka.bootstrap)
    with active(kafka, ActivationSpec(topics=(topic,), group=topic, retries=2, backoff=QUICK), seen) as activation:
        produce(kafka.bootstrap, topic, ["n", "t", "o"], keys=["never", "twice", "once"], partition=1)
        assert sorted(seen.wait(2)) == ["o", "t"]
        letters = Watcher(kafka.bootstrap, f"{topic}.dead-letter")
        letters.wait(1)
        tries = Watcher(kafka.bootstrap, f"{topic}.retry")
        tries.wait(4)
        listed = bascule("adapter", "dead-letters", "list", *at)
        assert f"{topic}/1/0" in listed.stdout
        assert "ValueError: not this one" in listed.stdout
        broken.clear()
        assert bascule("adapter", "dead-letters", "return", *at).stderr == "returned: 1\n"
        seen.wait(3)
        assert bascule("adapter", "dead-letters", "return", *at).stderr == "returned: 0\n"
        assert bascule("adapter", "dead-letters", "list", *at).stdout == f"{topic}: no dead letters\n"
        nothing_in_flight(kafka, topic)
        assert bascule("adapter", "status", *at).stdout == f"{topic}: 0 in flight, 0 dead letters\n"
        wait_for(lambda: activation.status().counts["delivered"] == 3, "all to be counted")
        counts = activation.status().counts
    (twice,) = [record for record in seen.records if record.key == b"twice"]
    assert (twice.topic, twice.partition, twice.offset, twice.failures, twice.headers) == (topic, 1, 1, 2, ())
    headers = dict(letters.records[0].headers())
    assert {name: headers[f"__connect.errors.{name}"].decode() for name in ("topic", "partition", "offset", "connector.name")} == {
        "topic": topic, "partition": "1", "offset": "0", "connector.name": topic,
    }  # fmt: skip
    assert headers["__connect.errors.exception.class.name"] == b"ValueError"
    assert headers["__connect.errors.exception.message"] == b"not this one"
    assert headers["bascule.retry.count"] == b"3"
    (second,) = [
        dict(each.headers()) for each in tries.records if each.key() == b"twice" and dict(each.headers())["bascule.retry.count"] == b"2"
    ]
    assert second["bascule.retry.cause"] == b"KeyError: 1"
    assert (counts["failed"], counts["retried"], counts["dead_lettered"], counts["delivered"]) == (5, 4, 1, 3)
    letters.close()
    tries.close()


def test_dead_letter_topic_is_configurable(
    kafka: EmbeddedKafka,
    topic: str,
    bascule: Bascule,  # noqa: F811
) -> None:
    def act(_record: Record) -> None:
        raise ValueError("never")

    produce(kafka.bootstrap, topic, ["one"])
    create(kafka.bootstrap, f"{topic}.dead", partitions=1)
    at = ("--group", topic, "--kafka", kafka.bootstrap, "--topic", f"{topic}.dead")
    with active(kafka, ActivationSpec(topics=(topic,), group=topic, retries=0, dead_letter_topic=f"{topic}.dead"), act):
        Watcher(kafka.bootstrap, f"{topic}.dead").wait(1)
        nothing_in_flight(kafka, topic)
    assert bascule("adapter", "status", *at).stdout == f"{topic}: 0 in flight, 1 dead letters\n"
    assert "ValueError: never" in bascule("adapter", "dead-letters", "list", *at).stdout


def test_record_with_key_too_large_for_dead_letters_blocks_no_other_and_returns_whole(
    kafka: EmbeddedKafka,
    topic: str,
    bascule: Bascule,  # noqa: F811
) -> None:
    Topics({"bootstrap.servers": kafka.bootstrap}).create(f"{topic}.dead-letter", 1, {"max.message.bytes": "20000"})
    key = "k" * 40_000
    produce(kafka.bootstrap, topic, ["large", "behind"], keys=[key], partition=0)
    fails = True

    def act(record: Record) -> None:
        if fails and text(record) == "large":
            raise ValueError("not now")

    seen = Seen(act)
    with active(kafka, ActivationSpec(topics=(topic,), group=topic, retries=0, order=Order.PARTITION), seen):
        assert seen.wait(1) == ["behind"]
        letters = Watcher(kafka.bootstrap, f"{topic}.dead-letter")
        assert letters.wait(1) == [""]
        assert letters.records[0].key() is None
        said = dict(letters.records[0].headers())["bascule.retry.left-out"].decode()
        assert said.startswith("key, value and headers: ")
        fails = False
        bascule("adapter", "dead-letters", "return", "--group", topic, "--kafka", kafka.bootstrap)
        seen.wait(2)
    assert (text(seen.records[1]), seen.records[1].key) == ("large", key.encode())


def test_group_starting_at_latest_also_reads_records_sent_while_the_group_has_no_member(kafka: EmbeddedKafka, topic: str) -> None:
    for partition in (0, 1):
        produce(kafka.bootstrap, topic, values(2000), partition=partition)
    seen, spec = Seen(), ActivationSpec(topics=(topic,), group=topic, start=Start.LATEST)
    with active(kafka, spec, seen) as activation:
        wait_for(lambda: list(activation.status().partitions.values()) == ["ready"] * 6, "all partitions")
        produce(kafka.bootstrap, topic, ["then"], partition=0)
        assert seen.wait(1) == ["then"]
    produce(kafka.bootstrap, topic, ["meanwhile"], partition=1)
    with active(kafka, spec, seen):
        assert seen.wait(2) == ["then", "meanwhile"]
        nothing_in_flight(kafka, topic)


def test_stopped_adapter_can_be_started_again(kafka: EmbeddedKafka, topic: str) -> None:
    adapter, seen = ResourceAdapter({"bootstrap.servers": kafka.bootstrap}), Seen()
    adapter.endpoint(ActivationSpec(topics=(topic,), group=topic))(seen)
    for number, value in enumerate(("one", "two")):
        with adapter:
            produce(kafka.bootstrap, topic, [value])
            seen.wait(number + 1)
            assert adapter.status()[0].running
        assert not adapter.status()[0].running
    assert seen.values == ["one", "two"]
    assert adapter.status()[0].counts["delivered"] == 2


def test_endpoint_metrics_are_served_to_prometheus(kafka: EmbeddedKafka, topic: str) -> None:
    adapter = ResourceAdapter({"bootstrap.servers": kafka.bootstrap})
    seen = Seen()
    adapter.endpoint(ActivationSpec(topics=(topic,), group=topic))(seen)
    produce(kafka.bootstrap, topic, values(3))
    with adapter:
        seen.wait(3)
        url = f"http://127.0.0.1:{serve_metrics(adapter, 0)}/metrics"
        delivered = f'bascule_adapter_delivered_total{{group="{topic}"}} 3.0'
        wait_for(lambda: delivered in urllib.request.urlopen(url).read().decode().splitlines(), "three to be counted")
        lines = urllib.request.urlopen(url).read().decode().splitlines()
    assert f'bascule_adapter_dead_letters{{group="{topic}"}} 0.0' in lines


def test_activation_refuses_to_start_on_unreadable_inbound_log(kafka: EmbeddedKafka, topic: str) -> None:
    produce(kafka.bootstrap, topic, ["one"])
    spec = ActivationSpec(topics=(topic,), group=topic)
    with active(kafka, spec, Seen()) as activation:
        wait_for(lambda: activation.status().counts["delivered"] == 1, "the record")
    produce(kafka.bootstrap, f"{topic}.inbound", ["by hand"])
    again = Activation({"bootstrap.servers": kafka.bootstrap}, spec, Seen())
    for _ in range(2):
        with pytest.raises(LogUnreadable, match="unreadable key b'by hand'"):
            again.start()


def test_static_member_rejoins_after_duplicated_join_request(kafka: EmbeddedKafka, topic: str) -> None:
    """As after a pause of Kafka, the client repeats the request, and its own repetition fences it."""
    produce(kafka.bootstrap, topic, values(10))
    seen = Seen()
    with KafkaProxy(kafka.port) as proxy:
        twice = proxy.inject(Api.JOIN_GROUP, Action.DUPLICATE)
        with active(proxy, ActivationSpec(topics=(topic,), group=topic), seen, group_instance_id="one") as activation:
            assert sorted(seen.wait(10)) == values(10)
            assert (twice.hit, activation.status().running) == (True, True)


def test_of_two_members_with_same_instance_id_one_stops_with_reason_and_the_other_reads_on(kafka: EmbeddedKafka, topic: str) -> None:
    spec, seen = ActivationSpec(topics=(topic,), group=topic), Seen()
    with active(kafka, spec, seen, group_instance_id="one") as first, active(kafka, spec, seen, group_instance_id="one") as second:
        wait_for(lambda: not (first.status().running and second.status().running), "one of them to be suspended", 90)
        told = [each.status() for each in (first, second) if not each.status().running]
        assert len(told) == 1
        assert "under the same name" in told[0].trouble
        assert told[0].partitions == {}
        produce(kafka.bootstrap, topic, values(10))
        assert sorted(seen.wait(10)) == values(10)
