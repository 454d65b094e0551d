"""Offsets of many partitions, on the mock cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError

from bascule.core.errors import Unavailable
from bascule.kafka.bounds import Bounds, bounds_of, offsets_at
from tests.support.mock_cluster import MockCluster, product_on

#: Kafka's number of the request for offsets.
LIST_OFFSETS = 2
PLACES = {("s", 0): None, ("s", 1): None}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockCluster]:
    with product_on(monkeypatch) as found:
        found.create("s", 2)
        yield found


def test_offsets_are_asked_again_after_a_passing_error(cluster: MockCluster) -> None:
    for error in (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.KAFKA_STORAGE_ERROR, KafkaError.REQUEST_TIMED_OUT):
        cluster.fail(LIST_OFFSETS, error, error)
        assert offsets_at(cluster.kafka, PLACES, 5, 30.0) == PLACES, "all records are older"
        cluster.fail(LIST_OFFSETS, error)
        assert bounds_of(cluster.kafka, PLACES, 30.0) == dict.fromkeys(PLACES, Bounds(0, 0))


def test_partition_without_an_answer_is_an_error(cluster: MockCluster) -> None:
    cluster.fail(LIST_OFFSETS, *[KafkaError.KAFKA_STORAGE_ERROR] * 20)
    with pytest.raises(Unavailable, match="the offsets of partitions cannot be read: Broker: Disk error"):
        offsets_at(cluster.kafka, PLACES, 5, 0.2)
    with pytest.raises(Unavailable, match="the offsets of partitions cannot be read: Broker: Disk error"):
        bounds_of(cluster.kafka, PLACES, 0.1)


def test_partition_that_does_not_exist_has_no_bounds_and_its_offset_at_a_time_is_an_error(cluster: MockCluster) -> None:
    assert bounds_of(cluster.kafka, [*PLACES, ("s", 7)], 30.0) == dict.fromkeys(PLACES, Bounds(0, 0))
    with pytest.raises(Unavailable, match="Kafka reports no offset of s-7 at this time"):
        offsets_at(cluster.kafka, [*PLACES, ("s", 7)], 5, 30.0)
