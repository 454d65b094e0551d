"""The scheduled actions of the engine, of which very many may be cancelled at once."""

from __future__ import annotations

import random

from bascule.broker.schedule import CANCELLED_MAX, SORTED_OUT_AT_ONCE, Schedule
from bascule.broker.turns import Allowance
from tests.support.costs import calls_of

MANY = 20 * CANCELLED_MAX
#: Function calls of one cancellation: some for each entry that it examines.
CALLS_MAX = 10 * SORTED_OUT_AT_ONCE


def run_all(schedule: Schedule, now_ms: int) -> int:
    """Run all due actions. Return the number of calls that this needed."""
    calls = 0
    while schedule.next_ms is not None and schedule.next_ms <= now_ms:
        schedule.run(now_ms, CANCELLED_MAX, Allowance(MANY))
        calls += 1
    return calls


def test_cancelled_actions_are_removed_a_few_at_a_time_and_the_others_run_in_order() -> None:
    schedule, told = Schedule(), list[int]()
    due = random.Random(1).sample(range(MANY), MANY)
    actions = {due_ms: schedule.cancellable(due_ms, told.append, due_ms) for due_ms in due}
    longest = 0
    for due_ms in due[: MANY * 4 // 5]:
        longest = max(longest, calls_of(actions.pop(due_ms).cancel))
    assert longest < CALLS_MAX
    assert len(schedule) < MANY * 3 // 5
    schedule.at(MANY, told.append, MANY)
    assert schedule.next_ms is not None
    assert schedule.next_ms <= min(actions)
    run_all(schedule, MANY)
    assert told == [*sorted(actions), MANY]
    assert len(schedule) == 0


def test_cancelled_actions_that_are_due_count_as_work_of_a_turn() -> None:
    schedule, told = Schedule(), list[int]()
    for action in [schedule.cancellable(number, told.append, number) for number in range(MANY)][: MANY // 2 - 1]:
        action.cancel()
    assert run_all(schedule, MANY) >= MANY // CANCELLED_MAX
    assert told == [*range(MANY // 2 - 1, MANY)]
