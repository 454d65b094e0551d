"""``python -m tests.sim SEED [COUNT]``: one run with everything that happened in it, or the verdicts on many."""

from __future__ import annotations

import sys

from tests.sim.simulation import Simulation


def main(arguments: list[str]) -> int:
    """Exit code 1 where an anomaly was found."""
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


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
