"""``python -m tests.branch_coverage``: print the share of branches that the fast tests take, by package and module.

It reads the report of ``coverage json`` (``make coverage`` runs both). ``[tool.coverage.run]`` in pyproject.toml names the packages. The
exit code is 1 if one of them has less than the required share.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REPORT: Final = Path("artifacts/coverage.json")
PRODUCT: Final = Path("src/bascule")


@dataclass(frozen=True)
class Branches:
    """The number of branches of a module or a package, and how many of them the tests take."""

    taken: int = 0
    total: int = 0

    def __add__(self, other: Branches) -> Branches:
        return Branches(self.taken + other.taken, self.total + other.total)

    @property
    def share(self) -> float:
        """Return the share of taken branches; 1.0 for a module without branches."""
        return self.taken / self.total if self.total else 1.0

    def __str__(self) -> str:
        return f"{self.share:7.1%} {self.total - self.taken:5} of {self.total:5} missing"


def modules(report: Mapping[str, Any]) -> dict[str, Branches]:
    """Return the branches of each module by its path below ``src/bascule``."""
    return {
        Path(path).relative_to(PRODUCT).as_posix(): Branches(file["summary"]["covered_branches"], file["summary"]["num_branches"])
        for path, file in report["files"].items()
    }


def packages(of_modules: Mapping[str, Branches]) -> dict[str, Branches]:
    """Return the sums of the modules of each package."""
    sums: dict[str, Branches] = {}
    for path, branches in of_modules.items():
        package = path.partition("/")[0]
        sums[package] = sums.get(package, Branches()) + branches
    return sums


def main() -> int:
    """Print a line for each module that has untaken branches, and one for each package."""
    parser = argparse.ArgumentParser(prog="python -m tests.branch_coverage", description=__doc__)
    parser.add_argument("--wanted", type=float, default=0.9, help="Fail when a package has a smaller share (default: 0.9).")
    parser.add_argument("report", type=Path, nargs="?", default=REPORT, help=f"The report of `coverage json` (default: {REPORT}).")
    asked = parser.parse_args()

    of_modules = modules(json.loads(asked.report.read_text()))
    of_packages = packages(of_modules)
    for path, branches in sorted(of_modules.items(), key=lambda each: (each[0].partition("/")[0], each[1].share)):
        if branches.taken < branches.total:
            print(f"{path:40} {branches}")
    print()
    for package, branches in sorted(of_packages.items()):
        print(f"{package:40} {branches}")
    short = [package for package, branches in sorted(of_packages.items()) if branches.share < asked.wanted]
    if short:
        print(f"error: fewer than {asked.wanted:.0%} of the branches are taken in: {', '.join(short)}", file=sys.stderr)
    return 1 if short or not of_packages else 0


if __name__ == "__main__":
    sys.exit(main())
