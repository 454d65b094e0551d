"""Which modules the compiled build compiles, and how a program learns which build runs."""

from __future__ import annotations

import ast
import importlib.util
import runpy
from pathlib import Path

import pytest

import bascule
from bascule.core.build import build

ROOT = Path(__file__).parents[3]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
#: Frozen dataclasses that are compiled because each message goes through their modules. They never leave the broker's process.
NEVER_PICKLED = {"bascule.broker.addresses": {"Diverts"}, "bascule.server.usage": {"UsageLimits"}}
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


@pytest.mark.parametrize("module", COMPILED)
def test_compiled_module_has_no_frozen_dataclass_that_may_be_pickled(module: str) -> None:
    # A compiled class restores a pickled object by assignments, which a frozen dataclass refuses.
    frozen = {node.name for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef) and any(map(is_frozen, node.decorator_list))}
    assert frozen == NEVER_PICKLED.get(module, set())


def tree(module: str) -> ast.Module:
    """Return the syntax tree of a module of the product."""
    return ast.parse((ROOT / "src" / f"{module.replace('.', '/')}.py").read_text())


def is_frozen(decorator: ast.expr) -> bool:
    """Return whether a decorator makes a frozen dataclass."""
    return isinstance(decorator, ast.Call) and any(keyword.arg == "frozen" for keyword in decorator.keywords)
