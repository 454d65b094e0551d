"""The page of limits agrees with the code."""

from __future__ import annotations

import pytest

from tests.support.limits_page import LIMITS, OTHERS, PAGE, Limit, constants, page, reason, shown

ROWS = [limit for limits in LIMITS.values() for limit in limits]


def test_limits_page_equals_the_generated_page() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.support.limits_page` to regenerate the page"


def test_each_limit_constant_is_listed_or_bounds_no_peer() -> None:
    listed = {f"{limit.module}.{limit.constant}" for limit in ROWS}
    assert set(constants()) - listed - set(OTHERS) == set()
    assert set(OTHERS) - set(constants()) == set()


@pytest.mark.parametrize("limit", ROWS, ids=lambda limit: f"{limit.module}.{limit.constant}")
def test_each_limit_has_a_reason(limit: Limit) -> None:
    assert reason(limit.module, limit.constant)


def test_limit_values_are_shown_with_readable_units() -> None:
    assert [shown(64 << 20, "bytes"), shown(32, "bytes"), shown(0.0625, "%"), shown(10_000, ""), shown(0.1, "s")] == [
        "64 MiB", "32 bytes", "6.25 %", "10,000", "0.1 s",
    ]  # fmt: skip
