"""Garbage collection in short pauses, however many objects wait."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from bascule.server.garbage import GONE_BEFORE_THAW, MESSAGES_TO_THAW, GarbageCollection

#: Most objects that one collection may examine: 7 ms of processor time on a machine of the usual speed.
OBJECTS_MAX = 75_000
MESSAGES = 1_200_000


@pytest.fixture
def collection() -> Iterator[GarbageCollection]:
    """Return the garbage collection of a broker, in this process."""
    gc.collect()
    gc.freeze()
    # The collector defers a full collection until a quarter of the survivors of the last one are new. Count survivors of this test only.
    gc.collect()
    collection = GarbageCollection()
    collection.start()
    yield collection
    collection.stop()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("collection")
def test_no_collection_examines_many_objects_while_a_queue_grows_deep() -> None:
    looked: list[int] = []
    full = 0

    def look(phase: str, info: dict[str, int]) -> None:
        nonlocal full
        if phase == "start":
            looked.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))
            full += info["generation"] == 2

    gc.callbacks.insert(0, look)
    try:
        queue: list[list[int]] = [[] for _ in range(MESSAGES)]  # the collector treats all objects alike
    finally:
        gc.callbacks.remove(look)
    assert len(queue) == MESSAGES
    assert 0 < max(looked) <= OBJECTS_MAX
    assert full > 1


def test_object_in_a_cycle_is_freed_unless_it_outlives_a_full_collection(collection: GarbageCollection) -> None:
    short, long = Cycle(), Cycle()
    short_found, long_found = weakref.ref(short), weakref.ref(long)
    del short
    gc.collect()
    assert short_found() is None
    del long
    gc.collect()
    assert long_found() is not None
    collection.thaw()
    assert long_found() is None


@pytest.mark.parametrize(
    ("gone", "messages", "freed"),
    [
        (GONE_BEFORE_THAW, MESSAGES_TO_THAW, True),
        (GONE_BEFORE_THAW - 1, 0, False),
        (GONE_BEFORE_THAW, MESSAGES_TO_THAW + 1, False),
    ],
)
def test_frozen_objects_of_clients_are_freed_after_many_have_gone_while_few_messages_wait(
    collection: GarbageCollection, gone: int, messages: int, freed: bool
) -> None:
    client = Cycle()
    found = weakref.ref(client)
    gc.collect()
    del client
    collection.clients_gone(gone, messages)
    assert (found() is None) is freed


def test_stopped_collection_leaves_thresholds_callbacks_and_objects_as_they_were() -> None:
    gc.unfreeze()
    before = gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()
    collection = GarbageCollection()
    collection.start()
    gc.collect()
    assert gc.get_freeze_count() > 0
    collection.stop()
    assert (gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()) == before
