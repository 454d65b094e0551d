"""Endpoints of the adapter with a real Kafka: at least once, retries, dead letters, order, hanging endpoints, handing over."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from bascule.adapter.inbound import Activation, ActivationSpec, Backoff, InboundLog, Order, Record, ResourceAdapter, Start
from bascule.adapter.inbound import activation as module
from bascule.adapter.inbound.dead_letters import DeadLetters
from bascule.adapter.inbound.metrics import serve_metrics
from bascule.adapter.inbound.record import dead_letter_of
from bascule.adapter.inbound.state import LogUnreadable, Ref
from bascule.core.errors import InvalidInput, Unavailable
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from tests.scenarios.adapter_topics import Watcher, create, produce
from tests.scenarios.test_guards import set_topic
from tests.support.kafka_proxy import Action, Api, KafkaProxy
from tests.support.system import wait_for
from tests.unit.cli.conftest import Bascule, bascule  # noqa: F401 - a fixture

QUICK = Backoff(0.05, 2.0, 0.2)


@contextmanager
def active(kafka: EmbeddedKafka | KafkaProxy, spec: ActivationSpec, endpoint: Any, **client: str) -> Iterator[Activation]:
    """``client``: settings of the Kafka client, with underscores for dots."""
    settings = {name.replace("_", "."): value for name, value in client.items()}
    activation = Activation({"bootstrap.servers": kafka.bootstrap, **settings}, spec, endpoint)
    activation.start()
    try:
        yield activation
    finally:
        activation.stop(5.0)


@pytest.fixture
def topic(kafka: EmbeddedKafka, topic_prefix: str) -> str:
    """Of two partitions."""
    create(kafka.bootstrap, topic_prefix)
    return topic_prefix


def values(count: int) -> list[str]:
    return [f"v{number}" for number in range(count)]


def text(record: Record) -> str:
    return (record.value or b"").decode()


class Seen:
    """An endpoint that keeps what it is given; ``act`` may fail."""

    def __init__(self, act: Callable[[Record], None] = lambda _: None) -> None:
        self.records: list[Record] = []
        self._act = act

    def __call__(self, record: Record) -> None:
        self._act(record)
        self.records.append(record)

    @property
    def values(self) -> list[str]:
        return [text(record) for record in self.records]

    def wait(self, count: int) -> list[str]:
        wait_for(lambda: len(self.records) >= count, f"{count} records; there are {len(self.records)}", 90)
        return self.values


def nothing_in_flight(kafka: EmbeddedKafka, group: str) -> None:
    log = InboundLog("look", {"bootstrap.servers": kafka.bootstrap}, group=group)
    wait_for(lambda: log.all_flights() == {}, "nothing in flight")
    log.close()


def test_each_record_comes_once_and_is_in_flight_no_more(kafka: EmbeddedKafka, topic: str) -> None:
    produce(kafka.bootstrap, topic, values(1000))
    seen = Seen()
    with active(kafka, ActivationSpec(topics=(topic,), group=topic), seen):
        seen.wait(1000)
        produce(kafka.bootstrap, topic, ["last"])
        seen.wait(1001)
        nothing_in_flight(kafka, topic)
    assert Counter(seen.values) == Counter([*values(1000), "last"])


def test_partition_is_taken_over_anew_after_failed_append_and_entry_that_comes_late_does_not_count(
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


def test_a_pattern_takes_in_all_topics_that_it_names(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    create(kafka.bootstrap, f"{topic_prefix}.in.a", f"{topic_prefix}.in.b")
    for name in "ab":
        produce(kafka.bootstrap, f"{topic_prefix}.in.{name}", [name])
    seen = Seen()
    with active(kafka, ActivationSpec(topics=(f"^{topic_prefix}\\.in\\..*",), group=topic_prefix), seen):
        assert sorted(seen.wait(2)) == ["a", "b"]


class Counting:
    """An endpoint as a class, of which each worker has an instance; async."""

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
        while len(Counting.made) < Counting.workers:  # however late a thread has its turn, something is left for it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        Counting.seen.append(text(record))
        Counting.at_work -= 1

    def close(self) -> None:
        self.closed = True


def test_each_worker_has_an_instance_and_no_more_are_at_work_than_there_are_workers(kafka: EmbeddedKafka, topic: str) -> None:
    produce(kafka.bootstrap, topic, values(100))
    with active(kafka, ActivationSpec(topics=(topic,), group=topic, workers=Counting.workers), Counting):
        wait_for(lambda: len(Counting.seen) >= 100, "all records")
    assert sorted(Counting.seen) == sorted(values(100))
    assert len(Counting.made) == Counting.workers
    assert Counting.most <= Counting.workers
    assert all(instance.closed for instance in Counting.made)


def test_a_record_that_fails_is_tried_again_and_dead_in_the_end_and_can_be_sent_back(
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


def test_dead_letters_may_have_another_topic(
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
        nothing_in_flight(kafka, topic)
        Watcher(kafka.bootstrap, f"{topic}.dead").wait(1)
    assert bascule("adapter", "status", *at).stdout == f"{topic}: 0 in flight, 1 dead letters\n"
    assert "ValueError: never" in bascule("adapter", "dead-letters", "list", *at).stdout


def test_a_record_whose_key_alone_is_too_large_for_the_dead_letters_holds_nobody_up_and_comes_back_whole(
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


def test_who_waits_for_a_next_try_holds_nobody_up(kafka: EmbeddedKafka, topic: str) -> None:
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
def test_records_that_belong_together_keep_their_order_though_one_fails(kafka: EmbeddedKafka, topic: str, order: Order) -> None:
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


def test_a_failure_count_outlives_the_member_where_order_is_kept(kafka: EmbeddedKafka, topic: str) -> None:
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


def test_a_worker_that_hangs_is_named_replaced_and_what_it_does_later_is_not_taken_for_success(
    kafka: EmbeddedKafka, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    def act(record: Record) -> None:
        if record.key == b"stuck" and record.failures == 0:
            go_on.wait(60)

    seen = Seen(act)
    spec = ActivationSpec(topics=(topic,), group=topic, workers=1, delivery_timeout_s=3.0, backoff=QUICK)
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
    assert "nothing of it counts" in caplog.text


def test_a_partition_goes_to_another_member_when_what_is_at_work_is_done(kafka: EmbeddedKafka, topic: str) -> None:
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


def test_a_group_that_begins_at_the_end_takes_what_comes_from_then_on_also_while_it_has_no_member(kafka: EmbeddedKafka, topic: str) -> None:
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


def test_an_adapter_may_be_started_again(kafka: EmbeddedKafka, topic: str) -> None:
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


def test_the_state_of_endpoints_is_served_to_prometheus(kafka: EmbeddedKafka, topic: str) -> None:
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


def test_a_log_that_cannot_be_read_holds_the_partition_up_and_nothing_of_it_is_passed_over(kafka: EmbeddedKafka, topic: str) -> None:
    produce(kafka.bootstrap, topic, ["one"])
    spec = ActivationSpec(topics=(topic,), group=topic)
    with active(kafka, spec, Seen()) as activation:
        wait_for(lambda: activation.status().counts["delivered"] == 1, "the record")
    produce(kafka.bootstrap, f"{topic}.inbound", ["by hand"])
    again = Activation({"bootstrap.servers": kafka.bootstrap}, spec, Seen())
    for _ in range(2):
        with pytest.raises(LogUnreadable, match="unreadable key b'by hand'"):
            again.start()


def test_a_member_with_a_name_whose_request_to_join_comes_twice_joins_again_by_itself(kafka: EmbeddedKafka, topic: str) -> None:
    """As over a pause of Kafka: the client repeats the request, and is fenced by itself."""
    produce(kafka.bootstrap, topic, values(10))
    seen = Seen()
    with KafkaProxy(kafka.port) as proxy:
        twice = proxy.inject(Api.JOIN_GROUP, Action.DUPLICATE)
        with active(proxy, ActivationSpec(topics=(topic,), group=topic), seen, group_instance_id="one") as activation:
            assert sorted(seen.wait(10)) == values(10)
            assert (twice.hit, activation.status().running) == (True, True)


def test_of_two_members_of_one_name_one_stands_still_and_says_so_and_the_other_reads_on(kafka: EmbeddedKafka, topic: str) -> None:
    spec, seen = ActivationSpec(topics=(topic,), group=topic), Seen()
    with active(kafka, spec, seen, group_instance_id="one") as first, active(kafka, spec, seen, group_instance_id="one") as second:
        wait_for(lambda: not (first.status().running and second.status().running), "one of them to stand still", 90)
        told = [each.status() for each in (first, second) if not each.status().running]
        assert len(told) == 1
        assert "under this one's name" in told[0].trouble
        assert told[0].partitions == {}
        produce(kafka.bootstrap, topic, values(10))
        assert sorted(seen.wait(10)) == values(10)


def test_a_source_that_is_not_there_is_told_and_read_when_it_is(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOUSEKEEP_S", 0.2)
    seen = Seen()
    settings = {"topic_metadata_refresh_interval_ms": "200"}
    with active(kafka, ActivationSpec(topics=(topic_prefix,), group=topic_prefix), seen, **settings) as activation:
        assert activation.status().trouble == f"not there: {topic_prefix}"
        create(kafka.bootstrap, topic_prefix)
        produce(kafka.bootstrap, topic_prefix, ["first"])
        assert seen.wait(1) == ["first"]
        wait_for(lambda: not activation.status().trouble, "no trouble any more")


def limit(kafka: EmbeddedKafka, topic: str, size_bytes: int) -> None:
    set_topic(kafka.bootstrap, topic, "max.message.bytes", str(size_bytes))


def test_a_letter_too_large_for_the_retry_topic_is_named_and_goes_back_when_there_is_room(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    """Else it stood before all others, and nobody knew which it was."""
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
    with pytest.raises(InvalidInput, match=rf"{dead}-0, offset 1, of 20000 bytes, is too large for {retry}: raise max.message.bytes"):
        letters.send_back()
    assert letters.send_back(1) == 1
    limit(kafka, retry, 30_000)
    assert letters.send_back() == 2
    watcher = Watcher(kafka.bootstrap, retry)
    assert watcher.wait(3) == ["small", "x" * 20_000, "small, too"]
    watcher.close()


def test_a_record_for_which_the_dead_letter_topic_has_no_room_at_all_is_the_trouble_of_its_endpoint_until_there_is(
    kafka: EmbeddedKafka, topic: str
) -> None:
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
        assert said.startswith(f"{topic}-0, offset 0 cannot be dead-lettered: {dead}: ")
        assert said.endswith("; raise max.message.bytes of that topic")
        produce(kafka.bootstrap, topic, ["good"], keys=["good"], partition=0)
        assert seen.wait(1) == ["good"]
        limit(kafka, dead, 20_000)
        wait_for(lambda: not activation.status().trouble, "no trouble any more")
        assert Watcher(kafka.bootstrap, dead).wait(1) == ["bad"]
