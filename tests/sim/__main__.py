"""Run the simulation from the command line.

python -m tests.sim SEED                  one run, with everything that happened in it
python -m tests.sim SEED COUNT            that many runs: which show anomalies, and what they have covered
python -m tests.sim SEED --seconds N      as many runs as take N seconds
python -m tests.sim record                search a seed for each planted fault; write the seeds and the table of the documentation
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys

from tests.sim.runs import run_seeds
from tests.sim.simulation import Simulation
from tests.simulation import planting


def main(arguments: list[str]) -> int:
    """Run the command, and return exit code 1 if an anomaly was found, or a planted fault was not."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", help="the seed of the first run, or the word record")
    parser.add_argument("count", nargs="?", type=int, help="the number of runs")
    parser.add_argument("--seconds", type=float, help="how long to begin more runs")
    chosen = parser.parse_args(arguments)
    if chosen.seed == "record":
        return record()
    seed = int(chosen.seed)
    if chosen.count is None and chosen.seconds is None:
        return tell(seed)
    report = run_seeds(seed, chosen.count, seconds=chosen.seconds)
    for bad, anomalies in report.bad.items():
        sys.stdout.write(f"seed {bad}: {anomalies}\n")
    sys.stdout.write("\n".join(report.lines()) + "\n")
    return 1 if report.bad else 0


def tell(seed: int) -> int:
    """Run one seed and print what happened in it."""
    simulation = Simulation(seed, trace=True)
    tally = simulation.run()
    sys.stdout.write("\n".join(simulation.world.trace or ()) + f"\nseed {seed}: {tally}\n")
    return 1 if tally.anomalies else 0


def record() -> int:
    """Keep the recorded seeds that still show their fault, and search seeds for the others."""
    known = planting.recorded()
    found: dict[str, int | None] = {}
    with multiprocessing.Pool(initializer=logging.disable) as pool:
        tasks = [(place, known.get(row.name)) for place, row in enumerate(planting.rows())]
        for name, seed in pool.imap_unordered(_recorded_seed, tasks):
            found[name] = seed
            planting.record(found)
            sys.stdout.write(f"{name}: {'not found' if seed is None else f'seed {seed}'}\n")
            sys.stdout.flush()
    return 1 if None in found.values() else 0


def _recorded_seed(task: tuple[int, int | None]) -> tuple[str, int | None]:
    place, known = task
    row = planting.rows()[place]
    return row.name, planting.recorded_seed(row, known)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
