"""Transactions over Kafka and a database end as decided, whatever fails, and the runs meet each kind of failure."""

from __future__ import annotations

from functools import cache
from typing import Final

import pytest

from tests.sim.branches import BranchSimulation

#: Number of seeds of one test.
SEEDS: Final = 100
USUAL: Final = range(1, 1 + 8 * SEEDS, SEEDS)
MORE: Final = range(USUAL.stop, USUAL.stop + 20 * SEEDS, SEEDS)


@cache
def covered(first: int) -> tuple[frozenset[str], frozenset[str | None]]:
    """Check the seeds from ``first`` on. Return the troubles that they have seen, and what applications were told."""
    seen: set[str] = set()
    told: set[str | None] = set()
    for seed in range(first, first + SEEDS):
        run = BranchSimulation(seed)
        tally = run.run()
        assert not tally.names, f"seed {seed}: {tally}"
        seen.update(run.world.seen)
        told.update(work.told for work in run.works.values())
    return frozenset(seen), frozenset(told)


@pytest.mark.parametrize("first", [*USUAL, *(pytest.param(first, marks=pytest.mark.slow) for first in MORE)])
def test_messages_and_rows_exist_if_and_only_if_their_transaction_committed(first: int) -> None:
    covered(first)


def test_seed_repeats_its_run_of_the_simulated_branches() -> None:
    one, other = BranchSimulation(7, trace=True), BranchSimulation(7, trace=True)
    one.run()
    other.run()
    assert one.world.trace == other.world.trace


def test_branch_simulation_covers_every_fault_and_outcome() -> None:
    seen, told = covered(1)
    assert {
        "kill manager",
        "stop manager",
        "trim branches",
        "compact",
        "end open transaction",
        "read from former leader",
        "hold up EndTxn",
        "expire transaction",
        "move coordinator",
        "unknown offset",
    } <= seen
    assert {"committed", "rolled back", "in doubt", None} <= told
