"""Planted faults: each breaks one rule by a parameter, and the simulation must find it.

Every module ``tests/simulation/planted_*.py`` has a tuple ``PLANTED`` of rows. ``seeds.json`` records a seed that shows each row;
``python -m tests.sim record`` writes it, and the table of the documentation.
"""

from __future__ import annotations

import enum
import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.sim.simulation import Simulation
from tests.support.history import Tally

#: A planted fault must show within this number of histories.
HISTORIES_MAX: Final = 2_000
SEEDS: Final = Path(__file__).with_name("seeds.json")
DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "internals" / "simulation.md"
_TABLE: Final = re.compile(r"(<!-- planted faults -->\n).*?(<!-- end of planted faults -->)", re.DOTALL)


class Planted(NamedTuple):
    """One rule, broken.

    ``fault`` says for the documentation what the broken code does. At least one of ``anomalies`` must show. ``arrange`` changes a run after
    its weather is drawn, so that the fault shows sooner; it is called with the fault on and off.
    """

    violation: enum.StrEnum
    fault: str
    anomalies: tuple[str, ...]
    arrange: Callable[[Simulation], None] | None = None

    @property
    def name(self) -> str:
        """Return the name under which the seed is recorded."""
        return f"{type(self.violation).__name__}.{self.violation.name}"

    @property
    def course(self) -> tuple[object, ...]:
        """Return what decides about the run of a seed without the fault: rows of one course have the same runs."""
        return type(self), self.arrange

    def run(self, seed: int, *, violated: bool = True) -> Tally:
        """Run a seed with the fault, or without it, and return the verdict."""
        return Simulation(seed, violations=[self.violation] if violated else [], arrange=self.arrange).run()

    def shows(self, seed: int) -> bool:
        """Return whether a seed shows the fault, and nothing without it."""
        return not self.run(seed).names.isdisjoint(self.anomalies) and not self.run(seed, violated=False).names

    def search(self, first: int = 1, histories: int = HISTORIES_MAX) -> int | None:
        """Return the first seed that shows the fault, or None."""
        return next((seed for seed in range(first, first + histories) if self.shows(seed)), None)


def rows() -> tuple[Planted, ...]:
    """Return the planted faults of all areas."""
    areas = sorted(path.stem for path in Path(__file__).parent.glob("planted_*.py"))
    return tuple(row for area in areas for row in importlib.import_module(f"tests.simulation.{area}").PLANTED)


def recorded() -> Mapping[str, int]:
    """Return the recorded seed of each planted fault by its name."""
    seeds: dict[str, int] = json.loads(SEEDS.read_text())
    return seeds


def recorded_seed(row: Planted, known: int | None) -> int | None:
    """Return the recorded seed ``known`` if it still shows the fault, else search for another one."""
    return known if known is not None and row.shows(known) else row.search()


def record(found: Mapping[str, int | None]) -> None:
    """Write the seeds that were found so far, and the table of the documentation."""
    seeds = {name: seed for name, seed in sorted({**recorded(), **found}.items()) if seed is not None}
    SEEDS.write_text(json.dumps(seeds, indent=4) + "\n")
    DOCUMENT.write_text(documented(DOCUMENT.read_text()))


def documented(text: str) -> str:
    """Return a text of the documentation with the table as it should be."""
    lines = [f"| `{row.name}` | {row.fault} | {', '.join(f'`{name}`' for name in row.anomalies)} |" for row in rows()]
    table = "\n".join(("| violation | what the broken code does | shows as |", "| --- | --- | --- |", *lines))
    return _TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)
