"""The parts in which a batch with transformations is carried, and the search for messages on which a transformation fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from pyspark.errors import PySparkException

from bascule.core.errors import BasculeError, Unavailable
from bascule.pipelines import batches, transforming
from bascule.pipelines.batches import BAD_AT_ONCE, BatchFailed, carry_all, first_bad
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.pipelines.tasks import OFFSET_MAX, BatchTooLarge, DivertTask, Message
from bascule.pipelines.transforming import SparkBatch, TransformingBatch
from bascule.writer.claims import Claim
from bascule.writer.position import PositionTaken
from tests.support.spark_texts import QUERY, said_by_spark

#: Number of messages in each journal record.
PER_RECORD = 5
MESSAGES = [(offset, index) for offset in range(100) for index in range(PER_RECORD)]


class Failing:
    """A transformation that fails on the messages ``bad``, and in its first ``transient`` runs for a transient reason."""

    def __init__(self, *bad: Message, transient: int = 0) -> None:
        self.bad, self.transient, self.runs = frozenset(bad), transient, 0

    def __call__(self, messages: Sequence[Message]) -> str | None:
        self.runs += 1
        if self.transient:
            self.transient -= 1
            return "a worker was killed"
        return next((f"unlucky {each}" for each in messages if each in self.bad), None)


def control_succeeds(message: Message) -> None:
    """Succeed: the run without the message has no error."""


def control_fails(message: Message) -> None:
    """Fail: the run without the message has an error, too."""
    raise BatchFailed(str(message))


def test_search_finds_exactly_messages_that_fail() -> None:
    failing = Failing((7, 2), (7, 4), (99, 0))
    assert first_bad(MESSAGES, failing, control_succeeds) == ({each: f"unlucky {each}" for each in ((7, 2), (7, 4), (99, 0))}, OFFSET_MAX)
    assert failing.runs < 60


def test_transient_failure_is_not_attributed_to_message() -> None:
    for transient in range(1, 10):  # up to the run with a single message
        assert first_bad(MESSAGES, Failing(transient=transient), control_succeeds)[0] == {}
    assert first_bad([], Failing(transient=1), control_succeeds) == ({}, OFFSET_MAX)


def test_failure_without_messages_is_not_attributed_to_message() -> None:
    with pytest.raises(BatchFailed, match=r"\(7, 2\)"):
        first_bad(MESSAGES, Failing((7, 2)), control_fails)


def test_control_run_without_messages_happens_once_per_found_message() -> None:
    controlled: list[Message] = []
    assert list(first_bad(MESSAGES, Failing((7, 2), (99, 0)), controlled.append)[0]) == controlled == [(7, 2), (99, 0)]


def test_half_that_must_contain_failing_message_is_not_tried_as_whole() -> None:
    failing = Failing(MESSAGES[-1])
    first_bad(MESSAGES, failing, control_succeeds)
    # One run for all messages, one for each first half, and two for the last message.
    assert failing.runs == 1 + math.ceil(math.log2(len(MESSAGES))) + 2


def test_search_for_many_failing_messages_finds_first_ones_by_record() -> None:
    failing = Failing(*MESSAGES)
    bad, end = first_bad(MESSAGES, failing, control_succeeds)
    assert list(bad) == [each for each in MESSAGES if each[0] <= end]
    assert BAD_AT_ONCE <= len(bad) < BAD_AT_ONCE + PER_RECORD
    assert failing.runs < 4 * len(bad)


UPPER, LOWER = (
    DivertSpec("upper", "#", "out", select=("upper(text) AS value",)),
    DivertSpec("lower", "#", "out", select=("lower(text) AS value",)),
)
PLAIN = DivertSpec("plain", "#", "out")


@dataclass
class Journal:
    """A journal: the messages on which transformations fail, and the messages that were carried."""

    bad: dict[str, frozenset[Message]] = field(default_factory=dict)
    #: Number of transient failures of a frame.
    transient: int = 0
    #: The error of each task, and the error of each transformation that runs without messages.
    raised: Exception | None = None
    without_messages: Exception | None = None
    carried: list[Message] = field(default_factory=list)
    dead: dict[tuple[str, int, int], str] = field(default_factory=dict)
    reads: list[tuple[int, int]] = field(default_factory=list)
    searched: list[tuple[str, int | None, list[Message]]] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """A range of the journal. Like a frame of Spark, it is carried as a whole or not at all."""

    journal: Journal
    rows: list[Message]

    def bounds(self) -> tuple[int, int] | None:
        return (self.rows[0][0], self.rows[-1][0]) if self.rows else None

    def up_to(self, end: int) -> Rows:
        return Rows(self.journal, [row for row in self.rows if row[0] <= end])

    def after(self, end: int) -> Rows:
        return Rows(self.journal, [row for row in self.rows if row[0] > end])

    def part(self, start: int, end: int) -> Rows:
        self.journal.reads.append((start, end))
        return Rows(self.journal, [row for row in MESSAGES if start <= row[0] < end])

    def carry(self, task: DivertTask) -> None:
        journal = self.journal
        if journal.transient:
            journal.transient -= 1
            raise PySparkException("a worker was killed")
        if journal.raised is not None:
            raise journal.raised
        if task.made_bytes_max is not None and len(self.rows) > task.made_bytes_max:
            raise said_by_spark(QUERY, BatchTooLarge("too much"))
        for divert in task.diverts:
            if any((divert.name, *row) not in task.failed for row in self.rows if row in journal.bad.get(divert.name, ())):
                raise PySparkException("a transformation failed")
        assert not set(journal.carried) & set(self.rows), "a message was carried twice"
        journal.carried += self.rows
        journal.dead |= task.failed

    def messages(self, divert: DivertSpec, most: int | None) -> list[Message]:
        self.journal.searched.append((divert.name, most, self.rows))
        return list(reversed(self.rows[:most]))

    def fault(self, divert: DivertSpec, messages: Sequence[Message]) -> str | None:
        assert messages == sorted(messages)
        if self.journal.without_messages is not None:
            return "no file"
        bad = self.journal.bad.get(divert.name, frozenset())
        return next((f"unlucky {each}" for each in messages if each in bad), None)

    def control(self, divert: DivertSpec, message: Message) -> None:
        if self.journal.without_messages is not None:
            raise self.journal.without_messages


def task(*diverts: DivertSpec, room: int | None = None) -> DivertTask:
    return DivertTask(
        PipelinesSpec("bridge", {}), Claim("diverts/journal/0", "journal", "id", 0, "me"), diverts or (UPPER,), made_bytes_max=room
    )


def carry(journal: Journal, rows: list[Message], *diverts: DivertSpec, room: int | None = 10_000) -> None:
    carry_all(Rows(journal, rows), task(*diverts, room=room))


def failed(divert: DivertSpec, *messages: Message) -> dict[tuple[str, int, int], str]:
    return {(divert.name, *message): f"unlucky {message}" for message in messages}


def test_batch_without_failure_is_carried_without_search() -> None:
    journal = Journal()
    carry(journal, MESSAGES)
    assert (journal.carried, journal.dead, journal.reads, journal.searched) == (MESSAGES, {}, [], [])


def test_messages_that_fail_transformation_are_passed_to_writer_with_reason_per_divert() -> None:
    journal = Journal({"upper": frozenset({(7, 2)}), "lower": frozenset({(7, 2), (50, 0)}), "plain": frozenset()})
    carry(journal, MESSAGES, UPPER, PLAIN, LOWER)
    assert journal.carried == MESSAGES
    assert journal.dead == failed(UPPER, (7, 2)) | failed(LOWER, (7, 2), (50, 0))
    assert {name for name, _, _ in journal.searched} == {"upper", "lower"}, "a divert without a transformation is not searched"


def test_many_failing_messages_are_found_and_carried_in_portions() -> None:
    bad = [(offset, 1) for offset in range(0, 100, 3)]
    journal = Journal({"upper": frozenset(bad)})
    carry(journal, MESSAGES)
    assert journal.carried == MESSAGES
    assert journal.dead == failed(UPPER, *bad)
    searched = [rows[0][0] for _, _, rows in journal.searched]
    assert searched == sorted(set(searched)), "a searched part is carried before the next search"
    assert len(searched) == 1 + (len(bad) - 1) // BAD_AT_ONCE


def test_earliest_searched_offset_of_all_diverts_bounds_carried_range() -> None:
    first, second = [(offset, 0) for offset in range(40, 60)], [(offset, 0) for offset in range(100)]
    journal = Journal({"upper": frozenset(first), "lower": frozenset(second)})
    carry(journal, MESSAGES, UPPER, LOWER)
    assert journal.carried == MESSAGES
    assert journal.dead == failed(UPPER, *first) | failed(LOWER, *second)


def test_too_large_batch_is_carried_in_halves_down_to_single_record() -> None:
    journal = Journal()
    carry(journal, MESSAGES[: 3 * PER_RECORD], room=PER_RECORD + 1)
    assert journal.carried == MESSAGES[: 3 * PER_RECORD]
    assert journal.reads == [(0, 1), (1, 3), (1, 2), (2, 3)]
    single = Journal({"upper": frozenset({(0, 3)})})
    carry(single, MESSAGES[:PER_RECORD], room=PER_RECORD - 1)
    assert (single.carried, single.reads) == (MESSAGES[:PER_RECORD], [])
    assert single.dead == failed(UPPER, (0, 3))
    assert [most for _, most, _ in single.searched] == [None], "a single record is searched, whatever its size"


def test_too_large_batch_without_rows_fails() -> None:
    journal = Journal(raised=said_by_spark(QUERY, BatchTooLarge("too much")))
    with pytest.raises(BatchFailed, match="Spark finds no rows"):
        carry(journal, [])


def test_search_is_bounded_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "SEARCHED_AT_ONCE", 2 * PER_RECORD)
    journal = Journal({"upper": frozenset({(3, 1)})})
    carry(journal, MESSAGES[: 4 * PER_RECORD])
    assert journal.carried == MESSAGES[: 4 * PER_RECORD]
    assert journal.dead == failed(UPPER, (3, 1))
    assert journal.reads == [(0, 2), (2, 4)]
    assert [most for _, most, _ in journal.searched] == [2 * PER_RECORD + 1] * 2


def test_task_error_is_raised_without_search() -> None:
    for error in (Unavailable("no Kafka"), PositionTaken("another driver")):
        journal = Journal(raised=said_by_spark(QUERY, error), bad={"upper": frozenset({(1, 1)})})
        with pytest.raises(PySparkException, match=str(error)):
            carry(journal, MESSAGES)
        assert journal.searched == []


def test_failure_without_responsible_message_is_raised() -> None:
    with pytest.raises(PySparkException, match="a worker was killed"):
        carry(Journal(transient=1), MESSAGES)
    with pytest.raises(BatchFailed, match="no file"):
        carry(Journal({"upper": frozenset({(1, 1)})}, without_messages=BatchFailed("no file")), MESSAGES)


@pytest.mark.parametrize("error", [Unavailable("no Kafka"), PositionTaken("another driver"), None], ids=["retriable", "fatal", "foreign"])
def test_batch_raises_task_error_and_foreign_error_as_batch_failed(error: BasculeError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    frame: Any = None
    batch = TransformingBatch(task(), "pool", lambda _: nullcontext())

    def fails(given: SparkBatch, of: DivertTask) -> None:
        assert (given, of) == (SparkBatch(frame, batch), batch.task)
        raise PySparkException("a worker was killed") if error is None else said_by_spark(QUERY, error)

    monkeypatch.setattr(transforming, "carry_all", fails)
    with pytest.raises(BatchFailed if error is None else type(error), match="a worker was killed" if error is None else str(error)):
        batch(frame)
