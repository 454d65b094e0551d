"""The table of the benchmark of groups."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.config.load import settings_of_text
from bench.groups import DIVERTS, GROUPS, config, growing_share, page


def run(rate: float, pipelines_us: float) -> dict[str, Any]:
    cpu_us = {"pipelines": pipelines_us, "Kafka": 20.0}
    return {"records_per_s": rate, "cpu_us": cpu_us, "cpu_s_of_all": (pipelines_us + 20) / 10, "lost": 0, "duplicated": 0}


RESULTS = {1: [run(10_000, 80), run(12_000, 100)], 4: [run(9_900, 160), run(9_900, 180)]}


def test_table_has_rates_processor_time_and_the_share_that_grows_with_the_groups() -> None:
    lines = page(RESULTS, 100_000).splitlines()
    assert [cell.strip() for cell in lines[-3].split("|")[1:-1]] == [
        "4", "9,900 (9,900 to 9,900)", "170 (160 to 180)", "20 (20 to 20)", "19.0 (18.0 to 20.0)", "0.90", "0", "0",
    ]  # fmt: skip
    assert lines[-1].startswith("Each further group adds 30 % of the processor time of one group")
    assert growing_share(RESULTS) == pytest.approx(0.8 / 0.9 / 3)
    assert growing_share({1: RESULTS[1]}) is None


@pytest.mark.parametrize("groups", GROUPS)
def test_each_number_of_groups_has_the_same_diverts(groups: int) -> None:
    diverts = settings_of_text(config(groups).replace("{prefix}", "p"), "bascule.toml").divert
    assert [(divert.from_address, divert.to) for divert in diverts] == [(f"a{number}", f"p.out{number}") for number in range(DIVERTS)]
    assert len({divert.group for divert in diverts}) == groups
