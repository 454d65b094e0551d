"""Claims of positions by a driver, and the positions of idle sources, on the mock cluster. The scenarios run the same tests on Kafka."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from bascule.core.errors import Unavailable
from bascule.core.topics import JournalTopics
from bascule.kafka.guards import Finding
from bascule.kafka.history import LagMirror
from bascule.pipelines import positions as module
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import EARLIEST, LATEST, PipelinesSpec, StartPosition
from bascule.writer.carried import CarriedCounts, PipelineCount
from bascule.writer.claims import Claim
from bascule.writer.errors import PositionMoved
from bascule.writer.position import INGRESS, Position, PositionLost, PositionTaken, position_key
from tests.scenarios import test_idle_sources as idle
from tests.scenarios.sparkless import Bridge
from tests.scenarios.test_idle_sources import (  # noqa: F401 - the same on the mock cluster
    source,
    test_advance_of_an_idle_source_skips_no_record,
    test_position_taken_by_another_driver_is_not_advanced,
    test_source_read_to_its_end_is_not_queried,
)
from tests.scenarios.test_positions import (  # noqa: F401
    journal,
    test_diverts_do_not_start_when_unread_records_are_deleted,
    test_diverts_with_deleted_position_do_not_start,
    test_error_for_invalid_position_record_names_its_offset_and_key,
)
from tests.support.mock_cluster import MockCluster

PIPELINE = f"{INGRESS}in"
RECORDS = 3


def test_ingress_continues_at_topic_end_after_all_taken_records_are_deleted(request: pytest.FixtureRequest) -> None:
    idle.test_ingress_continues_after_all_records_it_read_are_deleted_from_kafka(request.getfixturevalue("source"), rolled_back=False)


class Topic:
    """A topic with records in each of three partitions, and drivers of an ingress that reads it."""

    def __init__(self, kafka: MockCluster, prefix: str) -> None:
        self.kafka = kafka
        self.pipelines = PipelinesSpec(prefix, kafka.kafka, topics=JournalTopics(prefix))
        self.name = f"{prefix}-in"
        kafka.create(self.name, 3)
        self.driver("").prepare_topics()
        self.put(0, 1, 2)

    def driver(self, owner: str) -> Positions:
        return Positions(self.pipelines, owner)

    def put(self, *partitions: int) -> None:
        producer = Producer(self.kafka.kafka)
        for partition in partitions:
            for _ in range(RECORDS):
                producer.produce(self.name, b"", partition=partition)
        assert producer.flush(30) == 0

    def take(self, positions: Positions | str, partitions: int = 2, start: str = LATEST) -> list[Position]:
        driver = self.driver(positions) if isinstance(positions, str) else positions
        topic_id = driver.topics.id(self.name)
        sources = {(self.name, partition): topic_id for partition in range(partitions)}
        return driver.take_sources(PIPELINE, sources, StartPosition(start))

    def stored(self) -> dict[str, Position]:
        return self.driver("").stored()

    def forget(self, key: str) -> None:
        with_key = Positions(self.pipelines, "")
        writer = with_key.writer(key)
        writer.write([], writer.current(), None)
        writer.close()


@pytest.fixture
def topic(kafka: MockCluster, topic_prefix: str) -> Topic:
    return Topic(kafka, topic_prefix)


def offsets(positions: list[Position]) -> list[int]:
    return [position.offset for position in positions]


def test_each_source_partition_has_its_own_position_with_common_owner(topic: Topic) -> None:
    taken = topic.take("first")
    assert [(at.topic, at.partition, at.offset) for at in taken] == [(topic.name, 0, RECORDS), (topic.name, 1, RECORDS)]
    assert {at.topic_id for at in taken} == {topic.driver("").topics.id(topic.name)}
    owners = {at.owner for at in taken}
    assert len(owners) == 1
    assert owners.pop().startswith("first.")
    stored = topic.stored()
    assert set(stored) == {PIPELINE, *(position_key(PIPELINE, topic.name, partition) for partition in (0, 1))}
    assert stored[PIPELINE].owner == taken[0].owner
    assert [stored[position_key(PIPELINE, topic.name, partition)] for partition in (0, 1)] == taken


def test_new_partition_of_known_ingress_is_read_from_its_first_record(topic: Topic) -> None:
    assert offsets(topic.take("first")) == [RECORDS, RECORDS]
    topic.put(0)
    assert offsets(topic.take("second", 3)) == [RECORDS, RECORDS, 0]


def test_ingress_that_started_without_topics_is_known(topic: Topic) -> None:
    assert topic.take("first", 0) == []
    assert offsets(topic.take("second")) == [0, 0]


def test_ingress_is_known_by_its_source_positions_without_own_position(topic: Topic) -> None:
    topic.take("before")
    topic.take("first")
    topic.forget(PIPELINE)
    assert offsets(topic.take("second", 3)) == [RECORDS, RECORDS, 0]


def test_replaced_driver_does_not_take_source_back(topic: Topic) -> None:
    first = topic.driver("first")
    topic.take(first)
    topic.take("second")
    before = topic.stored()
    with pytest.raises(PositionTaken, match=f"'{PIPELINE}' is held by another driver of the bridge, 'second"):
        topic.take(first, 3)
    assert topic.stored() == before


def test_topic_removed_from_ingress_keeps_its_position_without_owner(topic: Topic) -> None:
    topic.take("first")
    topic.driver("second").take_sources(PIPELINE, {}, StartPosition(LATEST), lambda name: name != topic.name)
    left = {key: at for key, at in topic.stored().items() if at.topic == topic.name}
    assert len(left) == 2
    assert all(at.vacant and at.offset == RECORDS for at in left.values())
    topic.put(0, 1)
    assert offsets(topic.take("third")) == [RECORDS, RECORDS]


def test_topic_recreated_while_not_configured_starts_from_beginning(topic: Topic) -> None:
    topic.take("first")
    topic.kafka.ids[topic.name] = "recreated"
    with pytest.raises(PositionLost, match=r"recreated .* start the pipelines once without the ingress"):
        topic.take("second")
    third = topic.driver("third")
    third.take_sources(PIPELINE, {}, StartPosition(LATEST), lambda name: name != topic.name)
    assert offsets(topic.take("fourth")) == [0, 0]
    assert {at.topic_id for at in topic.take("fifth")} == {"recreated"}


def test_counts_of_a_source_that_starts_from_the_beginning_are_kept(topic: Topic) -> None:
    topic.take("first")
    key = position_key(PIPELINE, topic.name, 0)
    carried = CarriedCounts({"in": PipelineCount(RECORDS, 30, 0)})
    with closing(topic.driver("").writer(key)) as writer:
        found = writer.current()
        assert found is not None
        writer.write([], found, replace(found, carried=carried))
    topic.driver("second").take_sources(PIPELINE, {}, StartPosition(LATEST), lambda name: name != topic.name)
    topic.kafka.ids[topic.name] = "recreated"
    taken = topic.take("third")
    assert (offsets(taken), taken[0].carried) == ([0, 0], carried)
    assert topic.stored()[key].carried == carried


def test_trimmed_source_raises_position_lost_without_consumer_group_hint(topic: Topic) -> None:
    topic.take("first", start=EARLIEST)
    topic.kafka.delete_records(topic.name, 1, 1)
    with pytest.raises(
        PositionLost, match=rf"'{PIPELINE}' is at offset 0 of {topic.name}-1, and the first record is at offset 1"
    ) as raised:
        topic.take("second")
    assert "consumer group" not in str(raised.value)


@pytest.mark.parametrize("offset", [0, 7])
def test_missing_positions_are_lost_when_consumer_group_has_offset(topic: Topic, offset: int) -> None:
    shown = LagMirror(topic.kafka.kafka, topic.driver("").group(PIPELINE))
    shown.show({(topic.name, 0): offset})
    shown.close()
    with pytest.raises(PositionLost, match=rf"for {topic.name}-0 is lost: consumer group .* has reached offset {offset}"):
        topic.take("first")


def test_removed_ingresses_are_known_until_their_positions_are_vacant(topic: Topic) -> None:
    topic.take("first")
    driver = topic.driver("second")
    assert driver.removed_ingresses({"in"}) == set()
    assert driver.removed_ingresses({"other"}) == {PIPELINE}
    driver.take_sources(PIPELINE, {}, StartPosition(EARLIEST), lambda _: False)
    assert driver.removed_ingresses({"other"}) == set()


def claim(topic: Topic, position: Position) -> Claim:
    return topic.driver("").claim(position_key(PIPELINE, topic.name, position.partition), position)


def test_claim_contains_all_fields_that_task_checks(topic: Topic) -> None:
    position = replace(topic.take("first")[1], members=("a",))
    assert claim(topic, position) == Claim(position_key(PIPELINE, topic.name, 1), topic.name, position.topic_id, 1, position.owner, ("a",))


def test_missing_or_unresponsive_source_does_not_delay_other_sources(
    topic: Topic, kafka: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Positions._next_record

    def next_record(positions: Positions, position: Position) -> int:
        if position.partition == 1:
            raise Unavailable("its leader is away")
        return ask(positions, position)

    taken = topic.take("first", start=EARLIEST)
    positions = topic.driver("first")
    monkeypatch.setattr(Positions, "_next_record", next_record)
    claims = [claim(topic, position) for position in taken]
    assert positions.pass_over(dict.fromkeys(claims)) == [claims[0]]
    kafka.ids[topic.name] = "recreated"
    assert positions.pass_over(dict.fromkeys(claims)) == []
    kafka.ids[topic.name] = ""
    assert positions.pass_over(dict.fromkeys(claims)) == []


def test_idle_positions_beyond_time_limit_wait_for_next_pass(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = topic.take("first")
    monkeypatch.setattr(module, "PASSED_WITHIN_S", -1.0)
    monkeypatch.setattr(Positions, "_next_record", lambda *_: pytest.fail("it is asked"))
    assert topic.driver("first").pass_over({claim(topic, taken[0]): None}) == []


def test_position_moved_during_idle_check_is_not_moved_back(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = topic.take("first", start=EARLIEST)[0]
    positions = topic.driver("first")

    def moves(_: Positions, position: Position) -> int:
        positions.move(claim(topic, taken).key, taken, replace(taken, offset=2), {})
        return 1

    monkeypatch.setattr(Positions, "_next_record", moves)
    assert positions.pass_over({claim(topic, taken): None}) == [claim(topic, taken)]
    assert topic.stored()[claim(topic, taken).key].offset == 2


def test_position_moves_only_from_expected_value(topic: Topic) -> None:
    first, second = topic.take("first", start=EARLIEST)
    key, other = claim(topic, first).key, claim(topic, second).key
    positions = topic.driver("first")
    with pytest.raises(PositionMoved):
        positions.move(key, replace(first, offset=1), replace(first, offset=2), {other: None})
    assert topic.stored()[other] == second
    assert positions.move(key, first, replace(first, offset=2), {other: None}) == replace(first, offset=2)
    assert topic.stored()[key].offset == 2
    assert other not in topic.stored()


def test_weak_topic_settings_are_logged(topic: Topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    weak = Finding("bascule.positions", "min.insync.replicas", "1", "2", "one node is enough", breaks=False)
    monkeypatch.setattr(module, "guard_transactions", lambda _: [weak])
    topic.driver("first").look_at_transactions()
    assert "min.insync.replicas=1" in caplog.text


def test_transactions_of_all_pipelines_are_ended_except_those_of_user_jobs(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(module, "end_open_transactions", lambda _, ids: ended.extend(ids))
    topic.take("first")
    for key in ("diverts/j/0", "divert:a/j/0", "begun:a/j/0", "sink:w/batches/0"):
        writer = topic.driver("").writer(key)
        writer.write([], None, Position("t", "id", 0, 0))
        writer.close()
    topic.driver("second").end_transactions()
    prefix = f"{topic.pipelines.topics.prefix}.{topic.pipelines.bridge_id}"
    sources = (position_key(PIPELINE, topic.name, partition) for partition in (0, 1))
    assert sorted(ended) == sorted(f"{prefix}.{key}" for key in ("diverts/j/0", "divert:a/j/0", PIPELINE, *sources))


def test_missing_position_stops_run(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    bridge.positions.prepare_topics()
    with pytest.raises(PositionLost, match=r"position 'diverts/.*' is missing; restore topic '.*\.positions'"):
        bridge.positions.read(bridge.positions.common_key)


def test_no_position_is_taken_without_diverts(bridge: Bridge) -> None:
    bridge.positions.prepare_topics()
    assert bridge.positions.know_diverts() is False
    assert bridge.positions.take_diverts((), bridge.topics.id(bridge.pipelines.topics.journal)) is None
    assert bridge.stored() == {}


def test_common_position_of_removed_diverts_is_vacant_and_covers_all(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    bridge.send("1")
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
    bridge.send("2")
    with bridge.running() as running:
        assert running.driver.queries == {}
    assert bridge.positions.know_diverts() is True
    common = bridge.stored()[bridge.positions.common_key]
    assert common.vacant
    assert (common.offset, common.epoch, common.exclusive) == (bridge.end(), bridge.end(), ())


def test_messages_taken_by_removed_exclusive_diverts_are_dead_lettered(bridge: Bridge) -> None:
    bridge.journal.start_epoch(exclusive=("x",))
    bridge.send("1", taken_by=["x"])
    with bridge.running(bridge.divert("plain"), bridge.divert("x", exclusive=True)) as running:
        running.settle()
    bridge.send("2", taken_by=["x"])
    with bridge.running() as running:
        running.settle()
    assert bridge.dead() == ["x: 2"]


def test_removed_exclusive_divert_stays_known_while_restarted_brokers_apply_it(bridge: Bridge) -> None:
    bridge.journal.start_epoch(exclusive=("x",))
    with bridge.running(bridge.divert("plain"), bridge.divert("x", exclusive=True)) as running:
        running.settle()
    bridge.send("1", taken_by=["x"])
    with bridge.running(bridge.divert("plain")) as running:
        running.settle()
        bridge.journal.start_epoch(exclusive=("x",))
        bridge.send("2", taken_by=["x"])
        running.settle()
    assert bridge.dead() == ["x: 1", "x: 2"]


def test_unknown_exclusive_divert_starts_at_first_message_it_took(bridge: Bridge) -> None:
    bridge.journal.start_epoch(exclusive=("x",))
    bridge.send("1", "2", taken_by=["x"])
    with bridge.running(bridge.divert("x", exclusive=True)) as running:
        running.settle()
    assert bridge.carried("x") == ["1", "2"]
