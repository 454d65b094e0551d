"""Transactions over Kafka and a database end as decided, whatever fails, and the runs meet each kind of failure."""

from __future__ import annotations

from typing import Final

import pytest

from tests.sim.branches import BranchSimulation

#: Number of seeds of one test.
SEEDS: Final = 200


@pytest.mark.parametrize("first", range(1, 1 + 5 * SEEDS, SEEDS))
def test_messages_and_rows_exist_if_and_only_if_their_transaction_committed(first: int) -> None:
    for seed in range(first, first + SEEDS):
        tally = BranchSimulation(seed).run()
        assert not tally.names, f"seed {seed}: {tally}"


def test_seed_repeats_its_run_of_the_simulated_branches() -> None:
    one, other = BranchSimulation(7, trace=True), BranchSimulation(7, trace=True)
    one.run()
    other.run()
    assert one.world.trace == other.world.trace


def test_branch_simulation_covers_every_fault_and_outcome() -> None:
    seen: set[str] = set()
    told: set[str | None] = set()
    for seed in range(1, 80):
        run = BranchSimulation(seed)
        run.run()
        seen.update(run.world.seen)
        told.update(work.told for work in run.works.values())
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
