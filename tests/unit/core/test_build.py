"""Which modules the compiled build compiles, and how a program learns which build runs."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

import bascule
from bascule.core.build import build

ROOT = Path(__file__).parents[3]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
COMPILED = [Path(path).relative_to("src").with_suffix("").as_posix().replace("/", ".") for path in SETUP["modules"]()]


@pytest.mark.parametrize("module", COMPILED)
def test_build_names_how_each_module_of_the_engine_runs(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert build() == ("interpreted" if spec.origin.endswith(".py") else "compiled")


@pytest.mark.parametrize("module", sorted(SETUP["INTERPRETED"]))
def test_module_that_stays_interpreted_exists(module: str) -> None:
    assert (Path(bascule.__file__).parent / f"{module}.py").exists()
