"""The model of Kafka behaves as Kafka was measured to behave: the verdicts of the simulation depend on it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from tests.sim.kafka import Appender, Kafka, KafkaFault, NetworkConditions, Producer, ToWrite
from tests.sim.world import Process, Promise, World


class Stage:
    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.kafka = Kafka(self.world)
        self.process = Process(self.world, "test")
        self.output = self.kafka.partition("output")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        result: Promise[Any] = self.process.spawn(coroutine)
        self.world.run(self.world.now_ms + 5_000)
        assert result.done, "it still waits"
        return result.result()

    def committed(self) -> list[bytes | None]:
        return [record.value for record in self.output.read(0, committed=True)[0]]

    async def producer(self) -> Producer:
        producer = Producer(self.kafka, self.process, "writer")
        await producer.init()
        return producer


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def write(stage: Stage, producer: Producer, value: bytes) -> None:
    await producer.produce(stage.output, [ToWrite(None, value)])


async def commit_with_a_late_repetition(stage: Stage, producer: Producer) -> None:
    """The first EndTxn is delayed; its repetition commits."""
    stage.kafka.weather = NetworkConditions(held=1.0)
    ended = stage.process.spawn(producer.end(commit=True))
    await stage.process.sleep(0)
    stage.kafka.weather = NetworkConditions()
    await ended


def test_a_late_end_commits_half_of_the_next_transaction_of_the_same_incarnation(stage: Stage) -> None:
    async def story() -> None:
        producer = await stage.producer()
        producer.begin()
        await write(stage, producer, b"A1")
        await commit_with_a_late_repetition(stage, producer)
        producer.begin()
        await write(stage, producer, b"B1")
        await stage.process.sleep(500)
        with pytest.raises(KafkaFault, match="invalid-state"):
            await producer.end(commit=False)

    stage.run(story())
    assert stage.committed() == [b"A1", b"B1"]


def test_late_end_is_refused_after_the_start_of_a_new_incarnation(stage: Stage) -> None:
    async def story() -> None:
        first = await stage.producer()
        first.begin()
        await write(stage, first, b"A1")
        await commit_with_a_late_repetition(stage, first)
        second = await stage.producer()
        second.begin()
        await write(stage, second, b"B1")
        await stage.process.sleep(500)
        await second.end(commit=False)

    stage.run(story())
    assert stage.committed() == [b"A1"]


def test_new_incarnation_fences_the_old_incarnation_and_aborts_its_open_transaction(stage: Stage) -> None:
    async def story() -> None:
        first = await stage.producer()
        first.begin()
        await write(stage, first, b"A1")
        await stage.producer()
        for late in (write(stage, first, b"A2"), first.end(commit=True)):
            with pytest.raises(KafkaFault, match=r"fenced|incomplete"):
                await late

    stage.run(story())
    assert stage.committed() == []
    assert stage.output.stable == stage.output.end


def test_readers_of_committed_records_stop_at_the_first_open_transaction(stage: Stage) -> None:
    async def story() -> None:
        producer = await stage.producer()
        producer.begin()
        await write(stage, producer, b"open")
        stage.output.store(ToWrite(None, b"plain"))
        assert (stage.committed(), stage.output.stable, stage.output.end) == ([], 0, 2)
        await producer.end(commit=True)
        await stage.process.sleep(50)

    stage.run(story())
    assert stage.committed() == [b"open", b"plain"]


def test_transaction_with_a_lost_record_is_not_committed(stage: Stage) -> None:
    async def story() -> None:
        producer = await stage.producer()
        producer.begin()
        await write(stage, producer, b"1")
        stage.kafka.weather = NetworkConditions(lost=1.0)
        with pytest.raises(KafkaFault, match="timed-out"):
            await write(stage, producer, b"2")
        stage.kafka.weather = NetworkConditions()
        with pytest.raises(KafkaFault, match="incomplete"):
            await producer.end(commit=True)

    stage.run(story())
    assert stage.committed() == []


@pytest.mark.parametrize(
    "weather", [NetworkConditions(lost=0.4), NetworkConditions(unanswered=0.4), NetworkConditions(held=0.4), NetworkConditions(slow=0.5)]
)
def test_appends_are_stored_once_and_in_order_under_network_faults(stage: Stage, weather: NetworkConditions) -> None:
    stage.kafka.weather = weather
    offsets: list[int] = []
    appender = Appender(stage.kafka, stage.process, stage.output, lambda offset, _: offsets.append(offset))
    for number in range(30):
        appender.append(ToWrite(None, b"%d" % number))
    stage.world.run(stage.world.now_ms + 20_000)
    assert offsets == list(range(30))
    assert stage.committed() == [b"%d" % number for number in range(30)]


def told_and_stored(stage: Stage) -> tuple[list[str | None], int]:
    """Return the reported outcomes of appends, some of which are reported as failed, and how many of them are stored: the first ones."""
    stage.kafka.weather = NetworkConditions(lost=0.3, failed_append=0.1)
    outcomes: list[str | None] = []
    appender = Appender(stage.kafka, stage.process, stage.output, lambda _, error: outcomes.append(error))
    for number in range(30):
        appender.append(ToWrite(None, b"%d" % number))
    stage.world.run(stage.world.now_ms + 3_000)
    appender.close()
    stored = stage.committed()
    assert stored == [b"%d" % number for number in range(len(stored))]
    return outcomes, len(stored)


def test_later_appends_succeed_only_if_the_append_reported_failed_was_stored() -> None:
    after_stored, after_lost = set(), set()  # outcomes reported for the appends after a failed one
    for seed in range(20):
        stage = Stage(seed)
        outcomes, stored = told_and_stored(stage)
        assert ("failed" in outcomes[:stored]) == bool(stage.world.seen["fail stored append"])
        if "failed" in outcomes:
            first = outcomes.index("failed")
            (after_stored if first < stored else after_lost).update(outcomes[first + 1 :])
    assert None in after_stored
    assert None not in after_lost
    assert after_lost


def test_compaction_keeps_the_newest_committed_record_of_a_key_and_undecided_records(stage: Stage) -> None:
    def put(key: bytes, value: bytes) -> None:
        stage.output.store(ToWrite(key, value))

    async def story() -> None:
        put(b"a", b"1")
        put(b"b", b"1")
        aborted = await stage.producer()
        aborted.begin()
        await aborted.produce(stage.output, [ToWrite(b"a", b"aborted")])
        await aborted.end(commit=False)
        await stage.process.sleep(20)
        put(b"a", b"2")
        opened = await stage.producer()
        opened.begin()
        await opened.produce(stage.output, [ToWrite(b"b", b"open")])
        stage.output.compact(stage.output.end)

    stage.run(story())
    assert [(record.key, record.value) for record in stage.output.records if not record.marker] == [
        (b"b", b"1"),
        (b"a", b"2"),
        (b"b", b"open"),
    ]


def test_trimmed_records_cannot_be_read_and_a_late_trim_restores_no_record(stage: Stage) -> None:
    for value in (b"1", b"2", b"3"):
        stage.output.store(ToWrite(None, value))
    for end in (2, 1):
        stage.output.trim(end)
    assert [record.value for record in stage.output.read(2, committed=True)[0]] == [b"3"]
    with pytest.raises(KafkaFault, match="trimmed"):
        stage.output.read(1, committed=True)


def test_stopped_process_pauses_until_resumed_and_killed_process_does_nothing_more(stage: Stage) -> None:
    done: list[str] = []

    async def work(name: str) -> None:
        while True:
            await stage.process.sleep(10)
            done.append(name)

    stage.process.spawn(work("a"))
    stage.world.run(stage.world.now_ms + 25)
    stage.process.stop()
    stage.world.run(stage.world.now_ms + 100)
    assert done == ["a", "a"]
    stage.process.go_on()
    stage.world.run(stage.world.now_ms + 15)
    assert len(done) > 2
    stage.process.kill()
    before = len(done)
    stage.world.run(stage.world.now_ms + 100)
    assert len(done) == before
