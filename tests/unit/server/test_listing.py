"""Parts of sorted lists: right for any offset, and sorted without holding the interpreter for long."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bascule.server.listing import SORTED_AT_ONCE, ListColumns, PartRequest, _cut

COLUMNS = ListColumns(("name", "number"), ("name",))
KEYS = {"name": "name", "number": "number"}
MANY = 5 * SORTED_AT_ONCE + 7


def part(rows: list[Any], sort: str, offset: int, limit: int = 50, *, descending: bool = False) -> list[int]:
    return _cut(rows, PartRequest("", sort, descending, offset, limit), COLUMNS, KEYS)[0]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("offset", [0, 949, 950, 951, 2_500, MANY - 10, MANY, 999_999_999])
def test_part_at_any_offset_is_that_of_the_sorted_list(offset: int, descending: bool) -> None:
    chance = random.Random(offset)
    rows: list[dict[str, Any]] = [{"name": f"q{number}", "number": chance.randrange(100)} for number in range(MANY)]
    expected = sorted(range(MANY), key=lambda place: rows[place]["number"], reverse=descending)[offset : offset + 50]
    assert part(rows, "number", offset, descending=descending) == expected


@pytest.mark.parametrize("offset", [0, 2_500, 999_999_999])
def test_sort_of_a_long_list_lets_other_threads_run_after_a_few_comparisons(offset: int) -> None:
    compared = longest = 0

    class Name(str):
        def __lt__(self, other: str) -> bool:
            nonlocal compared, longest
            compared += 1
            longest = max(longest, compared)
            return str.__lt__(self, other)

    class Row(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            nonlocal compared
            compared = 0  # Python code runs: another thread may run, too
            return super().__getitem__(key)

    rows = [Row(name=Name(f"q{number * 7919 % MANY}"), number=number) for number in range(MANY)]
    part(rows, "name", offset)
    assert longest <= 15 * SORTED_AT_ONCE  # of a sort of all: MANY * log2(MANY), 60,000
