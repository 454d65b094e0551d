"""``python -m tests.soak``: run a soak and write its report. The exit code tells whether every promise was kept."""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import time
from pathlib import Path

from tests.soak.plan import FAULT_EVERY_S, KINDS, Plan
from tests.soak.report import write_report
from tests.soak.run import soak

DEFAULT = Plan(seed=0)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=DEFAULT.seconds, help="duration of the load (default: %(default)g)")
    parser.add_argument("--faults", type=int, help=f"least number of faults (default: one every {FAULT_EVERY_S:g} s)")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 32), help="seed of the faults (default: a random one, which is printed)"
    )
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="kind of faults to inject; may be repeated (default: all)")
    parser.add_argument(
        "--pause-max-s", type=float, default=DEFAULT.pause_max_s, help="longest suspension by SIGSTOP (default: %(default)g)"
    )
    parser.add_argument("--rate", type=int, default=DEFAULT.rate, help="messages per second of each sender (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=Path("artifacts", "soak"), help="directory of the report (default: %(default)s)")
    options = parser.parse_args()
    plan = Plan(
        seed=options.seed,
        seconds=options.seconds,
        faults=options.faults or round(options.seconds / FAULT_EVERY_S),
        kinds=tuple(options.kind or KINDS),
        pause_max_s=options.pause_max_s,
        rate=options.rate,
    )
    sys.stdout.write(f"seed {plan.seed}\n")
    run = options.report / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    logging.basicConfig(filename=run / "clients.log", format="%(asctime)s %(message)s")
    result = soak(plan, run, tell)
    page = write_report(result, options.report)
    tell(f"{result.tally}")
    for each in result.faulted:
        tell(each)
    tell(f"report: {page}")
    if result.good:
        shutil.rmtree(run)
    else:
        tell(f"FAILED. Seed {plan.seed}; logs and histories: {run}")
    return 0 if result.good else 1


def tell(text: str) -> None:
    """Print a line with the time on standard output."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
