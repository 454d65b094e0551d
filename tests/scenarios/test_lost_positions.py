"""Unread records of one divert are deleted: the other diverts and the ingresses continue, and the rest of its messages is accounted for."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from bascule.embedded.kafka import EmbeddedKafka
from bascule.pipelines.spec import DivertSpec, IngressSpec
from bascule.writer.position import COMMON
from tests.scenarios.sparkless import Bridge, without_spark


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    without_spark(monkeypatch)
    return Bridge(kafka, topic_prefix)


@pytest.fixture
def plain(bridge: Bridge) -> DivertSpec:
    """A divert that has read everything, and beside it ``x``, which is disabled and has lost its first message."""
    plain = bridge.divert("plain")
    bridge.journal.start_epoch(["x"])
    with bridge.running(plain, bridge.divert("x", exclusive=True)) as running:
        running.settle()
    bridge.send("lost", "left", taken_by=["x"])
    with bridge.running(plain, bridge.divert("x", exclusive=True, enabled=False)) as running:
        bridge.send("1")
        running.settle()
    bridge.trim(2)
    return plain


@pytest.fixture
def ingress(bridge: Bridge) -> IngressSpec:
    topic = f"{bridge.pipelines.topics.prefix}-in"
    bridge.topics.create(topic, 1, {})
    return IngressSpec("in", "queue", (topic,))


@pytest.mark.on_mock_cluster
def test_disabled_divert_with_lost_position_blocks_no_other_divert(bridge: Bridge, plain: DivertSpec) -> None:
    with bridge.running(plain, bridge.divert("x", exclusive=True, enabled=False)) as running:
        bridge.send("2")
        running.settle()
    assert bridge.carried("plain") == ["lost", "left", "1", "2"]
    assert bridge.stored()[bridge.positions.own_key("x")].offset == 1


@pytest.mark.on_mock_cluster
def test_removed_exclusive_divert_with_lost_position_dead_letters_its_remaining_messages(bridge: Bridge, plain: DivertSpec) -> None:
    with bridge.running(plain) as running:
        bridge.send("2")
        running.settle()
        assert list(running.driver.queries) == [COMMON]
    assert bridge.carried("plain") == ["lost", "left", "1", "2"]
    assert bridge.dead() == ["x: left"]
    assert bridge.positions.own_key("x") not in bridge.stored()


@pytest.mark.on_mock_cluster
def test_enabled_divert_with_lost_position_stops_and_the_others_continue(bridge: Bridge, plain: DivertSpec) -> None:
    with bridge.running(plain, bridge.divert("x", exclusive=True)) as running:
        bridge.send("2")
        running.batch(COMMON)
        running.driver.poll()
        said = running.driver.queries["divert:x"].stopped
        assert said is not None
        assert said.startswith("PositionLost: pipeline 'divert:x' is at offset 1 of ")
    assert bridge.carried("plain") == ["lost", "left", "1", "2"]
    assert bridge.carried("x") == bridge.dead() == []
    assert bridge.stored()[bridge.positions.own_key("x")].offset == 1


@pytest.mark.on_mock_cluster
def test_ingress_continues_when_the_common_position_of_the_diverts_is_lost(bridge: Bridge, plain: DivertSpec, ingress: IngressSpec) -> None:
    bridge.send("2")
    bridge.trim(bridge.end())
    with bridge.running(plain, ingresses=(ingress,)) as running:
        said = running.driver.queries[COMMON].stopped
        assert said is not None
        assert said.startswith("PositionLost: pipeline 'diverts' is at offset ")
        assert running.query("ingress:in").active


@pytest.mark.slow
def test_vacant_common_position_in_an_earlier_journal_is_no_loss(bridge: Bridge, ingress: IngressSpec) -> None:
    bridge.journal.start_epoch()
    bridge.send(*map(str, range(10)))
    with bridge.running(bridge.divert("last")) as running:
        running.settle()
    with bridge.running() as running:
        running.settle()
    assert bridge.stored()[bridge.positions.common_key].vacant
    bridge.renew()
    began = bridge.journal.start_epoch(["x"])
    bridge.send("1", taken_by=["x"])
    assert bridge.pins() == {"divert:x": began}
    with bridge.running(ingresses=(ingress,)) as running:
        assert list(running.driver.queries) == ["ingress:in"]
    with bridge.running(bridge.divert("x", exclusive=True)) as running:
        running.settle()
    assert bridge.carried("x") == ["1"]


@pytest.mark.parametrize("renewed", [False, True], ids=["trimmed", "created again"])
def test_running_diverts_stop_for_good_when_their_journal_is_trimmed_or_recreated(bridge: Bridge, renewed: bool) -> None:
    bridge.journal.start_epoch()
    bridge.send("1")
    with bridge.running(bridge.divert("plain")) as running:
        running.settle()
        bridge.send("2")
        if renewed:
            bridge.renew()
        else:
            bridge.trim(bridge.end())
        query = running.driver.queries[COMMON]
        lost = "[STREAM_FAILED] Query terminated with exception: [KAFKA_DATA_LOSS.START_OFFSET_RESET] Some data may be lost"
        running.query(COMMON).fail(PySparkException(lost))
        query.check()
        query.restart()  # at once, without the pause
        assert query.stopped is not None
        assert query.stopped.startswith("PositionLost: ")
        assert ("was recreated" if renewed else "were deleted before the pipeline read them") in query.stopped
