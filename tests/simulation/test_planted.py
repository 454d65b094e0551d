"""Each planted fault shows from its recorded seed, and not without the fault; a search finds all of them anew."""

from __future__ import annotations

import pytest

from tests.simulation.planting import DOCUMENT, HISTORIES_MAX, Planted, documented, recorded, rows

ROWS = rows()
SEARCH_TIMEOUT_S = 900


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_recorded_seed_shows_the_planted_fault_and_nothing_without_it(row: Planted) -> None:
    seed = recorded().get(row.name)
    assert seed is not None, "no seed is recorded: run `python -m tests.sim record`"
    found = row.run(seed).names
    assert not found.isdisjoint(row.anomalies), f"seed {seed} shows {sorted(found)}: run `python -m tests.sim record`"
    assert row.run(seed, violated=False).names == set()


@pytest.mark.slow
@pytest.mark.timeout(SEARCH_TIMEOUT_S)
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_search_finds_the_planted_fault(row: Planted) -> None:
    assert row.search(first=100_000) is not None, f"not found within {HISTORIES_MAX} histories"


def test_violations_are_distinct() -> None:
    assert len({row.violation.value for row in ROWS}) == len(ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_documentation_lists_the_planted_faults() -> None:
    text = DOCUMENT.read_text()
    assert text == documented(text), "run `python -m tests.sim record`"
