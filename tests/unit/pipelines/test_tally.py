"""What a task counts: once for each committed record, whatever fails before."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from confluent_kafka import KafkaError

from bascule.core.kafka_records import Output
from bascule.pipelines import carry
from bascule.pipelines.carry import Carrier
from bascule.pipelines.spec import PipelinesSpec
from bascule.writer.carried import CarriedCounts, PipelineCount
from bascule.writer.claims import Claim
from bascule.writer.errors import Unwritable
from bascule.writer.lineage import SeenRecord
from bascule.writer.position import Position
from tests.unit.pipelines.test_carry import START, Lineage, Writer
from tests.unit.pipelines.test_carry import Cluster as Topics

PIPELINES = PipelinesSpec("bridge", {}, target_partitions=0)
LETTERS = PIPELINES.topics.dead_letters


class Cluster(Topics):
    """A Kafka that has the dead-letter topic of the pipelines, too."""

    def partitions(self) -> dict[str, int]:
        return {**super().partitions(), LETTERS: 1}


class CountingWriter(Writer):
    """A writer that keeps the positions of its transactions."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[Position] = []
        self.failure: Exception | None = None

    def write(self, outputs: Sequence[Output], *positions: Position, confirm: object = None) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        super().write(outputs, *positions)
        self.stored.append(positions[-1])

    @property
    def carried(self) -> CarriedCounts:
        return self.stored[-1].carried


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> CountingWriter:
    writer = CountingWriter()
    monkeypatch.setattr(carry, "Topics", lambda _: Cluster())
    monkeypatch.setattr(carry, "writer_for", lambda *_: writer)
    monkeypatch.setattr(carry, "_kept", carry._Tools())
    monkeypatch.setattr(carry, "lineage_of", lambda *_: Lineage())
    return writer


def carrier(position: Position = START) -> Carrier:
    return Carrier(PIPELINES, Claim("diverts/journal/0", "journal", "id", 0, "me"), position)


def add(carrying: Carrier, *pipelines: str, sent_ms: int = 0) -> None:
    """Add a record of five bytes of each pipeline, which is replaced by a dead letter of three bytes if Kafka refuses it."""
    for pipeline in pipelines:
        carrying.add(Output("open", None, b"bytes", []), lambda _: Output(LETTERS, None, b"bad", []), pipeline, sent_ms)
    carrying.reach(SeenRecord(carrying._reached, None, b""))


def carry_batch(position: Position, *pipelines: str) -> None:
    with carrier(position) as carrying:
        add(carrying, *pipelines, sent_ms=1)
        carrying.commit()


def test_each_transaction_adds_its_records_to_the_stored_counts(writer: CountingWriter) -> None:
    with carrier() as carrying:
        add(carrying, "a", "b")
        add(carrying, "a")
        carrying.commit()
        assert writer.carried.pipelines == {"a": PipelineCount(2, 10, 0), "b": PipelineCount(1, 5, 0)}
        add(carrying, "b")
        carrying.commit()
    assert writer.carried.pipelines == {"a": PipelineCount(2, 10, 0), "b": PipelineCount(2, 10, 0)}


def test_next_task_continues_from_the_stored_counts_and_counts_no_lost_transaction(writer: CountingWriter) -> None:
    carry_batch(START, "a")
    writer.failure = ConnectionError()
    with pytest.raises(ConnectionError):
        carry_batch(writer.stored[-1], "a", "a")
    carry_batch(writer.stored[-1], "a")
    assert writer.carried.pipelines == {"a": PipelineCount(2, 10, 0)}


def test_record_that_kafka_refuses_counts_as_dead_letter(writer: CountingWriter) -> None:
    with carrier() as carrying:
        add(carrying, "a", "b")
        writer.failure = Unwritable({1: KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)})
        carrying.commit()
    assert writer.topics == ["open", LETTERS]
    assert {name: count.dead_letters for name, count in writer.carried.pipelines.items()} == {"a": 0, "b": 1}


def test_durations_of_a_transaction_are_stored_with_the_next_one(writer: CountingWriter) -> None:
    sent_ms = int(time.time() * 1000) - 200_000
    with carrier() as carrying:
        add(carrying, "a", "b", sent_ms=sent_ms)
        add(carrying, "c")  # its time is not known
        carrying.commit()
        assert not any(writer.carried.transactions.counts)
        add(carrying, "a", sent_ms=sent_ms)
        carrying.commit()
    carried = writer.carried
    assert (sum(carried.transactions.counts), sum(carried.batches.counts), sum(carried.latencies.counts)) == (1, 1, 2)
    assert 2 * 200.0 <= carried.latencies.sum_s < 2 * 2_000.0


def test_idle_task_stores_the_durations_of_its_last_transaction_once(writer: CountingWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "POSITION_S", 0.0)
    with carrier() as carrying:
        add(carrying, "a", sent_ms=1)
        carrying.rest()
        assert len(writer.stored) == 1
        carrying.rest()
        carrying.rest()
    assert len(writer.stored) == 2
    assert writer.stored[1] == writer.stored[0]
    assert writer.carried.pipelines == {"a": PipelineCount(1, 5, 0)}
    assert sum(writer.carried.latencies.counts) == 1


def test_durations_of_the_last_transaction_of_a_batch_are_stored_with_the_next_batch(writer: CountingWriter) -> None:
    for _batch in range(3):
        carry_batch(writer.stored[-1] if writer.stored else START, "a")
    assert sum(writer.carried.transactions.counts) == 2
