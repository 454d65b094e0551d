"""Endpoints of the adapter with a real Kafka: at least once, retries, dead letters, order, hanging endpoints, handing over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.scenarios.adapter_topics import create, produce

from bascule.adapter.inbound import Activation, ActivationSpec, Backoff, InboundLog
from bascule.embedded.kafka import EmbeddedKafka
from bascule.testing.system import wait_for

QUICK = Backoff(0.05, 2.0, 0.2)


@contextmanager
def active(kafka: EmbeddedKafka, spec: ActivationSpec, endpoint: Any) -> Iterator[Activation]:
    activation = Activation({"bootstrap.servers": kafka.bootstrap}, spec, endpoint)
    activation.start()
    try:
        yield activation
    finally:
        activation.stop(5.0)


def values(count: int) -> list[str]:
    return [f"v{number}" for number in range(count)]


def test_each_record_comes_to_the_endpoint_and_is_in_flight_no_more(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    create(kafka.bootstrap, topic_prefix)
    produce(kafka.bootstrap, topic_prefix, values(1000))
    seen: list[str] = []
    log = InboundLog("look", {"bootstrap.servers": kafka.bootstrap}, group=topic_prefix)
    with active(kafka, ActivationSpec(topics=(topic_prefix,), group=topic_prefix), lambda record: seen.append(record.value.decode())):
        wait_for(lambda: len(seen) >= 1000, "all records")
        produce(kafka.bootstrap, topic_prefix, ["last"])
        wait_for(lambda: "last" in seen, "one that came later")
    assert Counter(seen) == Counter([*values(1000), "last"])
    assert log.all_flights() == {}
    log.close()
