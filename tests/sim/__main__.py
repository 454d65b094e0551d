"""Run the simulation from the command line.

python -m tests.sim SEED          one run, with everything that happened in it
python -m tests.sim SEED COUNT    that many runs; prints the verdict on each run with anomalies
python -m tests.sim record        search a seed for each planted fault, and write the seeds and the table of the documentation
"""

from __future__ import annotations

import multiprocessing
import sys

from tests.sim.simulation import Simulation
from tests.simulation import planting


def main(arguments: list[str]) -> int:
    """Return exit code 1 where an anomaly was found, or a planted fault was not."""
    if arguments == ["record"]:
        return record()
    seed, count = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 1
    bad = 0
    for each in range(seed, seed + count):
        simulation = Simulation(each, trace=count == 1)
        tally = simulation.run()
        bad += bool(tally.anomalies)
        if count == 1:
            sys.stdout.write("\n".join(simulation.world.trace or ()) + "\n")
        if count == 1 or tally.anomalies:
            sys.stdout.write(f"seed {each}: {tally}\n")
    sys.stdout.write(f"{count} runs, {bad} with anomalies\n")
    return 1 if bad else 0


def record() -> int:
    """Keep the recorded seeds that still show their fault, and search for the others."""
    rows = planting.rows()
    found: dict[str, int | None] = {}
    with multiprocessing.Pool() as pool:
        for row, seed in zip(rows, pool.imap(_recorded_seed, range(len(rows))), strict=True):
            found[row.name] = seed
            sys.stdout.write(f"{row.name}: {'not found' if seed is None else f'seed {seed}'}\n")
    planting.record(found)
    return 1 if None in found.values() else 0


def _recorded_seed(place: int) -> int | None:
    return planting.recorded_seed(planting.rows()[place])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
