"""Each planted fault shows from its recorded seed, and not without the fault; a search finds all of them again."""

from __future__ import annotations

import enum
import importlib
import pkgutil
from typing import Final

import pytest

import bascule
from tests.simulation.planting import DOCUMENT, HISTORIES_MAX, Planted, documented, recorded, rows

ROWS = rows()
#: Faults that copy an object of a class that cannot be copied on a compiled build.
COPYING: Final = frozenset({"RequestViolation.TRANSACTION_STAYS"})
CASES = [pytest.param(row, id=row.name, marks=[pytest.mark.interpreted] if row.name in COPYING else []) for row in ROWS]
#: The anomalies of runs without a fault, by course and seed.
WITHOUT_FAULT: Final[dict[tuple[object, ...], set[str]]] = {}
SEARCH_TIMEOUT_S = 900
#: The simulation does not find these within ``HISTORIES_MAX``; unit tests check their rules.
WITHOUT_ROW: Final = frozenset(
    {
        "BranchViolation.ENDED_STILL_COUNT",
        "DatabaseViolation.IDS_ARE_TEXT",
        "DatabaseViolation.READ_ONLY_IS_PREPARED",
        "DuplicateViolation.SHORTENED_TO_NOTHING",
        "DuplicateViolation.UNUSED_BY_WALL_CLOCK",
        "LineageViolation.FORMER_LEADER_ASKED",
        "LineageViolation.LEADER_NOT_CONFIRMED",
        "LineageViolation.POSITION_NOT_CHECKED",
        "LineageViolation.RECORDS_NOT_COMPARED",
        "PlanViolation.REMOVED_DECIDER_IGNORED",
        "RecoveryViolation.PARTIAL_ROLLBACK_COUNTS",
        "RecoveryViolation.ROLLBACK_BESIDE_SILENCE",
        "RetryViolation.IN_DOUBT_IS_REPEATED",
        "TwoPhaseViolation.INTERRUPT_IS_NO_END",
        "IngressTailViolation.STALE_END_BELIEVED",
        "IngressTailViolation.VIEW_NOT_CHECKED",
        "LineageViolation.GROWTH_NOT_CHECKED",
        "LineageViolation.STALE_END_BELIEVED",
        "ReadingViolation.UNKNOWN_OFFSET_TRUSTED",
        "RequestViolation.LIST_UNSTORED",
    }
)


def violations() -> set[str]:
    """Return the names of all violations that the product can be told to commit."""
    names = [each.name for each in pkgutil.walk_packages(bascule.__path__, "bascule.") if not each.name.endswith("__main__")]
    kinds = {kind for name in names for kind in vars(importlib.import_module(name)).values() if isinstance(kind, type)}
    violations = [kind for kind in kinds if issubclass(kind, enum.Enum) and kind.__name__.endswith("Violation")]
    return {f"{kind.__name__}.{member.name}" for kind in violations for member in kind}


def without_fault(row: Planted, seed: int) -> set[str]:
    """Return the anomalies of a seed without the fault, from an earlier run if another row has had the same one."""
    place = row.course, seed
    if place not in WITHOUT_FAULT:
        WITHOUT_FAULT[place] = row.run(seed, violated=False).names
    return WITHOUT_FAULT[place]


@pytest.mark.parametrize("row", CASES)
def test_recorded_seed_shows_the_planted_fault_and_no_anomaly_without_the_fault(row: Planted) -> None:
    seed = recorded().get(row.name)
    assert seed is not None, "no seed is recorded: run `python -m tests.sim record`"
    found = row.run(seed).names
    assert not found.isdisjoint(row.anomalies), f"seed {seed} shows {sorted(found)}: run `python -m tests.sim record`"
    assert without_fault(row, seed) == set()


@pytest.mark.slow
@pytest.mark.timeout(SEARCH_TIMEOUT_S)
@pytest.mark.parametrize("row", CASES)
def test_search_finds_the_planted_fault(row: Planted) -> None:
    assert row.search(first=100_000) is not None, f"not found within {HISTORIES_MAX} histories"


def test_violations_are_distinct() -> None:
    assert len({row.violation.value for row in ROWS}) == len(ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_documentation_lists_the_planted_faults() -> None:
    text = DOCUMENT.read_text()
    assert text == documented(text), "run `python -m tests.sim record`"


def test_every_violation_of_the_product_has_a_row_or_is_listed_as_without_row() -> None:
    with_row = {row.name for row in ROWS}
    assert violations() - with_row == WITHOUT_ROW
    assert with_row <= violations()
    assert all(f"`{name}`" in DOCUMENT.read_text() for name in WITHOUT_ROW)
