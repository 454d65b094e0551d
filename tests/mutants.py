"""``python -m tests.mutants``: change the code in a random sample of places, and report the changes that the fast tests miss.

mutmut makes the mutants and runs the tests that reach each of them (``[tool.mutmut]`` in pyproject.toml). A mutant that no test finds is
either harmless (another text of an error, a longer timeout), found only by a scenario, or a gap in the tests. ``--list FILE`` writes the
survivors.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

MUTANTS: Final = Path("mutants")
OUTPUT: Final = Path("artifacts/mutmut.log")
#: mutmut's exit codes of a mutant's tests: 0 they pass, 1 or 3 they fail, 5 or 33 no test reaches it; others are timeouts and crashes.
SURVIVED: Final = 0
UNREACHED: Final = frozenset({5, 33})
#: A module with few mutants: its run makes all the mutants and learns which tests reach which function.
FIRST: Final = "bascule.adapter.inbound.deliveries*"


class MutmutFailed(Exception):
    """Raised if mutmut has not tested the mutants."""


def run_mutmut(names: Sequence[str], processes: int) -> None:
    """Run mutmut for these mutants; its output is in ``OUTPUT``. Raises MutmutFailed. Mutants that no test finds are no failure."""
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(processes), *names]
    OUTPUT.parent.mkdir(exist_ok=True)
    with OUTPUT.open("w") as output:
        done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise MutmutFailed(f"mutmut ended with {done.returncode}: a test fails without any mutant, or no mutant was made; see {OUTPUT}")


def mutants() -> Iterator[tuple[str, int | None]]:
    """Return the exit code of the tests of each mutant by its name; None for a mutant that has not been run."""
    for meta in sorted(MUTANTS.rglob("*.meta")):
        yield from json.loads(meta.read_text())["exit_code_by_key"].items()


def package_of(name: str) -> str:
    """Return the package of the product that a mutant is in: the second part of its dotted name."""
    return name.split(".")[1]


def main() -> int:
    """Run a sample, and print one line for each package. The exit code is 1 if the tests find fewer than the required share."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="Take N mutants (default: 1000).")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the sample (default: 1).")
    parser.add_argument("--processes", type=int, default=2, help="Run N mutants at once (default: 2).")
    parser.add_argument("--wanted", type=float, default=0.0, help="Fail when a smaller share is found (default: 0).")
    parser.add_argument("--list", type=Path, metavar="FILE", help="Write the names of the mutants that no test finds.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PACKAGE", help="Take mutants of this package only; may be repeated."
    )
    asked = parser.parse_args()

    try:
        run_mutmut([FIRST], asked.processes)
        names = sorted(name for name, _ in mutants() if not asked.only or package_of(name) in asked.only)
        sample = set(random.Random(asked.seed).sample(names, min(asked.count, len(names))))
        run_mutmut(sorted(sample), asked.processes)
    except MutmutFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    results = {name: code for name, code in mutants() if name in sample}
    survivors = sorted(name for name, code in results.items() if code == SURVIVED or code in UNREACHED)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, code in results.items():
        found = "not run" if code is None else "survived" if code == SURVIVED else "unreached" if code in UNREACHED else "found"
        counts[package_of(name)][found] += 1
    total = sum(counts.values(), Counter[str]())
    for package, count in (*sorted(counts.items()), ("all", total)):
        print(f"{package:10} " + ", ".join(f"{count[each]} {each}" for each in ("found", "survived", "unreached", "not run")))
    if asked.list is not None:
        asked.list.write_text("".join(f"{name}\n" for name in survivors))
    judged = total["found"] + len(survivors)
    return 0 if judged and total["found"] / judged >= asked.wanted and not total["not run"] else 1


if __name__ == "__main__":
    sys.exit(main())
