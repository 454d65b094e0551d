"""Only the driver that took a position last, and the tasks that it has started since, may move it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.history import TopicHistory
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import EARLIEST, DivertSpec, StartPosition
from bascule.pipelines.tasks import Batches, DivertTask
from bascule.writer.errors import PositionMoved
from bascule.writer.position import Position, PositionTaken
from tests.scenarios.sparkless import Rows
from tests.scenarios.test_positions import Journal
from tests.support.crash_points import at_crash_points

#: The journal has the start record of an epoch and ten messages.
END = 11
TASK_TIMEOUT_S = 60.0


class Run:
    """A driver run with the diverts ``orders`` and ``late``. ``late`` lags behind ``orders``, so it has a position of its own."""

    def __init__(self, journal: Journal, name: str) -> None:
        self.positions = Positions(journal.pipelines, name)
        self.journal = journal
        self.common, self.late = self.positions.common_key, self.positions.own_key("late")

    def take(self) -> None:
        journal = self.journal
        diverts = tuple(divert(journal, name) for name in ("orders", "late"))
        assert self.positions.take_diverts(diverts, journal.topics.ids([journal.name])[journal.name]) is not None

    def stored(self, key: str) -> Position:
        return self.positions.stored()[key]


class Task:
    """A task of a divert query, as a Spark worker runs it. It has read its position and waits for its rows until ``finish``."""

    def __init__(self, journal: Journal, key: str, end: int = END) -> None:
        """The task gets the rows of the journal from its position to ``end``."""
        positions = journal.positions
        position = positions.stored()[key]
        diverts = tuple(divert(journal, name) for name in position.members)
        self._task = DivertTask(journal.pipelines, positions.claim(key, position), diverts)
        self._started, self._rows_come = threading.Event(), threading.Event()
        worker = ThreadPoolExecutor(1)
        self._work = worker.submit(Rows(journal.pipelines, position.offset).run, self._run, end)
        self._work.add_done_callback(lambda _: self._started.set())
        worker.shutdown(wait=False)
        assert self._started.wait(TASK_TIMEOUT_S)

    def finish(self) -> None:
        """Carry the rows. Raises the error of the task."""
        self._rows_come.set()
        self._work.result(TASK_TIMEOUT_S)

    def _run(self, batches: Batches) -> Batches:
        return self._task(self._when_told(batches))

    def _when_told(self, batches: Batches) -> Batches:
        self._started.set()
        assert self._rows_come.wait(TASK_TIMEOUT_S)
        yield from batches


def divert(journal: Journal, name: str) -> DivertSpec:
    return DivertSpec(name, "#", f"{journal.name}.{name}", start=StartPosition(EARLIEST))


def carried(journal: Journal, name: str) -> list[bytes]:
    """Return the records in the topic of the divert."""
    topic = f"{journal.name}.{name}"
    if topic not in journal.topics.partitions():
        return []
    history = TopicHistory(journal.client, topic, 0)
    return [bytes(record.value() or b"") for record in history.records(history.earliest(), history.latest(), committed=True)]


@pytest.fixture
def journal(kafka: EmbeddedKafka, topic_prefix: str) -> Journal:
    return carried_journal(kafka, topic_prefix)


def carried_journal(kafka: EmbeddedKafka, prefix: str) -> Journal:
    """A journal whose messages the divert ``orders`` has carried."""
    journal = Journal(kafka, prefix)
    journal.take("before")
    Task(journal, journal.positions.common_key).finish()
    assert len(carried(journal, "orders")) == END - 1
    return journal


@pytest.fixture
def first(journal: Journal) -> Run:
    run = Run(journal, "first")
    run.take()
    assert (run.stored(run.common).offset, run.stored(run.late).offset) == (END, 0)
    return run


@pytest.fixture
def second(journal: Journal) -> Run:
    return Run(journal, "second")


def at(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> None:
    """Call ``act`` once, when a driver passes a point."""
    acts = [act]

    def point(passed: str) -> None:
        if passed == name and acts:
            acts.pop()()

    at_crash_points(monkeypatch, point)


def test_task_of_replaced_driver_cannot_move_a_position_that_the_successor_is_taking(
    first: Run, second: Run, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan = Task(journal, first.late)

    def try_again() -> None:
        with pytest.raises(PositionMoved):
            orphan.finish()

    at(monkeypatch, "driver.take.before", try_again)
    second.take()
    assert second.stored(second.late).offset == 0
    assert carried(journal, "late") == []


def test_position_moved_by_a_task_just_before_the_driver_takes_the_position_counts(
    first: Run, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the moment when the driver has read the position and is about to write its name into it."""
    orphan = Task(journal, first.late, 5)
    at(monkeypatch, "writer.position.read", orphan.finish)
    assert first.positions.read(first.late).offset == 5
    assert carried(journal, "late") == [b"0", b"1", b"2", b"3"]


def test_task_of_stopped_query_cannot_move_a_position_that_its_driver_has_read(first: Run, journal: Journal) -> None:
    stopped = Task(journal, first.late)
    assert first.positions.read(first.late).offset == 0
    with pytest.raises(PositionMoved):
        stopped.finish()
    assert first.stored(first.late).offset == 0
    assert carried(journal, "late") == []


def test_task_started_after_its_driver_was_replaced_reads_nothing(first: Run, second: Run, journal: Journal) -> None:
    claim = first.positions.claim(first.late, first.stored(first.late))
    second.take()
    with pytest.raises(PositionTaken):
        Rows(journal.pipelines, 0).run(DivertTask(journal.pipelines, claim, (divert(journal, "late"),)), END)
    assert carried(journal, "late") == []


@pytest.mark.slow
def test_diverts_do_not_join_after_the_common_position_moved_since_the_last_read(first: Run, journal: Journal) -> None:
    shared = first.positions.read(first.common)
    journal.send("more")
    Task(journal, first.common, END + 1).finish()
    with pytest.raises(PositionMoved):
        first.positions.move(first.common, shared, replace(shared, members=("late", "orders")), {first.late: None})
    assert first.stored(first.common).offset == END + 1
    assert first.stored(first.late).offset == 0


def test_replaced_driver_cannot_take_its_diverts_back(first: Run, second: Run) -> None:
    second.take()
    for key in (first.common, first.late):
        taken = second.stored(key)
        with pytest.raises(PositionTaken, match="another driver of the bridge"):
            first.positions.read(key)
        assert second.stored(key) == taken
        assert second.positions.read(key).offset == taken.offset


@pytest.mark.slow
def test_driver_paused_while_taking_positions_does_not_stop_its_successor(first: Run, second: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    third, take = Run(first.journal, "third"), Positions._take
    late = [second.late]

    def take_later(positions: Positions, writer: TransactionalWriter, *arguments: Any) -> Position | None:
        if positions is second.positions and writer.key in late:
            late.clear()
            third.take()
        return take(positions, writer, *arguments)

    monkeypatch.setattr(Positions, "_take", take_later)
    with pytest.raises(PositionTaken, match="another driver of the bridge"):
        second.take()
    assert third.stored(third.late).owner.startswith("third")
    assert third.positions.read(third.late).offset == 0


@pytest.mark.slow
def test_of_two_drivers_starting_at_once_one_owns_the_diverts(first: Run, second: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    third = Run(first.journal, "third")
    at(monkeypatch, "driver.take.before", third.take)
    with pytest.raises(PositionMoved):
        second.take()
    for key in (first.common, first.late):
        assert third.positions.read(key).owner.startswith("third")
