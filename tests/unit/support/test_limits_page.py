"""The page of limits is what the code says."""

from __future__ import annotations

import pytest

from tests.support.limits_page import LIMITS, OTHERS, PAGE, Limit, constants, page, reason, shown

ROWS = [limit for limits in LIMITS.values() for limit in limits]


def test_the_page_is_made_from_the_constants_of_today() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.support.limits_page`"


def test_each_constant_that_is_a_limit_is_on_the_page_or_bounds_no_peer() -> None:
    listed = {f"{limit.module}.{limit.constant}" for limit in ROWS}
    assert set(constants()) - listed - set(OTHERS) == set()
    assert set(OTHERS) - set(constants()) == set()


@pytest.mark.parametrize("limit", ROWS, ids=lambda limit: f"{limit.module}.{limit.constant}")
def test_each_limit_has_a_reason(limit: Limit) -> None:
    assert reason(limit.module, limit.constant)


def test_values_are_shown_with_units_that_people_use() -> None:
    assert [shown(64 << 20, "bytes"), shown(32, "bytes"), shown(0.0625, "%"), shown(10_000, ""), shown(0.1, "s")] == [
        "64 MiB", "32 bytes", "6.25 %", "10,000", "0.1 s",
    ]  # fmt: skip
