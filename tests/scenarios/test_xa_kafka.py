"""Kafka as a resource: the messages of a branch appear all at once, exactly once, whichever process finishes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.core.effects import run_blocking
from bascule.core.errors import InvalidInput
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients, slot
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import Stored
from bascule.threads.clock import elapsed_s
from bascule.xa import Vote, Xid
from bascule.xa.blocking import now_ms
from bascule.xa.errors import BranchRolledBack, DuplicateXid, OutOfOrder, UnknownXid
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_protocol import LIMITS, BranchLimits
from bascule.xa.xid import branch, new_gtrid
from tests.scenarios.topics import Reader, create, produce
from tests.support.crash_points import at_crash_points
from tests.support.system import wait_for

TIMEOUT_S = 30.0
Make = Callable[..., KafkaResource]


@pytest.fixture
def make(kafka: EmbeddedKafka, topic_prefix: str) -> Iterator[Make]:
    """Create the resource as each process would. All processes share the side topic and the log."""
    made: list[KafkaResource] = []

    def make(instance: str = "one", limits: BranchLimits = LIMITS) -> KafkaResource:
        settings = {"bootstrap.servers": kafka.bootstrap}
        made.append(KafkaResource("kafka", settings, prefix=f"{topic_prefix}.xa", instance=instance, limits=limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def topic(kafka: EmbeddedKafka, topic_prefix: str) -> str:
    create(kafka.bootstrap, topic_prefix)
    return topic_prefix


def new_xid() -> Xid:
    return branch(new_gtrid("test", 0), "kafka")


def prepared(resource: KafkaResource, topic: str, *values: str) -> Xid:
    xid = new_xid()
    handle = resource.start(xid, timeout_s=TIMEOUT_S)
    for value in values:
        handle.send(topic, value.encode())
    resource.end(xid, success=True)
    assert resource.prepare(xid) is Vote.YES
    return xid


def committed(kafka: EmbeddedKafka, topic: str) -> list[str]:
    """Return what a reader gets, up to a record that is written after everything else."""
    produce(kafka.bootstrap, topic, ["last"])
    reader = Reader(kafka.bootstrap, topic)
    try:
        return reader.read_until("last")[:-1]
    finally:
        reader.close()


def test_prepared_kafka_branch_commits_in_the_process_that_prepared_it(make: Make, kafka: EmbeddedKafka, topic: str) -> None:
    resource = make()
    xid = prepared(resource, topic, "a", "b", "c")
    assert resource.recover() == [xid]
    resource.commit(xid)
    assert resource.recover() == []
    with pytest.raises(UnknownXid):
        resource.commit(xid)
    assert committed(kafka, topic) == ["a", "b", "c"]


@pytest.mark.slow
@pytest.mark.parametrize("finish", ["commit", "rollback"])
def test_another_process_finishes_a_prepared_branch_once(make: Make, kafka: EmbeddedKafka, topic: str, finish: str) -> None:
    first, second, third = make("one"), make("two"), make("three")
    xid = prepared(first, topic, "a", "b")
    assert second.recover() == third.recover() == [xid]
    getattr(second, finish)(xid)
    for other in (first, second, third):
        with pytest.raises(UnknownXid):
            getattr(other, finish)(xid)
    assert third.recover() == []
    assert committed(kafka, topic) == (["a", "b"] if finish == "commit" else [])


def test_branch_committed_by_several_processes_at_once_is_written_once(make: Make, kafka: EmbeddedKafka, topic: str) -> None:
    resources = [make(str(number)) for number in range(3)]
    xids = [prepared(resources[0], topic, f"{number}a", f"{number}b") for number in range(4)]
    answers: list[str] = []

    def commit(resource: KafkaResource, xid: Xid) -> None:
        try:
            resource.commit(xid)
            answers.append("committed")
        except UnknownXid:
            answers.append("gone")

    threads = [threading.Thread(target=commit, args=(resource, xid)) for resource in resources for xid in xids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 12
    assert resources[1].recover() == []
    assert sorted(committed(kafka, topic)) == sorted(f"{number}{letter}" for number in range(4) for letter in "ab")


def test_records_of_a_branch_are_not_visible_before_commit_nor_after_rollback(make: Make, kafka: EmbeddedKafka, topic: str) -> None:
    resource = make()
    undone = new_xid()
    resource.start(undone, timeout_s=TIMEOUT_S).send(topic, b"undone")
    resource.rollback(undone)
    given_up = prepared(resource, topic, "given up")
    waiting = prepared(resource, topic, "waiting")
    resource.rollback(given_up)
    assert resource.recover() == [waiting]
    assert committed(kafka, topic) == []
    resource.commit(waiting)


def test_a_branch_that_sent_nothing_votes_read_only(make: Make) -> None:
    resource, xid = make(), new_xid()
    resource.start(xid, timeout_s=TIMEOUT_S)
    resource.end(xid, success=True)
    assert resource.prepare(xid) is Vote.READ_ONLY
    with pytest.raises(UnknownXid):
        resource.commit(xid)


def test_kafka_branch_commits_in_one_phase(make: Make, kafka: EmbeddedKafka, topic: str) -> None:
    resource = make()
    for number in range(3):
        xid = new_xid()
        resource.start(xid, timeout_s=TIMEOUT_S).send(topic, str(number).encode())
        resource.end(xid, success=True)
        resource.commit(xid, one_phase=True)
    assert resource.recover() == []
    assert committed(kafka, topic) == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("finish", ["commit", "rollback"])
def test_one_phase_commit_reports_the_outcome_set_by_another_process(
    make: Make, kafka: EmbeddedKafka, topic: str, monkeypatch: pytest.MonkeyPatch, finish: str
) -> None:
    resource, other, xid = make("one"), make("two"), new_xid()
    resource.start(xid, timeout_s=TIMEOUT_S).send(topic, b"paid")
    resource.end(xid, success=True)
    points: list[str] = []

    def point(name: str) -> None:
        points.append(name)
        if points.count("slot.commit.before") == 1 and name == "slot.commit.before":
            getattr(other, finish)(xid)  # which fences the transaction that is open here

    at_crash_points(monkeypatch, point)
    # The other one has its own time limit, which here is part of the limit of this one.
    monkeypatch.setattr(slot, "TRANSACT_DEADLINE_S", 3 * slot.TRANSACT_DEADLINE_S)
    with nullcontext() if finish == "commit" else pytest.raises(BranchRolledBack, match="another process"):
        resource.commit(xid, one_phase=True)
    assert points.count("slot.commit.before") == 2
    assert resource.recover() == []
    assert resource.started() == {}
    assert committed(kafka, topic) == (["paid"] if finish == "commit" else [])


def test_record_keeps_its_value_key_headers_and_timestamp(make: Make, kafka: EmbeddedKafka, topic: str) -> None:
    first, second = make("one"), make("two")
    expected = []
    for finisher in (first, second):  # from memory, and from the side topic
        xid = new_xid()
        handle = first.start(xid, timeout_s=TIMEOUT_S)
        handle.send(topic, b"value", b"key", headers=[("one", b"1"), ("none", None), ("one", b"2")], timestamp_ms=1234567890123)
        handle.send(topic, None, b"gone", partition=0)
        first.end(xid, success=True)
        first.prepare(xid)
        finisher.commit(xid)
        expected += [(b"value", b"key", [("one", b"1"), ("none", None), ("one", b"2")], 1234567890123), (None, b"gone", None, None)]
    produce(kafka.bootstrap, topic, ["last"])
    reader = Reader(kafka.bootstrap, topic)
    found = []
    while len(found) < 4:
        for record in reader._consumer.consume(10, 1):
            found.append((record.value(), record.key(), record.headers(), record.timestamp()[1]))
    reader.close()
    assert [each[:3] for each in found[:4]] == [each[:3] for each in expected]
    assert [found[0][3], found[2][3]] == [1234567890123, 1234567890123]


def test_send_to_a_missing_topic_or_above_the_topic_limit_is_refused_at_once(make: Make, kafka: EmbeddedKafka, topic: str) -> None:
    small = f"{topic}.small"
    topics = Topics({"bootstrap.servers": kafka.bootstrap})
    topics.create(small, 1, {"max.message.bytes": "2000"})
    topics.await_visible([small])
    resource, xid = make(), new_xid()
    handle = resource.start(xid, timeout_s=TIMEOUT_S)
    with pytest.raises(InvalidInput, match="does not exist"):
        handle.send(f"{topic}.missing", b"value")
    with pytest.raises(InvalidInput, match=r"too large for topic .* is 2000"):
        handle.send(small, b"v" * 2000)
    handle.send(small, b"v" * 1700)
    resource.end(xid, success=True)
    resource.commit(xid, one_phase=True)


@pytest.mark.parametrize(
    ("key", "partition", "ahead_s", "expected"),
    [
        (None, 0, 0.0, "needs a key"),
        (b"key", 1, 0.0, "has no partition 1"),
        (b"key", 0, 7200.0, "does not accept timestamp_ms"),
        (b"key", 0, -172_800.0, "does not accept timestamp_ms"),
    ],
    ids=["no key", "no partition", "future", "past"],
)
def test_record_that_its_topic_would_refuse_at_the_commit_is_refused_at_once(
    make: Make, kafka: EmbeddedKafka, topic: str, key: bytes | None, partition: int, ahead_s: float, expected: str
) -> None:
    """A prepared branch with such a record could never commit, although its transaction has committed elsewhere."""
    strict, timestamp_ms = f"{topic}.strict", now_ms() + int(1000 * ahead_s) if ahead_s else 0
    topics = Topics({"bootstrap.servers": kafka.bootstrap})
    topics.create(strict, 1, {"cleanup.policy": "compact", "message.timestamp.before.max.ms": "86400000"})
    topics.await_visible([strict])
    refused: list[KafkaError | None] = []
    producer = clients.producer({"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True, "message.timeout.ms": 10_000})
    try:
        report = lambda error, _: refused.append(error)  # noqa: E731
        producer.produce(strict, b"1", key, partition=partition, timestamp=timestamp_ms, on_delivery=report)
        producer.flush(30)
    except KafkaException as error:
        refused.append(error.args[0])
    assert [each is not None for each in refused] == [True], "Kafka accepts the record"
    resource, xid = make(), new_xid()
    handle = resource.start(xid, timeout_s=TIMEOUT_S)
    with pytest.raises(InvalidInput, match=expected):
        handle.send(strict, b"1", key, partition=partition, timestamp_ms=timestamp_ms)
    handle.send(strict, b"1", b"key")
    resource.end(xid, success=True)
    assert resource.prepare(xid) is Vote.YES
    resource.commit(xid)
    assert committed_keys(kafka, strict) == [b"key"]


def committed_keys(kafka: EmbeddedKafka, topic: str) -> list[bytes | str | None]:
    reader = Reader(kafka.bootstrap, topic)
    try:
        return [record.key() for record in reader._consumer.consume(1, TIMEOUT_S)]
    finally:
        reader.close()


def test_calls_out_of_order_on_a_kafka_branch_are_refused(make: Make, topic: str) -> None:
    resource, xid = make(), new_xid()
    handle = resource.start(xid, timeout_s=TIMEOUT_S)
    handle.send(topic, b"value")
    with pytest.raises(DuplicateXid):
        resource.start(xid, timeout_s=TIMEOUT_S)
    for call in (lambda: resource.prepare(xid), lambda: resource.commit(xid), lambda: resource.commit(xid, one_phase=True)):
        with pytest.raises(OutOfOrder):
            call()
    resource.end(xid, success=True)
    with pytest.raises(OutOfOrder):
        handle.send(topic, b"late")
    with pytest.raises(OutOfOrder):
        resource.commit(xid)
    resource.rollback(xid)
    with pytest.raises(UnknownXid):
        resource.end(xid, success=True)
    with pytest.raises(UnknownXid):
        resource.rollback(xid)


def test_a_large_branch_is_read_back_from_the_side_topic(make: Make, kafka: EmbeddedKafka, topic: str) -> None:
    resource = make(limits=BranchLimits(kept_bytes_max=1000))
    values = [f"{number}".rjust(100) for number in range(300)]
    other = prepared(resource, topic, "between")
    resource.commit(prepared(resource, topic, *values))
    resource.rollback(other)
    assert committed(kafka, topic) == values


def test_concurrent_branches_share_kafka_transactions_and_stay_separate(make: Make, kafka: EmbeddedKafka, topic: str) -> None:
    resource = make()
    failed: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for number in range(5):
                xid = prepared(resource, topic, *(f"{thread}.{number}.{part}" for part in range(3)))
                (resource.commit if number % 2 == 0 else resource.rollback)(xid)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert resource.recover() == []
    found = committed(kafka, topic)
    assert sorted(found) == sorted(f"{thread}.{number}.{part}" for thread in range(8) for number in (0, 2, 4) for part in range(3))
    for start in range(0, len(found), 3):  # each branch in one piece, in its order
        assert [value.rpartition(".")[2] for value in found[start : start + 3]] == ["0", "1", "2"]


def test_started_branches_are_listed_separately_and_only_old_branches_are_swept(make: Make, topic: str) -> None:
    resource = make()
    started = new_xid()
    resource.start(started, timeout_s=TIMEOUT_S).send(topic, b"value")
    kept = prepared(resource, topic, "kept")
    assert resource.recover() == [kept]
    assert set(resource.started()) >= {started}
    sweeper = make("sweeper", BranchLimits(unprepared_kept_s=-60.0, clean_interval_s=-1.0))
    assert sweeper.recover() == [kept]
    wait_for(lambda: started not in sweeper.started(), "the deletion of unprepared messages")
    sweeper.commit(kept)  # its messages were not deleted


def test_branch_prepared_while_the_sweeper_was_paused_is_not_swept(make: Make, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resource, sweeper, xid = make(), make("sweeper", BranchLimits(clean_interval_s=-1.0)), new_xid()

    def sent() -> int:
        return sum(run_blocking(sweeper._calls.side_ends()).ends.values())

    assert resource.recover() == []  # creates the topics
    before = sent()
    resource.start(xid, timeout_s=TIMEOUT_S).send(topic, b"kept")
    resource.end(xid, success=True)
    wait_for(lambda: sent() > before, "the message to be stored")
    assert sweeper.recover() == []  # its ends are noted
    read = sweeper._calls.table

    async def read_and_stand_still() -> Mapping[bytes, Stored]:
        table = await read()
        assert resource.prepare(xid) is Vote.YES
        monkeypatch.setattr(sweeper._calls, "monotonic_s", lambda: elapsed_s() + 25 * 3600.0)
        return table

    monkeypatch.setattr(sweeper._calls, "table", read_and_stand_still)
    assert sweeper.recover() == []
    make("recoverer").commit(xid)


def test_no_two_processes_have_the_same_transactional_ids_by_default() -> None:
    """With equal process ids, as in containers, the two processes fenced each other for ever."""
    one, other = (KafkaResource("kafka", {"bootstrap.servers": "127.0.0.1:1"}) for _ in range(2))
    before = set(one._branches.slots)
    assert all(str(os.getpid()) in each for each in before)
    assert before.isdisjoint(other._branches.slots)
    one.after_fork()
    assert before.isdisjoint(one._branches.slots)
