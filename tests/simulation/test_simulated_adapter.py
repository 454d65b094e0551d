"""Members of an adapter's group are killed and stopped, and their log is compacted: each record is delivered; in transactions, once."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from bascule.adapter.inbound.taking_over import PARTITION_STATES, PartitionEvent, PartitionState
from tests.sim.adapter import InboundSimulation

#: Number of seeds of one test.
SEEDS: Final = 100


@pytest.mark.parametrize("first", range(1, 1 + 5 * SEEDS, SEEDS))
def test_simulated_members_handle_each_record_and_exactly_once_in_transactions(first: int) -> None:
    for seed in range(first, first + SEEDS):
        tally = InboundSimulation(seed).run()
        assert not tally.names, f"seed {seed}: {tally}"


def test_seed_repeats_its_run_of_the_simulated_adapter() -> None:
    one, other = InboundSimulation(7, trace=True), InboundSimulation(7, trace=True)
    one.run()
    other.run()
    assert one.world.trace == other.world.trace


def test_adapter_simulation_covers_every_fault_and_partition_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    monkeypatch.setattr(PARTITION_STATES, "taken", Counter())
    for seed in range(1, 200):
        run = InboundSimulation(seed)
        run.run()
        seen.update(run.world.seen)
    assert {
        "kill member", "stop member", "rebalance", "set group back", "compact", "finish claim", "recover claim", "read log anew",
        "fail stored append", "fail endpoint", "retry record", "dead-letter record", "doubt",
    } <= seen  # fmt: skip
    assert PARTITION_STATES.taken is not None
    # Only a member that restarts after a stop can lose a partition twice.
    assert set(PARTITION_STATES) - set(PARTITION_STATES.taken) == {(PartitionState.GONE, PartitionEvent.LEFT)}
