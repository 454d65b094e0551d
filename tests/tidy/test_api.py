"""The page of the public API has the names that the package exports, and no others."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import bascule
from tests.examples.pages import blocks, pages
from tests.unit.core.test_extras import NEED_EXTRA, ROOT

PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()
#: Modules without an extra, and their public names.
FOR_AUTHORS = [
    (module, re.findall(r"`(\w+)`", names))
    for module, names in re.findall(r"^\| `(bascule[\w.]*)` \| (`\w+`[^|]*) \|$", PAGE, re.MULTILINE)
    if module not in {module for module, _, _ in NEED_EXTRA}
]
PUBLIC = {"bascule": set(bascule.__all__)}
PUBLIC |= {module: set(names) for module, names in [*((module, names) for module, _, names in NEED_EXTRA), *FOR_AUTHORS]}
#: Pages about the code itself.
INTERNAL = (ROOT / "docs" / "internals", ROOT / "docs" / "adr")


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


@pytest.mark.parametrize(("module", "names"), FOR_AUTHORS)
def test_module_for_authors_of_resources_has_the_names_of_the_page(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert [each for each in names if not hasattr(found, each)] == []


def programs() -> dict[str, str]:
    """The Python programs that users read and copy: the examples, and the blocks of the pages."""
    files = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "examples").glob("*.py")}
    shown = [page for page in pages() if not any(page.is_relative_to(folder) for folder in INTERNAL)]
    return files | {
        f"{page.relative_to(ROOT)}:{block.line}": re.sub(r"^(>>>|\.\.\.) ?", "", block.text, flags=re.MULTILINE)
        for page in shown
        for block in blocks(page)
        if block.language == "python"
    }


def not_public(program: str) -> list[str]:
    """The imports of a program that the page of the public API does not have."""
    found = re.findall(r"^ *from (bascule(?:\.\w+)*) import (\([^)]*\)|[^\n#]*)", program, re.MULTILINE)
    return [f"{module}.{name}" for module, names in found for name in re.findall(r"\w+", names) if name not in PUBLIC.get(module, ())]


@pytest.mark.parametrize("program", programs().values(), ids=programs())
def test_program_for_users_imports_public_names_only(program: str) -> None:
    assert not_public(program) == []


def test_import_of_a_name_that_is_not_public_is_found() -> None:
    assert not_public("from bascule.client import Queue\nfrom bascule import Queue, Rope") == ["bascule.client.Queue", "bascule.Rope"]


def test_type_checkers_see_all_names_that_the_package_exports() -> None:
    tree = ast.parse(Path(bascule.__file__).read_bytes())
    typed = {alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    typed = {name: home for name, home in typed.items() if (home or "").startswith("bascule.")}
    assert typed == bascule._HOMES
    assert sorted([*typed, "__version__"]) == bascule.__all__
    assert {name: getattr(bascule, name) for name in typed} == {
        name: getattr(importlib.import_module(home or ""), name) for name, home in typed.items()
    }
