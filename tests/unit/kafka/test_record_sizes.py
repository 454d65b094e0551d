"""Estimates of the size of records that wait, on a mock cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from confluent_kafka import Producer

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
