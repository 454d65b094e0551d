"""The benchmarks of guaranteed limits report a limit that was exceeded."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> ModuleType:
    """Return the benchmark with the name of the parameter."""
    return importlib.import_module(f"bench.{request.param}")


@pytest.mark.parametrize("bench", ["steady"], indirect=True)
def test_value_that_grows_from_first_to_last_third_is_not_flat(bench: ModuleType) -> None:
    steady = dict.fromkeys(bench.FLAT, 100.0)
    assert steady
    for name, slack in bench.FLAT.items():
        for last, flat in ((110.0 + slack, True), (111.0 + slack, False)):
            judged = bench.judge([*(6 * [steady]), *(3 * [{**steady, name: last}])])
            assert [each for each, of in judged.items() if not of["flat"]] == ([] if flat else [name])


@pytest.mark.parametrize("bench", ["steady"], indirect=True)
def test_start_that_takes_longer_at_the_end_is_not_flat(bench: ModuleType) -> None:
    young, old = {"start_s": 5.0, "start_cpu_s": 2.0}, {"start_s": 7.0, "start_cpu_s": 2.0}
    judged = bench.judge_starts([young] * bench.KILLS + [old] * bench.KILLS)
    assert {name: each["flat"] for name, each in judged.items()} == {"start_s": False, "start_cpu_s": True}
