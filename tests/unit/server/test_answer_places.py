"""Places for long answers: of those who wait, the reader with the fewest places is served first, and slow readers lose theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bascule.core.errors import Unavailable
from bascule.server import answer_places
from bascule.server.answer_places import AnswerPlace, AnswerPlaces
from tests.unit.server.served import run_async

WAIT_S = 30.0


@asynccontextmanager
async def reading(places: AnswerPlaces, *readers: str) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Let readers have places, and read until the end of the context."""

    async def read(place: AnswerPlace) -> None:
        async with place.reading(WAIT_S):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(read(await places.place(reader, WAIT_S))) for reader in readers]
    await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@run_async
async def test_reader_with_the_fewest_places_is_served_first() -> None:
    places = AnswerPlaces(2)
    first, _ = await places.place("a", WAIT_S), await places.place("a", WAIT_S)
    waiting = {name: asyncio.create_task(places.place(name[0], WAIT_S)) for name in ("a3", "a4", "b1")}
    await asyncio.sleep(0)
    first.give_back()
    assert (await waiting["b1"]).reader == "b"
    assert not waiting["a3"].done()
    (await waiting["b1"]).give_back()
    await waiting["a3"]
    waiting["a4"].cancel()


@run_async
async def test_slow_reader_with_several_places_loses_one_to_a_reader_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_places, "SLOW_AFTER_S", 0.05)
    places = AnswerPlaces(3)
    async with reading(places, "a", "a", "a") as tasks, asyncio.timeout(WAIT_S):
        await places.place("b", WAIT_S)
        await places.place("c", WAIT_S)
        await asyncio.wait(tasks[:2])
        assert [type(task.exception()) for task in tasks[:2]] == [TimeoutError] * 2, "the oldest ones"
        assert not tasks[2].done()
        with pytest.raises(Unavailable):
            await places.place("d", 0.2)
        assert not tasks[2].done(), "each has one place"


@run_async
async def test_quick_answers_and_those_that_are_being_made_are_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    places = AnswerPlaces(3)
    making = await places.place("a", WAIT_S)
    async with reading(places, "a", "a") as tasks:
        with pytest.raises(Unavailable):
            await places.place("b", 0.1)
        assert not any(task.done() for task in tasks)
        monkeypatch.setattr(answer_places, "SLOW_AFTER_S", 0.0)
        (await places.place("b", WAIT_S)).give_back()
        assert not making.taken
        assert sum(task.done() for task in tasks) == 1


@run_async
async def test_one_waiting_reader_ends_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_places, "SLOW_AFTER_S", 0.0)
    places = AnswerPlaces(4)
    async with reading(places, *"aaaa") as tasks:
        greedy = [asyncio.create_task(places.place("a", WAIT_S)) for _ in range(3)]
        other = asyncio.create_task(places.place("b", WAIT_S))
        for _ in range(3):
            await asyncio.sleep(0)
            places.changed()
        assert (await other).reader == "b"
        assert sum(task.done() for task in tasks) == 1
        assert not any(task.done() for task in greedy)
        for task in greedy:
            task.cancel()


@run_async
async def test_place_of_a_client_that_leaves_while_it_waits_is_given_to_the_next() -> None:
    places = AnswerPlaces(1)
    held = await places.place("a", WAIT_S)
    leaving, staying = (asyncio.create_task(places.place(name, WAIT_S)) for name in "bc")
    await asyncio.sleep(0)
    leaving.cancel()
    held.give_back()  # before the task of the client that leaves has run
    assert (await staying).reader == "c"
    await asyncio.wait([leaving])
    (await staying).give_back()
    await places.place("d", WAIT_S)
