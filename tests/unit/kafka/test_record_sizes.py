"""Estimates of the size of records that wait, on a mock cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from bascule.kafka import record_sizes
from bascule.kafka.record_sizes import RecordSizes
from tests.support.mock_cluster import MockCluster, product_on
from tests.support.system import wait_for

FIRST, SECOND = ("s", 0), ("s", 1)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockCluster]:
    with product_on(monkeypatch) as found:
        found.create("s", 6)
        yield found


def write(cluster: MockCluster, partition: int, *values: bytes) -> None:
    producer = Producer(cluster.kafka)
    for value in values:
        producer.produce("s", value, b"key", partition, headers=[("name", b"12345"), ("empty", None)])
    assert producer.flush(30) == 0


def sampled(sizes: RecordSizes, waiting: Mapping[tuple[str, int], tuple[int, int]]) -> dict[tuple[str, int], float]:
    """Return the means when there is one for each partition in which records wait."""
    due = {place for place, (start, end) in waiting.items() if end > start}
    wait_for(lambda: due <= sizes.look(waiting).keys(), "samples of all partitions")
    return dict(sizes.look(waiting))


def test_mean_is_that_of_the_keys_values_and_headers_of_the_records_that_wait(cluster: MockCluster) -> None:
    write(cluster, 0, b"x" * 900, b"x" * 100, b"x" * 200)
    # Each record has a key of 3 bytes, and headers of 4 + 5 and 5 bytes.
    assert sampled(RecordSizes(cluster.kafka), {FIRST: (1, 3), SECOND: (0, 0)}) == {FIRST: 150 + 17}


def test_sample_ends_at_its_limits_and_stands_for_the_rest(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_sizes, "SAMPLE_OFFSETS", 2)
    write(cluster, 0, b"x" * 83, b"x" * 83, b"x" * 5000)
    assert sampled(RecordSizes(cluster.kafka), {FIRST: (0, 3)}) == {FIRST: 100}
    monkeypatch.setattr(record_sizes, "SAMPLE_BYTES", 50)
    write(cluster, 1, b"x" * 83, b"x" * 183)
    assert sampled(RecordSizes(cluster.kafka), {SECOND: (0, 2)}) == {SECOND: 100}


def test_more_partitions_than_one_look_samples_are_sampled_by_later_looks(cluster: MockCluster) -> None:
    for partition in range(6):
        write(cluster, partition, b"x" * (83 + partition))
    waiting = {("s", partition): (0, 1) for partition in range(6)}
    assert sampled(RecordSizes(cluster.kafka), waiting) == {("s", partition): 100 + partition for partition in range(6)}


def test_sample_is_renewed_and_a_partition_that_is_gone_is_forgotten(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_sizes, "SAMPLE_AGAIN_S", 0.0)
    write(cluster, 0, b"x" * 83, b"x" * 183)
    sizes = RecordSizes(cluster.kafka)
    assert sampled(sizes, {FIRST: (0, 2)}) == {FIRST: 150}
    wait_for(lambda: sizes.look({FIRST: (1, 2)}) == {FIRST: 200}, "a new sample")
    assert sizes.look({}) == {}


def test_partition_that_cannot_be_read_has_no_mean_and_the_others_do(cluster: MockCluster) -> None:
    write(cluster, 0, b"x" * 83)
    sizes = RecordSizes(cluster.kafka)
    wait_for(lambda: FIRST in sizes.look({("s", 5): (7, 9), FIRST: (0, 1)}), "the sample of the other partition")
    assert sizes.look({("s", 5): (7, 9), FIRST: (0, 1)}) == {FIRST: 100}


def test_sample_begins_with_the_first_record_that_is_not_deleted(cluster: MockCluster) -> None:
    write(cluster, 0, b"x" * 83, b"x" * 183, b"x" * 283)
    cluster.delete_records("s", 2)
    assert sampled(RecordSizes(cluster.kafka), {FIRST: (0, 3)}) == {FIRST: 300}


class Record:
    """A record of 100 bytes at an offset. The client cannot decode the name of its header."""

    def __init__(self, at: int) -> None:
        self._at = at

    def offset(self) -> int:
        return self._at

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return b"x" * 100

    def headers(self) -> list[tuple[str, bytes]]:
        raise SystemError("the client could not decode the name of a header")


def read_from(monkeypatch: pytest.MonkeyPatch, *offsets: int, error: Exception | None = None) -> None:
    """Let samples read records at these offsets, or fail with an error."""

    class History:
        def __init__(self, *_: Any, **__: Any) -> None:
            if error is not None:
                raise error

        def earliest(self) -> int:
            return 0

        def records(self, start: int, end: int) -> Iterator[Record]:
            return (Record(at) for at in offsets if start <= at < end)

    monkeypatch.setattr(record_sizes, "TopicHistory", History)


def test_headers_that_the_client_cannot_read_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    read_from(monkeypatch, 0, 1)
    assert sampled(RecordSizes({}), {FIRST: (0, 2)}) == {FIRST: 100}


def test_sample_of_a_compacted_partition_covers_the_gap_before_its_first_record(monkeypatch: pytest.MonkeyPatch) -> None:
    read_from(monkeypatch, 399, 400)
    assert sampled(RecordSizes({}), {FIRST: (0, 1_000_000)}) == {FIRST: 100 / 400}


def test_sample_ends_with_the_range_although_its_last_offsets_have_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    read_from(monkeypatch, 0)
    assert sampled(RecordSizes({}), {FIRST: (0, 4), SECOND: (1, 4)}) == {FIRST: 25, SECOND: 0}


@pytest.mark.parametrize("error", [KafkaException(KafkaError(KafkaError._TRANSPORT)), SystemError("a fault of the client")], ids=repr)
def test_failed_sample_ends_no_driver_and_is_repeated(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(record_sizes, "SAMPLE_AGAIN_S", 0.0)
    sizes = RecordSizes({})
    read_from(monkeypatch, error=error)
    assert sizes.look({FIRST: (0, 1)}) == {}
    assert sizes._sampling is not None
    assert sizes._sampling.exception(30) in (None, error)
    assert sizes.look({FIRST: (0, 1)}) == {}
    read_from(monkeypatch, 0)
    assert sampled(sizes, {FIRST: (0, 1)}) == {FIRST: 100}
