"""Members of an adapter's group are killed and stopped, and their log is compacted: each record is delivered; in transactions, once."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Final

import pytest

from bascule.adapter.inbound.taking_over import PARTITION_STATES, PartitionEvent, PartitionState
from tests.sim.adapter import InboundSimulation

#: Number of seeds of one test.
SEEDS: Final = 50
USUAL: Final = range(1, 1 + 10 * SEEDS, SEEDS)
MORE: Final = range(USUAL.stop, USUAL.stop + 20 * SEEDS, SEEDS)
Transition = tuple[PartitionState, PartitionEvent]


@cache
def covered(first: int) -> tuple[frozenset[str], frozenset[Transition]]:
    """Check the seeds from ``first`` on. Return the troubles and the transitions of partitions that they have seen."""
    seen: set[str] = set()
    PARTITION_STATES.taken = taken = Counter[Transition]()
    try:
        for seed in range(first, first + SEEDS):
            run = InboundSimulation(seed)
            tally = run.run()
            assert not tally.names, f"seed {seed}: {tally}"
            seen.update(run.world.seen)
    finally:
        PARTITION_STATES.taken = None
    return frozenset(seen), frozenset(taken)


@pytest.mark.parametrize("first", [*USUAL, *(pytest.param(first, marks=pytest.mark.slow) for first in MORE)])
def test_simulated_members_handle_each_record_and_exactly_once_in_transactions(first: int) -> None:
    covered(first)


def test_seed_repeats_its_run_of_the_simulated_adapter() -> None:
    one, other = InboundSimulation(7, trace=True), InboundSimulation(7, trace=True)
    one.run()
    other.run()
    assert one.world.trace == other.world.trace


def test_adapter_simulation_covers_every_fault_and_partition_transition() -> None:
    runs = [covered(first) for first in USUAL]
    assert {
        "kill member", "stop member", "rebalance", "set group back", "compact", "finish claim", "recover claim", "read log anew",
        "fail stored append", "fail endpoint", "retry record", "dead-letter record", "doubt",
    } <= {trouble for seen, _ in runs for trouble in seen}  # fmt: skip
    # Only a member that restarts after a stop can lose a partition twice.
    assert set(PARTITION_STATES) - {each for _, taken in runs for each in taken} == {(PartitionState.GONE, PartitionEvent.LEFT)}
