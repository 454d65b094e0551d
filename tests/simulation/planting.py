"""Faults that are planted in the simulation, and how many runs it may take to find them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.simulation import Parts, Simulation

#: A planted fault must show within so many runs.
PLANTED_SEEDS = 150

Plant = Callable[[pytest.MonkeyPatch], Parts]


def not_found(parts: Parts, names: set[str]) -> set[str]:
    """Those of the anomalies that no run shows."""
    missing = set(names)
    seed = 0
    while missing and seed < PLANTED_SEEDS:
        seed += 1
        missing -= Simulation(seed, parts).run().names
    return missing
