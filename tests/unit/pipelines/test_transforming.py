"""How the messages are found on which a transformation fails."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from bascule.pipelines.tasks import OFFSET_MAX, Message
from bascule.pipelines.transforming import BAD_AT_ONCE, BatchFailed, first_bad

#: Each journal record holds so many.
PER_RECORD = 5
MESSAGES = [(offset, index) for offset in range(100) for index in range(PER_RECORD)]


class Failing:
    """A transformation that fails on some messages, and now and then for a reason that passes."""

    def __init__(self, *bad: Message, passing: int = 0) -> None:
        self.bad, self.passing, self.runs = frozenset(bad), passing, 0

    def __call__(self, messages: Sequence[Message]) -> str | None:
        self.runs += 1
        if self.passing:
            self.passing -= 1
            return "a worker was killed"
        return next((f"unlucky {each}" for each in messages if each in self.bad), None)


def well(message: Message) -> None:
    """Nothing is wrong but what a transformation fails on."""


def lost(message: Message) -> None:
    """What is needed beside messages is gone."""
    raise BatchFailed(str(message))


def test_the_messages_themselves_are_found_and_not_their_neighbours_in_the_record() -> None:
    failing = Failing((7, 2), (7, 4), (99, 0))
    assert first_bad(MESSAGES, failing, well) == ({each: f"unlucky {each}" for each in ((7, 2), (7, 4), (99, 0))}, OFFSET_MAX)
    assert failing.runs < 60


def test_a_fault_that_passes_is_no_messages_own() -> None:
    for passing in range(1, 10):  # down to the leaf, where it fails once
        assert first_bad(MESSAGES, Failing(passing=passing), well)[0] == {}
    assert first_bad([], Failing(passing=1), well) == ({}, OFFSET_MAX)


def test_no_message_is_blamed_for_what_fails_without_it() -> None:
    with pytest.raises(BatchFailed, match=r"\(7, 2\)"):
        first_bad(MESSAGES, Failing((7, 2)), lost)


def test_what_is_wrong_beside_messages_is_looked_for_once_for_each_that_is_found_and_for_no_other() -> None:
    controlled: list[Message] = []
    assert list(first_bad(MESSAGES, Failing((7, 2), (99, 0)), controlled.append)[0]) == controlled == [(7, 2), (99, 0)]


def test_the_half_that_must_hold_a_bad_one_is_not_tried_as_a_whole() -> None:
    failing = Failing(MESSAGES[-1])
    first_bad(MESSAGES, failing, well)
    # All of them, their first halves all the way down, and the last one twice.
    assert failing.runs == 1 + math.ceil(math.log2(len(MESSAGES))) + 2


def test_of_very_many_bad_ones_the_first_are_found_record_by_record() -> None:
    failing = Failing(*MESSAGES)
    bad, end = first_bad(MESSAGES, failing, well)
    assert list(bad) == [each for each in MESSAGES if each[0] <= end]
    assert BAD_AT_ONCE <= len(bad) < BAD_AT_ONCE + PER_RECORD
    assert failing.runs < 4 * len(bad)
