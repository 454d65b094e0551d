"""Searches on Kafka in memory: journal of a real broker, target topics, store, audit topic, and what is not there any more."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bascule.cli import why
from bascule.cli.output import Format
from bascule.client import Queue
from bascule.core.masking import PropertyMask
from bascule.jms.record_headers import DIVERT_HEADER, ERRORS, ID_HEADER, ORIGIN_HEADER
from bascule.kafka.history import TopicHistory
from bascule.pipelines.spec import from_settings
from bascule.timeline import audit_lines, targets
from bascule.timeline.budget import SearchBudget
from bascule.timeline.question import MessageQuestion
from bascule.timeline.scan import ScanLimits
from bascule.timeline.story import NO_SENDER, NOT_FOUND, REDRIVEN, MessageStory
from bascule.timeline.targets import DivertState
from bascule.writer.position import COMMON, MOVED, POSITION_PARTITIONS, MovedMark, Position, position_key, position_partition
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import Broker, called, kafka, serving
from tests.unit.server.served import run_async

__all__ = ["kafka"]
TARGET, AUDIT, POSITIONS, JOURNAL = "orders", "audit", "test.positions", "test.journal"
EVERYTHING = ScanLimits()
DIVERT: dict[str, Any] = {"name": "d", "from": "q", "to": TARGET}
SETTINGS: dict[str, Any] = {"divert": [DIVERT], "audit": {"topic": AUDIT, "messages": True}, "bridge": {"id": "b"}}


def asked(broker: Broker, message_id: str, limits: ScanLimits = EVERYTHING, **options: Any) -> MessageStory:
    pipelines = from_settings(broker.settings, "memory")
    with closing(MessageQuestion(pipelines, message_id, limits, **options)) as question:
        for _ in question.steps():
            pass
        return question.story()


def sent(broker: Broker, queue: str = "q") -> str:
    with broker.connect() as context:
        return str(context.send(Queue(queue), "body").message_id)


def reached(memory: KafkaInMemory, offset: int) -> None:
    """Write the position of the divert."""
    if POSITIONS not in memory.topics:
        memory.create(POSITIONS, POSITION_PARTITIONS)
    put_position(memory, position_key(COMMON, JOURNAL, 0), Position(JOURNAL, "id", 0, offset, members=("d",)))


def put_position(memory: KafkaInMemory, key: str, position: Position) -> None:
    memory.put(POSITIONS, position.encode(), key.encode(), partition=position_partition(key))


def written(memory: KafkaInMemory, identity: str, divert: str = "d", topic: str = TARGET, **more: bytes) -> int:
    headers: dict[str, Any] = {ORIGIN_HEADER: b"b", ID_HEADER: identity.encode(), DIVERT_HEADER: divert.encode(), **more}
    return memory.put(topic, b"value", None, **headers)


def outcomes(story: MessageStory) -> list[tuple[str, DivertState, int]]:
    return [(each.divert, each.state, each.offset) for each in story.outcomes]


@run_async
async def test_life_joins_journal_target_topic_and_audit(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create(AUDIT, 2)
    kafka.create(TARGET)
    async with serving(kafka, tmp_path, **SETTINGS) as broker:
        first, message_id, last = [await called(sent, broker) for _ in range(3)]
        story = await called(asked, broker, message_id)
        assert outcomes(story) == [("d", DivertState.PENDING, -1)]
        assert not story.ended
        identities = [
            next(iter((await called(asked, broker, each)).life.messages.values())).identity for each in (first, message_id, last)
        ]  # fmt: skip
        offsets = [written(kafka, identity) for identity in identities]
        reached(kafka, kafka.partition(JOURNAL).end)
        assert await broker.receive("q", 3) == ["body"] * 3
        story = await called(asked, broker, message_id.removeprefix("ID:"))
    assert outcomes(story) == [("d", DivertState.WRITTEN, offsets[1])]
    assert story.ended
    said = json.loads(json.dumps(story.as_dict()))
    whats = [event["what"] for event in said["events"]]
    assert {"sent by a client", "accepted", "transferred to a client", "left the queue", "diverted"} <= set(whats)
    assert said["messages"][0]["diverts"][0]["offset"] == offsets[1]


@pytest.mark.parametrize(
    ("arrange", "expected"),
    [
        (lambda memory, identity: None, DivertState.NOT_FOUND),
        (lambda memory, identity: written(memory, identity, "other"), DivertState.NOT_FOUND),
        (lambda memory, identity: memory.put(TARGET, b"foreign", None, transaction=object()), DivertState.UNKNOWN),
        (lambda memory, identity: written(memory, identity, topic="test.dead-letter"), DivertState.DEAD_LETTER),
    ],
    ids=["retention", "another divert", "open transaction", "dead letter"],
)
@run_async
async def test_divert_without_its_record_says_why(
    kafka: KafkaInMemory,
    tmp_path: Path,
    arrange: Callable[[KafkaInMemory, str], object],
    expected: DivertState,
) -> None:
    kafka.create(TARGET)
    kafka.create("test.dead-letter")
    async with serving(kafka, tmp_path, divert=[DIVERT], bridge={"id": "b"}) as broker:
        message_id = await called(sent, broker)
        identity = next(iter((await called(asked, broker, message_id)).life.messages.values())).identity
        arrange(kafka, identity)
        reached(kafka, kafka.partition(JOURNAL).end)
        story = await called(asked, broker, message_id)
    assert [state for _, state, _ in outcomes(story)] == [expected]


@run_async
async def test_search_in_a_target_topic_is_bounded_and_says_so(
    kafka: KafkaInMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "CLOCK_SKEW_MS", 0)
    kafka.create(TARGET)
    async with serving(kafka, tmp_path, divert=[DIVERT], bridge={"id": "b"}) as broker:
        message_id = await called(sent, broker)
        for _ in range(20):
            kafka.put(TARGET, b"of another program")
        reached(kafka, kafka.partition(JOURNAL).end)
        story = await called(lambda: asked(broker, message_id, target_records_max=5))
    assert [state for _, state, _ in outcomes(story)] == [DivertState.UNKNOWN]
    assert any(f"{TARGET}-0 was read from offset" in gap for gap in story.gaps)


@run_async
async def test_limit_and_time_range_of_the_journal_are_stated(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        message_id = await called(sent, broker)
        cut = await called(asked, broker, message_id, ScanLimits(records_max=0))
        late = await called(asked, broker, message_id, ScanLimits(since_ms=1 << 42))
    assert cut.life.messages == late.life.messages == {}
    assert any("because of the limit" in sentence for sentence in cut.unrecorded())
    assert any("was not read, because of the time limit" in sentence for sentence in late.unrecorded())
    assert NOT_FOUND in cut.unrecorded()


@run_async
async def test_trimmed_part_of_the_journal_is_stated(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        message_id = await called(sent, broker)
        partition = kafka.partition(JOURNAL)
        partition.first = partition.end
        story = await called(asked, broker, message_id)
    assert story.life.messages == {}
    assert any(sentence == f"the journal before offset {partition.first} is gone" for sentence in story.unrecorded())


@run_async
async def test_search_continues_with_what_is_appended(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        message_id = await called(sent, broker)
        with closing(MessageQuestion(from_settings(broker.settings, "memory"), message_id, ScanLimits())) as question:
            await called(list, question.steps())
            assert not question.story().ended
            await broker.receive("q", 1)

            def follow() -> None:
                while not question.story().ended:
                    question.read_on()

            await called(follow)


@run_async
async def test_older_queues_have_the_names_of_the_snapshot(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        await called(sent, broker)
        await broker.stop()
    async with serving(kafka, tmp_path) as broker:
        start = kafka.partition(JOURNAL).end
        message_id = await called(sent, broker)
        kafka.partition(JOURNAL).first = start
        story = await called(asked, broker, message_id)
    assert story.as_dict()["messages"][0]["queues"][0]["queue"] == "q"


@run_async
async def test_divert_whose_topic_cannot_be_seen_is_unknown(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create("test.dead-letter")
    async with serving(kafka, tmp_path, divert=[DIVERT], bridge={"id": "b"}) as broker:
        message_id = await called(sent, broker)
        story = await called(asked, broker, message_id)
        assert [each.detail for each in story.outcomes] == ["the divert has not begun"]
        reached(kafka, kafka.partition(JOURNAL).end)
        story = await called(asked, broker, message_id)
    assert [state for _, state, _ in outcomes(story)] == [DivertState.UNKNOWN]
    assert any(f"topic {TARGET!r} does not exist, or may not be read" in gap for gap in story.gaps)


@run_async
async def test_divert_whose_position_was_moved_may_have_a_message_from_before_its_beginning(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create(TARGET)
    kafka.create("test.dead-letter")
    async with serving(kafka, tmp_path, divert=[DIVERT], bridge={"id": "b"}) as broker:
        message_id = await called(sent, broker)
        identity = next(iter((await called(asked, broker, message_id)).life.messages.values())).identity
        end = kafka.partition(JOURNAL).end
        reached(kafka, end)
        put_position(kafka, position_key("begun:d", JOURNAL, 0), Position(JOURNAL, "id", 0, end))
        story = await called(asked, broker, message_id)
        assert [state for _, state, _ in outcomes(story)] == [DivertState.EARLIER]
        put_position(kafka, f"{MOVED}divert:d", MovedMark("request", moved=1, number=1).position())
        offset = written(kafka, identity)
        story = await called(asked, broker, message_id)
        assert REDRIVEN not in story.unrecorded()
        # A later request that was refused replaces the mark of the move.
        put_position(kafka, f"{MOVED}divert:d", MovedMark("refused", moved=0, number=2, reason="the position has moved").position())
        again = await called(asked, broker, message_id)
    assert outcomes(story) == outcomes(again) == [("d", DivertState.WRITTEN, offset)]


@run_async
async def test_record_of_a_journal_before_this_one_is_another_message(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create(TARGET)
    kafka.create("test.dead-letter")
    async with serving(kafka, tmp_path, divert=[DIVERT], bridge={"id": "b"}) as broker:
        message_id = await called(sent, broker)
        identity = next(iter((await called(asked, broker, message_id)).life.messages.values())).identity
        written(kafka, f"9999{identity}")
        reached(kafka, kafka.partition(JOURNAL).end)
        story = await called(asked, broker, message_id)
    assert [state for _, state, _ in outcomes(story)] == [DivertState.NOT_FOUND]


@run_async
async def test_text_of_an_error_is_not_shown_if_properties_are_masked(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create(TARGET)
    kafka.create("test.dead-letter")
    async with serving(kafka, tmp_path, divert=[DIVERT], bridge={"id": "b"}) as broker:
        message_id = await called(sent, broker)
        identity = next(iter((await called(asked, broker, message_id)).life.messages.values())).identity
        error: dict[str, Any] = {f"{ERRORS}exception.message": b"card 4711 is invalid", f"{ERRORS}exception.class.name": b"ValueError"}
        written(kafka, identity, topic="test.dead-letter", **error)
        reached(kafka, kafka.partition(JOURNAL).end)
        shown = await called(asked, broker, message_id)
        masked = await called(lambda: asked(broker, message_id, mask=PropertyMask(["card"])))
    assert [each.detail for each in shown.outcomes] == ["card 4711 is invalid"]
    assert [each.detail for each in masked.outcomes] == ["ValueError"]
    assert "not diverted: dead letter" in [event["what"] for event in masked.as_dict()["events"]]
    assert REDRIVEN in shown.unrecorded()


@pytest.mark.parametrize("removed_wrote", [True, False])
@run_async
async def test_removed_exclusive_divert_may_have_left_a_dead_letter(kafka: KafkaInMemory, tmp_path: Path, removed_wrote: bool) -> None:
    kafka.create("test.dead-letter")
    async with serving(kafka, tmp_path, divert=[{**DIVERT, "exclusive": True}], bridge={"id": "b"}) as broker:
        message_id = await called(sent, broker)
        identity = next(iter((await called(asked, broker, message_id)).life.messages.values())).identity
    if removed_wrote:
        written(kafka, identity, topic="test.dead-letter")
    async with serving(kafka, tmp_path, bridge={"id": "b"}) as broker:
        story = await called(asked, broker, message_id)
    assert [state for _, state, _ in outcomes(story)] == [DivertState.DEAD_LETTER if removed_wrote else DivertState.REMOVED]
    assert story.ended is removed_wrote


@run_async
async def test_audit_that_began_after_the_send_does_not_stand_for_it(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create(AUDIT)
    async with serving(kafka, tmp_path) as broker:
        message_id = await called(sent, broker)
    async with serving(kafka, tmp_path, audit={"topic": AUDIT, "messages": True}) as broker:
        await broker.receive("q", 1)
        later = await called(sent, broker)
        story, audited = await called(asked, broker, message_id), await called(asked, broker, later)
    assert "transferred to a client" in [event["what"] for event in story.as_dict()["events"]]
    assert NO_SENDER in story.unrecorded()
    assert NO_SENDER not in audited.unrecorded()


@run_async
async def test_journal_that_is_trimmed_across_the_start_of_an_epoch_can_still_be_searched(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        message_id = await called(sent, broker)
        question = MessageQuestion(from_settings(broker.settings, "memory"), message_id, ScanLimits())
        await called(list, question.steps())
        await broker.stop()
    with closing(question):
        async with serving(kafka, tmp_path) as broker:
            await called(sent, broker)
            kafka.partition(JOURNAL).first = kafka.partition(JOURNAL).end - 1
            while question.scan.position < kafka.partition(JOURNAL).end:
                await called(question.read_on)
        story = question.story()
    assert any("was trimmed during the search" in gap for gap in story.gaps)
    assert story.as_dict()["messages"][0]["queues"][0]["held"] is None


@pytest.mark.parametrize(
    ("budget", "why"), [({"records_max": 0}, "0 records"), ({"bytes_max": 0}, "0 bytes"), ({"seconds_max": -1.0}, "-1 s")]
)
@run_async
async def test_search_without_budget_says_that_it_has_read_nothing(
    kafka: KafkaInMemory, tmp_path: Path, budget: dict[str, Any], why: str
) -> None:
    async with serving(kafka, tmp_path) as broker:
        message_id = await called(sent, broker)
        story = await called(lambda: asked(broker, message_id, budget=SearchBudget(**budget)))
    assert not story.life.messages
    assert any(why in sentence for sentence in story.unrecorded())


@run_async
async def test_budget_ends_the_search_in_target_topic_and_audit(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create(AUDIT)
    kafka.create(TARGET)
    kafka.create("test.dead-letter")
    async with serving(kafka, tmp_path, **SETTINGS) as broker:
        message_id = await called(sent, broker)
        for _ in range(20):
            kafka.put(TARGET, b"of another program")
        reached(kafka, kafka.partition(JOURNAL).end)
        whole = SearchBudget()
        await called(lambda: asked(broker, message_id, budget=whole))
        records = kafka.partition(JOURNAL).end - kafka.partition(JOURNAL).first
        budget = SearchBudget(records_max=records + 10)
        story = await called(lambda: asked(broker, message_id, budget=budget))
    assert whole.records > records + 20
    assert budget.records <= records + 10
    assert [state for _, state, _ in outcomes(story)] == [DivertState.UNKNOWN]
    assert any(AUDIT in gap and "a search reads at most" in gap for gap in story.gaps)


@run_async
async def test_search_that_has_ended_asks_no_further_partition(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create(AUDIT, 50)
    kafka.create(TARGET, 50)
    kafka.create("test.dead-letter")
    async with serving(kafka, tmp_path, **SETTINGS) as broker:
        message_id = await called(sent, broker)
        reached(kafka, kafka.partition(JOURNAL).end)
        budget, asked_of = SearchBudget(), list[TopicHistory]()

        class Cancelling(TopicHistory):
            def stable(self) -> int:
                asked_of.append(self)
                budget.cancel()
                return super().stable()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(targets, "TopicHistory", Cancelling)
            patch.setattr(audit_lines, "TopicHistory", Cancelling)
            story = await called(lambda: asked(broker, message_id, budget=budget))
    assert len(asked_of) == 1
    assert [state for _, state, _ in outcomes(story)] == [DivertState.UNKNOWN]
    assert any(f"topic {TARGET!r} was not read from partition 1 on" in gap for gap in story.gaps)
    assert any(f"topic {AUDIT!r} was not read from partition 0 on" in gap for gap in story.gaps)


def test_cancelled_search_reads_nothing_more_and_does_not_pause() -> None:
    budget = SearchBudget(pause_max_s=3600.0, clock=count().__next__)
    budget.cancel()
    for _ in range(1000):
        budget.take(1)
    assert budget.spent == "the search was cancelled"


@run_async
async def test_follow_ends_with_the_last_events_of_the_audit(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(why, "LOOK_S", 3600.0)
    kafka.create(AUDIT)
    async with serving(kafka, tmp_path, audit={"topic": AUDIT, "messages": True}) as broker:
        message_id = await called(sent, broker)
        with closing(MessageQuestion(from_settings(broker.settings, "memory"), message_id, ScanLimits())) as question:
            await called(list, question.steps())
            await broker.receive("q", 1)
            await called(why._follow, question, Format.TABLE)
    printed = capsys.readouterr().out
    assert all(printed.count(what) == 1 for what in ("sent by a client", "accepted", "transferred to a client", "left the queue"))


@run_async
async def test_limit_that_a_following_search_has_passed_is_not_stated(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path) as broker:
        message_id = await called(sent, broker)
        with closing(MessageQuestion(from_settings(broker.settings, "memory"), message_id, ScanLimits(records_max=0))) as question:
            await called(list, question.steps())
            assert any("because of the limit" in sentence for sentence in question.story().unrecorded())
            while not question.scan.complete:
                await called(question.read_on)
            story = question.story()
    assert not any("because of the limit" in sentence for sentence in story.unrecorded())
    assert story.as_dict()["messages"][0]["queues"][0]["state"] == "waiting"
