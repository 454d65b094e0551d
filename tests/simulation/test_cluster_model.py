"""The model of Kafka's cluster: replication, elections, former leaders, and coordinators that move."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from bascule.journal.offsets import UNKNOWN_OFFSET
from bascule.writer.position import Position
from tests.sim.kafka import Appender, Kafka, KafkaFault, NetworkConditions, Producer, ToWrite
from tests.sim.world import Process, Promise, World
from tests.sim.writer import committed_offset, position_partition


class Stage:
    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.kafka = Kafka(self.world)
        self.cluster = self.kafka.cluster
        self.process = Process(self.world, "test")
        self.output = self.kafka.partition("output")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        result: Promise[Any] = self.process.spawn(coroutine)
        self.world.run(self.world.now_ms + 5_000)
        assert result.done, "it still waits"
        return result.result()

    def cut_off_leader(self) -> None:
        self.cluster.leave(self.output.leader, cut_off=True)

    async def append(self, value: bytes) -> int:
        return await self.kafka.request(self.process, "Produce", lambda: self.output.store(ToWrite(None, value)), at=self.output)

    async def end(self) -> int:
        return await self.kafka.end_of(self.process, self.output)

    async def producer(self, name: str = "writer") -> Producer:
        producer = Producer(self.kafka, self.process, name)
        await producer.init()
        return producer


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_append_is_acknowledged_when_all_in_sync_replicas_have_the_record(stage: Stage) -> None:
    stage.kafka.weather = NetworkConditions(lag_ms=20.0)
    for value in (b"1", b"2", b"3"):
        offset = stage.run(stage.append(value))
        assert stage.output.end > offset
    assert stage.world.seen["wait for replicas"] >= 3


def test_new_leader_lacks_unreplicated_records_and_each_append_is_stored_once() -> None:
    truncated = 0
    for seed in range(20):
        stage = Stage(seed)
        stage.kafka.weather = NetworkConditions(lag_ms=30.0)
        offsets: list[int] = []
        appender = Appender(stage.kafka, stage.process, stage.output, lambda offset, _, told=offsets: told.append(offset))  # type: ignore[misc]
        for number in range(5):
            appender.append(ToWrite(None, b"%d" % number))
        stage.world.run(stage.world.now_ms + 4)
        stage.cluster.leave(stage.output.leader, cut_off=False)
        stage.world.run(stage.world.now_ms + 5_000)
        truncated += stage.world.seen["truncate log"]
        assert [record.value for record in stage.output.all_committed()] == [b"%d" % number for number in range(5)]
        assert [offset for offset in offsets if offset != UNKNOWN_OFFSET] == [
            number for number, offset in enumerate(offsets) if offset != UNKNOWN_OFFSET
        ]
    assert truncated


def test_repeated_append_after_an_election_may_be_stored_at_an_unknown_offset() -> None:
    unknown = 0
    for seed in range(20):
        stage = Stage(seed)
        told: list[tuple[int, str | None]] = []
        appender = Appender(stage.kafka, stage.process, stage.output, lambda *outcome, told=told: told.append(outcome))  # type: ignore[misc, arg-type]
        stage.kafka.weather = NetworkConditions(unanswered=1.0)
        appender.append(ToWrite(None, b"1"))
        stage.world.run(stage.world.now_ms + 10)
        stage.kafka.weather = NetworkConditions()
        stage.cluster.leave(stage.output.leader, cut_off=False)
        stage.world.run(stage.world.now_ms + 1_000)
        assert told in ([(0, None)], [(UNKNOWN_OFFSET, None)])
        assert len(stage.output.all_committed()) == 1
        unknown += told == [(UNKNOWN_OFFSET, None)]
    assert 0 < unknown < 20


def test_former_leader_answers_with_its_old_end_until_its_return_to_the_cluster() -> None:
    ends = set()
    for seed in range(20):
        stage = Stage(seed)
        stage.run(stage.append(b"1"))
        stage.cut_off_leader()
        other = Process(stage.world, "other")
        former = stage.output.former
        assert former is not None
        former.believers[other] = False
        stored = stage.kafka.request(other, "Produce", lambda stage=stage: stage.output.store(ToWrite(None, b"2")), at=stage.output)
        end: Promise[int] = Promise()
        stored.then(lambda stage=stage, end=end: stage.kafka.end_of(stage.process, stage.output).then(lambda: end.keep(0)))  # type: ignore[misc]
        stage.world.run(stage.world.now_ms + 60)
        if stored.done and stage.output.former is former:
            reader = stage.kafka.end_of(stage.process, stage.output)
            stage.world.run(stage.world.now_ms + 3)
            ends.add(reader.value)
        stage.world.run(stage.world.now_ms + 1_000)
        assert stage.output.former is None
        assert stage.run(stage.end()) == 2
    assert ends == {1, 2}


def test_judge_sees_a_committed_position_that_a_new_leader_does_not_announce_yet(stage: Stage) -> None:
    at = position_partition(stage.kafka, "diverts")
    position = Position("journal", "id", 0, 5)

    async def move() -> None:
        producer = await stage.producer()
        producer.begin()
        await producer.produce(at, [ToWrite(b"diverts", position.encode())])
        await producer.end(commit=True)

    stage.run(move())
    at.known_end = 0  # the state after an election, until the followers have fetched
    assert at.read(0, committed=True) == ([], 0)
    assert committed_offset(stage.kafka, "diverts") == 5


def test_former_leader_never_acknowledges_an_append(stage: Stage) -> None:
    stage.cut_off_leader()
    former = stage.output.former
    assert former is not None
    former.believers[stage.process] = True
    stage.run(stage.append(b"1"))
    assert stage.world.seen["write to former leader"]
    assert [record.value for record in stage.output.all_committed()] == [b"1"]
    assert former.end == 0


def test_append_is_refused_while_too_few_replicas_are_in_sync_and_reads_continue(stage: Stage) -> None:
    stage.run(stage.append(b"1"))
    stage.output.in_sync = {stage.output.leader}
    with pytest.raises(KafkaFault, match="timed-out"):
        stage.run(stage.append(b"2"))
    assert stage.run(stage.end()) == 1
    assert stage.world.seen["too few in sync"]


def test_each_init_gives_the_next_epoch_of_the_same_producer_id(stage: Stage) -> None:
    async def story() -> list[tuple[int, int]]:
        found = []
        for _ in range(4):
            producer = await stage.producer()
            found.append((producer.producer_id, producer.producer_epoch))
        return found

    found = stage.run(story())
    assert [epoch for _, epoch in found] == [0, 1, 2, 3]
    assert len({producer for producer, _ in found}) == 1


def test_moved_coordinator_keeps_decided_transactions_and_producer_epochs(stage: Stage) -> None:
    async def story() -> int:
        first = await stage.producer()
        first.begin()
        await first.produce(stage.output, [ToWrite(None, b"1")])
        await first.end(commit=True)
        coordinator = stage.kafka.coordinators.of("writer")
        stage.cluster.leave(coordinator.partition.leader, cut_off=False)
        second = await stage.producer()
        with pytest.raises(KafkaFault, match="fenced"):
            await first.end(commit=True)
        return second.producer_epoch - first.producer_epoch

    assert stage.run(story()) == 1
    assert stage.world.seen["move coordinator"]
    assert [record.value for record in stage.output.all_committed()] == [b"1"]


@pytest.mark.parametrize("commit", [True, False])
def test_answered_end_of_a_transaction_holds_whichever_nodes_fail(commit: bool) -> None:
    for seed in range(40):
        stage = Stage(seed)
        stage.kafka.weather = NetworkConditions(lag_ms=10.0, unanswered=0.1)

        async def story(stage: Stage = stage, node: int = seed % 3) -> str:
            producer = await stage.producer()
            producer.begin()
            try:
                await producer.produce(stage.output, [ToWrite(None, b"1")])
                stage.world.after(stage.world.random.random() * 10, stage.cluster.change_leaders)
                stage.world.after(stage.world.random.random() * 20, lambda: stage.cluster.leave(node, cut_off=True))
                await producer.end(commit=commit)
            except KafkaFault as fault:
                return fault.code
            return "ended"

        said = stage.run(story())
        stage.cluster.heal()
        stage.world.run(stage.world.now_ms + 2_000)
        assert not stage.kafka.unfinished
        if said == "ended":
            assert [record.value for record in stage.output.all_committed()] == ([b"1"] if commit else [])


def test_suspended_machine_loses_time_and_a_stopped_process_does_not(stage: Stage) -> None:
    other = Process(stage.world, "other")
    stage.process.stop()
    other.suspend()
    naps = [process.sleep(50) for process in (stage.process, other)]
    stage.world.run(stage.world.now_ms + 100)
    stage.process.go_on()
    other.go_on()
    assert (stage.process.monotonic_ms - other.monotonic_ms, naps[0].done, naps[1].done) == (100, True, False)
    stage.world.run(stage.world.now_ms + 51)
    assert naps[1].done


def test_wall_clock_jump_applies_to_all_processes_of_a_machine() -> None:
    world = World(1)
    red, again, blue = (Process(world, name) for name in ("red#1", "red#2", "blue#1"))
    world.offsets_ms["red"] = -500.0
    assert red.wall_ms == again.wall_ms == world.now_ms - 500
    assert blue.wall_ms == world.now_ms
