"""The exactly-once writer on Kafka in memory: its output, its reactions to faults, and the transactions that it leaves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from confluent_kafka import KafkaError

from bascule.core.errors import TooLarge
from bascule.core.kafka_records import Outgoing, Output
from bascule.kafka import clients, transactional
from bascule.kafka.redrive import Redrive
from bascule.kafka.transactional import TransactionalWriter, end_open_transactions
from bascule.writer.carried import CarriedCounts, PipelineCount
from bascule.writer.errors import PositionMoved, Unwritable, WriteDenied
from bascule.writer.incarnation import Attempt
from bascule.writer.position import Position, position_partition
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.support.system import wait_for
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]  # imported fixtures

FIRST, SECOND, THIRD = (Position("source", "id", 0, offset) for offset in (0, 5, 9))


@pytest.fixture
def writers(kafka: KafkaInMemory) -> Iterator[list[TransactionalWriter]]:
    """Yield two writers with the same transactional id."""
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


def test_output_and_position_are_committed_together_in_successive_transactions(
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


def test_output_in_advance_is_committed_once_and_abandoned_output_never(kafka: KafkaInMemory, writers: list[TransactionalWriter]) -> None:
    writer = writers[0]
    writer.write([], None, FIRST)
    writer.ahead(outputs("1"), FIRST)
    writer.write(outputs("1", "2"), FIRST, SECOND)
    writer.ahead(outputs("lost"), SECOND)
    writer.abandon()
    assert kafka.values("out") == [b"1", b"2"]
    assert position(kafka) == SECOND


def test_writer_with_position_moved_by_second_writer_writes_nothing(kafka: KafkaInMemory, writers: list[TransactionalWriter]) -> None:
    writer, second = writers
    writer.write([], None, FIRST)
    second.current()
    second.write(outputs("second"), FIRST, SECOND)
    with pytest.raises(PositionMoved) as moved:
        writer.write(outputs("doubled"), FIRST, SECOND)
    assert moved.value.found == SECOND
    assert kafka.values("out") == [b"second"]


@pytest.mark.parametrize("call", ["init_transactions", "begin_transaction", "produce", "commit_transaction", "after_commit"])
@pytest.mark.parametrize("code", [KafkaError._TIMED_OUT, KafkaError._FENCED])
def test_single_failed_call_neither_duplicates_nor_loses_output(
    kafka: KafkaInMemory, writers: list[TransactionalWriter], call: str, code: int
) -> None:
    """With ``after_commit``, the transaction is committed, but the writer does not know the outcome."""
    writer = writers[0]
    writer.write([], None, FIRST)
    kafka.fail(call, code)
    writer.write(outputs("1", "2"), FIRST, SECOND)
    assert kafka.values("out") == [b"1", b"2"]
    assert position(kafka) == SECOND


def test_slow_commit_is_retried_while_progress_continues(
    kafka: KafkaInMemory, writers: list[TransactionalWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "PROGRESS_S", 0.01)
    writer = writers[0]
    writer.write([], None, FIRST)
    kafka.fail("commit_transaction", KafkaError._TIMED_OUT, times=3, retriable=True)
    writer.write(outputs("1"), FIRST, SECOND)
    assert kafka.values("out") == [b"1"]
    assert kafka.transactional["id"].epoch == 1  # one incarnation for each transaction; the three retries need none


def test_refused_record_is_named_and_nothing_is_committed(kafka: KafkaInMemory, writers: list[TransactionalWriter]) -> None:
    writer = writers[0]
    writer.write([], None, FIRST)
    kafka.topics["out"].config["max.message.bytes"] = "3"
    with pytest.raises(Unwritable) as refused:
        writer.write(outputs("1", "large", "2"), FIRST, SECOND)
    assert list(refused.value.faults) == [1]
    assert kafka.values("out") == []
    assert position(kafka) == FIRST


def test_record_refused_by_client_is_named(kafka: KafkaInMemory) -> None:
    kafka.create("out")
    kafka.create("positions", 16, cleanup_policy="compact")
    with closing(TransactionalWriter({**SETTINGS, "message.max.bytes": 1000}, "id", "positions", "key", deadline_s=1.0)) as writer:
        refuse = pytest.raises(Unwritable)
        with refuse as refused:
            writer.write(outputs("1", "x" * 1100), None, FIRST)
    assert list(refused.value.faults) == [1]


def test_write_to_denied_topic_raises_write_denied(kafka: KafkaInMemory, writers: list[TransactionalWriter]) -> None:
    kafka.denied.add("out")
    with pytest.raises(WriteDenied):
        writers[0].write(outputs("1"), None, FIRST)


def test_open_transaction_of_earlier_writer_is_aborted(kafka: KafkaInMemory) -> None:
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


def test_closed_transactional_writer_leaves_no_client(kafka: KafkaInMemory) -> None:
    kafka.create("out")
    kafka.create("positions", 16, cleanup_policy="compact")
    with closing(TransactionalWriter(SETTINGS, "id", "positions", "key")) as writer:
        writer.write(outputs("1"), None, FIRST)
        assert kafka.open_clients()
    del writer

    def gone() -> bool:
        gc.collect()  # in this process, other tests may have made the collector seldom
        return kafka.open_clients() == []

    wait_for(gone, "all clients to be gone")


def test_dead_letters_and_offsets_are_moved_in_one_transaction(kafka: KafkaInMemory) -> None:
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
    with pytest.raises(TooLarge, match=r"dead-0, offset 2, of 5 bytes, is too large for retry.*; nothing was moved"):
        letters.move(lambda record: Outgoing("retry", None, record.value))
    assert letters.count() == 1
    kafka.create("dead", 2)
    kafka.offsets.clear()
    kafka.put("dead", b"new")
    assert letters.count() == 1


@pytest.mark.parametrize(
    ("key", "longest_s"), [("ingress:in/t/0", 60), ("redrive", 60), ("diverts/journal/0", 300), ("divert:a/journal/0", 300)]
)
def test_transactions_for_the_broker_have_one_minute_timeout_at_most(kafka: KafkaInMemory, key: str, longest_s: int) -> None:
    with closing(TransactionalWriter(SETTINGS, "id", "positions", key)) as writer:
        found = [writer._effects.settings(Attempt(long=long))["transaction.timeout.ms"] for long in (False, True)]
    assert found == [30_000, longest_s * 1000]


def test_counts_of_a_position_are_a_header_of_its_record_and_are_read_with_it(
    kafka: KafkaInMemory, writers: list[TransactionalWriter]
) -> None:
    counted = replace(FIRST, carried=CarriedCounts({"orders": PipelineCount(1, 2, 3)}))
    writers[0].write(outputs("1"), None, counted)
    found = writers[1].current()
    assert found is not None
    assert found.carried == counted.carried
    partition = kafka.partition("positions", position_partition("key"))
    headers = {each.value: each.headers for each in partition.records.values() if each.key == b"key"}
    assert headers == {FIRST.encode(): [("bascule.carried", counted.carried.encode())]}
    writers[1].write([], counted, SECOND)  # as an earlier version writes it
    again = writers[0].current()
    assert again is not None
    assert again.carried == CarriedCounts()
