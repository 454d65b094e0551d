"""The inbound log in a real Kafka that compacts it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from bascule.adapter.inbound import InboundLog
from bascule.adapter.inbound.log_topic import partition_of
from bascule.adapter.inbound.state import FLIGHT, Place, Ref, key_of
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.compacted import DELETIONS_KEPT_S
from bascule.kafka.history import TopicHistory
from tests.support.system import wait_for

PLACE = Place("payments", 0)


@contextmanager
def compacted_soon(kafka: EmbeddedKafka, topic: str) -> Iterator[None]:
    """Make Kafka compact deletions too, and check for work every second instead of every 15 seconds."""
    settings = {"segment.ms": "1000", "min.cleanable.dirty.ratio": "0.001", "delete.retention.ms": "0"}
    alter(kafka, ResourceType.TOPIC, topic, settings, AlterConfigOpType.SET)
    pause = {"log.cleaner.backoff.ms": "1000"}
    alter(kafka, ResourceType.BROKER, "1", pause, AlterConfigOpType.SET)
    yield
    alter(kafka, ResourceType.BROKER, "1", pause, AlterConfigOpType.DELETE)


def alter(kafka: EmbeddedKafka, kind: ResourceType, name: str, settings: Mapping[str, str], how: AlterConfigOpType) -> None:
    entries = [ConfigEntry(setting, value, incremental_operation=how) for setting, value in settings.items()]
    admin = clients.admin({"bootstrap.servers": kafka.bootstrap})  # keep the reference: without it the futures never complete
    for future in admin.incremental_alter_configs([ConfigResource(kind, name, incremental_configs=entries)]).values():
        future.result()


def test_member_paused_past_log_compaction_does_not_see_finished_record_as_in_flight(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry that marks the record as done may already be deleted."""
    one, two = (InboundLog("inbound", {"bootstrap.servers": kafka.bootstrap}, group=topic_prefix) for _ in range(2))
    ref = Ref(PLACE, one.take(PLACE, None), 17)
    flight = key_of(FLIGHT, ref)
    one.schedule([ref])
    assert set(one.flights(PLACE).keys) == {17}
    one._at._open().reader.rest()  # so that its client fetches nothing, as in a suspended process
    two.take(PLACE, two.owner(PLACE))
    two.done(PLACE, [flight], wait=True)
    assert two.flights(PLACE).keys == {}  # read now: a reader that rests would miss an entry that is deleted so soon

    history = TopicHistory({"bootstrap.servers": kafka.bootstrap}, one.topic, partition_of(PLACE))

    def compacted() -> bool:
        two.schedule([Ref(PLACE, ref.token, 0)])  # creates a newer segment
        return all(record.key() != flight for record in history.records(history.earliest(), history.stable()))

    with compacted_soon(kafka, one.topic):
        wait_for(compacted, "the compaction", 180)
    assert two.flights(PLACE).keys == {}
    monkeypatch.setattr(
        "bascule.kafka.compacted.time", SimpleNamespace(time=lambda: time.time() + DELETIONS_KEPT_S, monotonic=time.monotonic)
    )
    assert one.flights(PLACE).keys == {}
    one.close()
    two.close()
