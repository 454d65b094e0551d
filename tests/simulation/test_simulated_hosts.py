"""Transactions on one host are in all of their databases or in none, whatever fails, and the runs meet each kind of failure."""

from __future__ import annotations

from functools import cache
from typing import Final

import pytest

from tests.sim.hosts import HostSimulation

#: Number of seeds of one test.
SEEDS: Final = 60
USUAL: Final = range(1, 1 + 5 * SEEDS, SEEDS)
MORE: Final = range(USUAL.stop, USUAL.stop + 20 * SEEDS, SEEDS)


@cache
def covered(first: int) -> tuple[frozenset[str], frozenset[str | None]]:
    """Check the seeds from ``first`` on. Return the troubles that they have seen, and what applications were told."""
    seen: set[str] = set()
    told: set[str | None] = set()
    for seed in range(first, first + SEEDS):
        run = HostSimulation(seed)
        tally = run.run()
        assert not tally.names, f"seed {seed}: {tally}"
        seen.update(run.world.seen)
        told.update(work.told for work in run.works)
    return frozenset(seen), frozenset(told)


@pytest.mark.parametrize("first", [*USUAL, *(pytest.param(first, marks=pytest.mark.slow) for first in MORE)])
def test_rows_are_in_all_databases_if_and_only_if_their_transaction_committed(first: int) -> None:
    covered(first)


def test_seed_repeats_its_run_of_the_simulated_hosts() -> None:
    one, other = HostSimulation(7, trace=True), HostSimulation(7, trace=True)
    one.run()
    other.run()
    assert one.world.trace == other.world.trace


def test_host_simulation_covers_every_fault_and_outcome() -> None:
    seen, told = covered(1)
    assert {
        "kill manager",
        "stop manager",
        "lose database",
        "lose verdict",
        "hold up statement",
        "remove log",
        "write late",
        "doubt",
    } <= seen
    assert {"committed", "rolled back", "in doubt", None} <= told
