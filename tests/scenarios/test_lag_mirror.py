"""The lag of a pipeline, shown to monitoring tools as the offsets of a consumer group, while links break."""

from __future__ import annotations

import time

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.admin import Topics
from bascule.kafka.history import LagMirror, committed_note
from tests.support.kafka_proxy import Action, Api, KafkaProxy
from tests.support.system import wait_for

NOTE = "stopped"
ROUNDS = 30
STEP_MS = 3


@pytest.fixture(autouse=True)
def _until_kafka_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than the pipelines do: they do not wait for offsets that only monitoring needs."""
    monkeypatch.setattr("bascule.kafka.history.CLOSE_TIMEOUT_S", 60.0)


def test_last_shown_offset_remains_when_the_link_breaks_during_an_earlier_commit(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    Topics({"bootstrap.servers": kafka.bootstrap}).create(topic_prefix, 1, {})
    with KafkaProxy(kafka.port) as proxy:
        mirror = LagMirror({"bootstrap.servers": proxy.bootstrap, "log_level": 0}, topic_prefix)
        held = proxy.inject(Api.OFFSET_COMMIT, Action.HOLD)
        mirror.show({(topic_prefix, 0): 5})
        wait_for(lambda: held.hit, "the first offset to be on its way")
        mirror.show({(topic_prefix, 0): 7}, NOTE)
        proxy.cut()
        mirror.close()
    assert committed_note({"bootstrap.servers": kafka.bootstrap}, topic_prefix, topic_prefix, 0) == (7, NOTE)


def test_last_shown_offset_remains_whenever_the_coordinator_is_found(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    """# The client sends the offsets that it has kept after those of that moment."""
    direct = {"bootstrap.servers": kafka.bootstrap}
    Topics(direct).create(topic_prefix, 1, {})
    wrong = []
    for shown_s in (each / 1000 for each in range(0, ROUNDS * STEP_MS, STEP_MS)):
        group = f"{topic_prefix}.{shown_s}"
        mirror = LagMirror(direct, group)
        until = time.monotonic() + shown_s
        mirror.show({(topic_prefix, 0): 5})
        while time.monotonic() < until:
            mirror.show({(topic_prefix, 0): 5})
        mirror.show({(topic_prefix, 0): 7}, NOTE)
        mirror.close()
        if (found := committed_note(direct, group, topic_prefix, 0)) != (7, NOTE):
            wrong.append((shown_s, found))
    assert wrong == []
