"""The page of the public API has the names that the package exports, and no others."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import bascule
from tests.unit.core.test_extras import NEED_EXTRA, ROOT

PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()


def test_api_page_lists_each_public_name_once() -> None:
    section = PAGE.split("## Names of `bascule`")[1].split("## Modules")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)] + re.findall(r"^`(\w+)` is", section, re.MULTILINE)
    assert sorted(listed) == sorted(bascule.__all__)


@pytest.mark.parametrize(("module", "names"), [(module, names) for module, _, names in NEED_EXTRA])
def test_public_module_has_the_names_of_the_page(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert [each for each in names if not hasattr(found, each)] == []
    assert sorted(getattr(found, "__all__", names)) == sorted(names)


def test_type_checkers_see_all_names_that_the_package_exports() -> None:
    tree = ast.parse(Path(bascule.__file__).read_bytes())
    typed = {alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    typed = {name: home for name, home in typed.items() if (home or "").startswith("bascule.")}
    assert typed == bascule._HOMES
    assert sorted([*typed, "__version__"]) == bascule.__all__
    assert {name: getattr(bascule, name) for name in typed} == {
        name: getattr(importlib.import_module(home or ""), name) for name, home in typed.items()
    }
