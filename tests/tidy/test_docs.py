"""The documentation names only things that exist, and does not depend on anything outside the repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from bascule.cli.main import app
from tests.examples.pages import ROOT, pages
from tests.support.statements import statements

DOCS = ROOT / "docs"
#: Paths of a single machine, and pages outside of this repository.
ELSEWHERE = re.compile(r"(?<![\w.])/(work|tmp|root|home|Users)/|\bshared/|\bseeds?/|\banchors/|\bTODO\b|\bFIXME\b")
#: Text that a reader might type: shell blocks, settings with their comments, inline code, indented lines.
_CODE = re.compile(r"^```(?:sh|toml).*?^```$|(?<!`)`[^`\n]+`(?!`)|^ {4}[^\n]*$", re.MULTILINE | re.DOTALL)
_PROGRAM = re.compile(r"^```(?:python|java).*?^```$", re.MULTILINE | re.DOTALL)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=named)
def test_page_has_one_title_and_no_reference_to_private_paths(page: Path) -> None:
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1
    assert ELSEWHERE.findall(page.read_text()) == []


@pytest.mark.parametrize("page", pages(), ids=named)
def test_each_table_row_belongs_to_a_table_with_a_header(page: Path) -> None:
    blocks = re.findall(r"(?:^\|.*\n)+", prose(page), re.MULTILINE)
    assert [block for block in blocks if not re.match(r"\|.*\n(?:\| --- )+\|\n", block)] == []


@pytest.mark.parametrize("page", pages(), ids=named)
def test_link_to_a_heading_finds_the_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", prose(page))
    lost = [f"{file}#{heading}" for file, heading in links if heading not in anchors(page.parent / file if file else page)]
    assert lost == []


@pytest.mark.parametrize("page", pages(), ids=named)
def test_message_of_a_sequence_diagram_has_no_semicolon(page: Path) -> None:
    """Mermaid ends a statement of a sequence diagram at a semicolon, also within a text, and then draws nothing."""
    diagrams = re.findall(r"^```mermaid\nsequenceDiagram\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for diagram in diagrams for line in diagram.splitlines() if ";" in line] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [(page.parent / file).resolve() for file in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", prose(page))]
    assert [named(page) for page in pages() if page not in reached] == []


def options(group: Any, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield name, {"--help"}
            yield from options(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", {option for parameter in command.params for option in parameter.opts} | {"--help"}


COMMANDS = dict(options(typer.main.get_command(app)))
_GROUPS = "|".join(sorted({command.rpartition(" ")[0] for command in COMMANDS if " " in command}, key=len, reverse=True))
_COMMAND = re.compile(rf"\bbascule ((?:(?:{_GROUPS}) )?[a-z][a-z-]*)([^\n`|;]*)")


@pytest.mark.parametrize("page", pages(), ids=named)
def test_commands_and_options_named_on_a_page_exist(page: Path) -> None:
    wrong = []
    for code in _CODE.findall(_PROGRAM.sub("", page.read_text())):
        for command, rest in _COMMAND.findall(code):
            unknown = set(re.findall(r"(?<!\S)--[a-z-]+", rest)) - COMMANDS.get(command, set())
            if unknown or command not in COMMANDS:
                wrong.append(f"bascule {command} {' '.join(unknown)}")
    assert wrong == []


#: A user reads all changes of the first release.
CHANGELOG_LINES_MAX = 60


def test_changelog_of_the_first_release_is_short_and_grouped() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= CHANGELOG_LINES_MAX
    assert len([line for line in lines if line.startswith("### ")]) > 3


@pytest.mark.parametrize("page", ["guarantees.md", "threat-model.md"])
def test_tests_named_in_the_page_exist(page: str) -> None:
    kept_by = re.findall(r"`([\w/]+\.py)::(\w+)`", (DOCS / page).read_text())
    assert kept_by
    assert [f"{file}::{test}" for file, test in kept_by if test not in functions(ROOT / "tests" / file)] == []


def test_each_attack_of_the_threat_model_names_a_test_of_every_run_or_none() -> None:
    tables = re.findall(
        r"^\| attack \| what stops it \| test \|\n\| --- \| --- \| --- \|\n((?:\|.*\n)+)", (DOCS / "threat-model.md").read_text(), re.M
    )
    assert len(tables) > 3
    wrong = []
    for row in "".join(tables).splitlines():
        attack, _, kept_by = (cell.strip() for cell in row.strip("| ").split(" | "))
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", kept_by)
        if not kept_by.startswith("none") and all(test in slow_functions(ROOT / "tests" / file) for file, test in tests):
            wrong.append(attack)
    assert wrong == []


def test_guarantees_mark_which_of_their_tests_are_slow() -> None:
    kept_by = re.findall(r"`([\w/]+\.py)::(\w+)`( \(slow\))?", (DOCS / "guarantees.md").read_text())
    assert any(said for _, _, said in kept_by)
    assert [f"{file}::{test}" for file, test, said in kept_by if bool(said) != (test in slow_functions(ROOT / "tests" / file))] == []


def test_each_guarantee_names_a_test_that_is_not_slow() -> None:
    slow_alone = []
    for line in (DOCS / "guarantees.md").read_text().splitlines():
        kept_by = re.findall(r"`([\w/]+\.py)::(\w+)`( \(slow\))?", line)
        if kept_by and all(slow for _, _, slow in kept_by):
            slow_alone.append(line.split("|")[1].strip())
    assert slow_alone == []


def test_tests_listed_as_moved_are_slow_and_their_replacements_are_not() -> None:
    page = (DOCS / "internals" / "tests.md").read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)::(\w+)` \| \d+ s \| ([^|]+) \|$", page, re.MULTILINE)
    assert rows
    wrong = []
    for file, moved, keepers in rows:
        if moved not in slow_functions(ROOT / "tests" / file):
            wrong.append(f"{file}::{moved} is not slow")
        found = re.findall(r"`([\w/]+\.py)::(\w+)`", keepers)
        if not found:
            wrong.append(f"nothing keeps the promise of {file}::{moved}")
        for other, test in found:
            if test not in functions(ROOT / "tests" / other) or test in slow_functions(ROOT / "tests" / other):
                wrong.append(f"{other}::{test} is not a test of every run")
    assert wrong == []


#: Decorators of tests that only `make slow` runs; the second one applies where a service is available.
_SLOW, _SLOW_ON_KAFKA = "pytest.mark.slow", "pytest.mark.on_mock_cluster"


@cache
def slow_functions(file: Path) -> set[str]:
    """Return the tests that only `make slow` runs, with all of their parameters."""
    tree = ast.parse(file.read_bytes())
    marks = {_SLOW, *([_SLOW_ON_KAFKA] if file.parent.name == "scenarios" else [])}
    marked = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and marks & set(map(ast.unparse, node.decorator_list))}
    all_of_them = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and _SLOW in ast.unparse(node.value)
        for node in tree.body
    )
    return functions(file) if all_of_them else marked


@cache
def functions(file: Path) -> set[str]:
    """Return the tests that a file defines, and those that it imports to run them on something else."""
    if not file.exists():
        return set()
    tree = ast.parse(file.read_bytes())
    imported = {each.name for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names if each.name.startswith("test_")}
    return imported | {node.name for node in statements(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_module_map_has_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "src" / "bascule").glob("*/__init__.py")}
    rows = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "architecture.md").read_text(), re.MULTILINE))
    assert packages <= rows


#: Terms of Bascule's own, or with a meaning of its own, that pages for users and log lines use without explaining them.
COINED = (
    "journal", "epoch", "fence", "snapshot", "pin", "reservation", "standby", "takeover", "dead letter", "divert", "ingress", "position",
    "member", "owner", "incarnation", "recreated topic", "branch", "in doubt", "endpoint", "claim", "foreign record", "barrier record",
    "anycast", "multicast", "turn",
)  # fmt: skip


def test_glossary_explains_each_coined_term() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]{20,} \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    terms = {term.strip() for row in rows for term in row.split(",")}
    assert [term for term in COINED if term not in terms] == []


def test_the_list_of_decisions_is_complete() -> None:
    listed = set(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (DOCS / "adr" / "README.md").read_text()))
    assert listed == {path.name for path in (DOCS / "adr").glob("[0-9]*.md")}


#: Pages that follow one thing through the code, file by file.
TOURS = ("a-message", "a-transaction")
TOUR_FILES_MAX = 5


@pytest.mark.parametrize("tour", TOURS)
def test_code_tour_names_few_files_and_only_existing_definitions(tour: str) -> None:
    page = (DOCS / "internals" / f"{tour}.md").read_text()
    rows = re.findall(r"^\| \d \| `(src/[^`]+)` \| (.+) \|$", page, re.MULTILINE)
    assert 0 < len(rows) <= TOUR_FILES_MAX
    missing = []
    for file, names in rows:
        source = (ROOT / file).read_text()
        for name in re.findall(r"`([^`]+)`", names):
            last = re.escape(name.rpartition(".")[2])
            if not re.search(rf"\b(def|class) {last}\b|^{last}\b", source, re.MULTILINE):
                missing.append(f"{file}: {name}")
    assert missing == []


def test_limits_of_undivided_work_exist_in_the_code() -> None:
    text = (DOCS / "internals" / "turns.md").read_text()
    table = text.partition("## Work that is not divided")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    product = ROOT / "src" / "bascule"
    source = "\n".join(path.read_text() for path in product.rglob("*.py"))
    assert len(rows) > 10
    for _, where, limit in rows:
        modules = re.findall(r"`([\w/]+\.py)`", where)
        assert modules
        assert [module for module in modules if not (product / module).exists()] == []
        names = [name.removeprefix("broker.") for name in re.findall(r"`([\w.]+)`", limit)]
        assert [name for name in names if not re.search(rf"\b{name}\b", source)] == []


def test_each_page_of_the_console_has_a_picture_that_the_guide_shows() -> None:
    files = {each.stem.removeprefix("page-") for each in (ROOT / "src/bascule/server/console_files").glob("page-*.js")}
    pages_of = {name.replace("brokers", "broker") for name in files}
    taken = set(re.findall(r'picture\(page, "([\w-]+)"\)', (ROOT / "tests/console/walk.mjs").read_text()))
    shown = set(re.findall(r"pictures/([\w-]+)\.webp", (DOCS / "guides" / "console.md").read_text()))
    assert len(pages_of) > 20
    assert pages_of - shown == set()
    assert taken == shown == {each.stem for each in (DOCS / "pictures").glob("*.webp")}
