"""Who moves a position: the driver that took it last and the tasks that it has started since, and nobody who is left of another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from bascule.core import crash
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import EARLIEST, Divert, Start
from bascule.writer.errors import PositionMoved
from bascule.writer.position import Position, PositionTaken
from tests.scenarios.test_positions import Journal

MESSAGES = 10
START = Start(EARLIEST)


class Run:
    """A driver run of the diverts ``orders`` and ``late``, the second of which stands apart: it has come less far."""

    def __init__(self, journal: Journal, name: str) -> None:
        self.positions = Positions(journal.pipelines, name)
        self.journal = journal
        self.common, self.late = self.positions.common_key, self.positions.own_key("late")

    def take(self) -> None:
        diverts = tuple(Divert(name, "#", "out", start=START) for name in ("orders", "late"))
        journal = self.journal
        assert self.positions.take_diverts(diverts, journal.topics.ids([journal.name])[journal.name]) is not None

    def stored(self, key: str) -> Position:
        return self.positions.stored()[key]


@pytest.fixture
def journal(kafka: EmbeddedKafka, topic_prefix: str) -> Journal:
    journal = Journal(kafka, topic_prefix)
    journal.take("before")
    carry(journal.positions, journal.positions.common_key, MESSAGES)
    return journal


@pytest.fixture
def first(journal: Journal) -> Run:
    run = Run(journal, "first")
    run.take()
    assert (run.stored(run.common).offset, run.stored(run.late).offset) == (MESSAGES, 0)
    return run


@pytest.fixture
def second(journal: Journal) -> Run:
    return Run(journal, "second")


def carry(positions: Positions, key: str, offset: int) -> None:
    """What a task does that knows the position as it is stored."""
    task(positions, key, offset)()


def task(positions: Positions, key: str, offset: int) -> Callable[[], None]:
    """One that knows the position as it is stored, and moves it when it is called."""
    known = positions.stored()[key]

    def move() -> None:
        with closing(positions.writer(key)) as writer:
            writer.write([], known, replace(known, offset=offset))

    return move


def at(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> None:
    """``act`` happens once, when a driver comes by a point."""
    acts = [act]

    def point(passed: str) -> None:
        if passed == name and acts:
            acts.pop()()

    monkeypatch.setattr(crash, "point", point)


def test_a_task_of_a_driver_that_was_replaced_cannot_move_what_its_successor_is_about_to_write(
    first: Run, second: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan = task(first.positions, first.late, 5)

    def try_again() -> None:
        with pytest.raises(PositionMoved):
            orphan()

    at(monkeypatch, "driver.take.before", try_again)
    second.take()
    assert second.stored(second.late).offset == 0


def test_what_a_task_moves_at_the_last_moment_counts(first: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write, orphans = TransactionalWriter.write, [task(first.positions, first.late, 5)]

    def write_later(writer: TransactionalWriter, *arguments: Any) -> None:
        if orphans:
            orphans.pop()()
        write(writer, *arguments)

    monkeypatch.setattr(TransactionalWriter, "write", write_later)
    assert first.positions.read(first.late).offset == 5


def test_a_task_of_a_query_that_was_stopped_cannot_move_what_its_driver_has_read(first: Run) -> None:
    stopped = task(first.positions, first.late, 5)
    assert first.positions.read(first.late).offset == 0
    with pytest.raises(PositionMoved):
        stopped()


def test_diverts_do_not_join_where_one_of_them_has_moved_since_it_was_read(first: Run) -> None:
    shared = first.positions.read(first.common)
    carry(first.positions, first.common, MESSAGES + 1)
    with pytest.raises(PositionMoved):
        first.positions.move(first.common, shared, replace(shared, members=("late", "orders")), {first.late: None})
    assert first.stored(first.common).offset == MESSAGES + 1
    assert first.stored(first.late).offset == 0


def test_a_driver_that_was_replaced_takes_no_divert_back(first: Run, second: Run) -> None:
    second.take()
    for key in (first.common, first.late):
        taken = second.stored(key)
        with pytest.raises(PositionTaken, match="another driver of the bridge"):
            first.positions.read(key)
        assert second.stored(key) == taken
        assert second.positions.read(key).offset == taken.offset


def test_a_driver_that_stood_still_before_it_had_all_positions_does_not_stop_its_successor(
    first: Run, second: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_of_two_drivers_that_start_at_once_one_has_the_diverts(first: Run, second: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    third = Run(first.journal, "third")
    at(monkeypatch, "driver.take.before", third.take)
    with pytest.raises(PositionMoved):
        second.take()
    for key in (first.common, first.late):
        assert third.positions.read(key).owner.startswith("third")
