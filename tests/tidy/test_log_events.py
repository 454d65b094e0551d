"""docs/reference/log-events.md has every warning and error that the product logs, and guides name only existing lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.examples.pages import ROOT, pages
from tests.support.errors_page import all_texts, trees

PAGE = ROOT / "docs" / "reference" / "log-events.md"
SEVERITY = {"info": "info", "warning": "warning", "error": "error", "exception": "error", "critical": "critical"}
LOGS = re.compile(r"^## Read the logs\n.*?(?=^## |^### )", re.MULTILINE | re.DOTALL)


def logged() -> Iterator[tuple[str, str]]:
    """Yield each event with its severity, from the calls of loggers and from the notes of protocols."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                if not words:
                    continue
                if node.func.attr in SEVERITY and ast.unparse(node.func.value) in {"log", "_log"}:
                    yield words[0], SEVERITY[node.func.attr]
                elif node.func.attr == "note" and (severity := ast.unparse(node.args[0])).startswith("Severity."):
                    yield words[0], severity.removeprefix("Severity.").lower()


@cache
def all_logged() -> frozenset[tuple[str, str]]:
    """Return each event with its severity. Not computed on import, since each test process imports this file."""
    return frozenset(logged())


@cache
def events() -> Mapping[str, str]:
    """Return the severity of each event."""
    return dict(all_logged())


ROWS = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)


@cache
def texts() -> list[str]:
    """Return patterns of texts that begin with fixed words: fields of lines, and the events themselves."""
    return [each for each in all_texts() if re.match(r"\w+\\ \w+|\w+\\ \.\*", each)]


def test_each_log_event_has_one_severity() -> None:
    assert len(events()) == len(all_logged()) > 50


def test_log_page_lists_each_warning_and_error_with_its_severity() -> None:
    ours = {(event, severity) for event, severity in events().items() if severity != "info"}
    assert len(ours) > 50
    assert {(event, severity) for event, severity, _, _ in ROWS} == ours
    assert len(ROWS) == len(ours), "an event has one row"


def is_written(text: str) -> bool:
    """Return whether the product writes a line with this event, or with this text in a field; ``...`` and N stand for values."""
    event = re.sub(r" \w+=.*", "", text)
    if event in events():
        return True
    parts = [re.escape(part) for part in re.split(r"\.\.\.|\bN\b", event)]
    begins = re.compile(".*".join(parts), re.DOTALL)
    # One word would match lines of many events.
    return " " in event and any(re.fullmatch(each, event, re.DOTALL) or begins.match(re.sub(r"\\(.)", r"\1", each)) for each in texts())


def search_strings() -> set[str]:
    operations = (ROOT / "docs" / "guides" / "operations.md").read_text()
    section = LOGS.search(operations)
    table = section[0] if section else ""
    first_columns = "\n".join(row.split("|")[1] for row in re.findall(r"^\| `.*$", table, re.MULTILINE))
    return set(re.findall(r"`([^`]+)`", first_columns))


def test_log_lines_named_in_the_operations_guide_are_written() -> None:
    named = search_strings()
    assert len(named) > 10
    assert [text for text in sorted(named) if not is_written(text)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_log_lines_named_on_a_page_are_written(page: Path) -> None:
    named = re.findall(r"\b[Ll]ogs? (?:has |writes |shows )?(?:a line |lines |the line )?`([a-z][a-z]+ [^`]+)`", page.read_text())
    named += re.findall(r"\bline `([a-z]+ [^`]+)`", page.read_text())
    assert [text for text in named if not is_written(text)] == []


@pytest.mark.parametrize("text", ["producers are stopped", "epoch was loaded epoch=N", "pipeline", "another broker began epoch N"])
def test_log_line_that_the_product_never_writes_is_found(text: str) -> None:
    assert not is_written(text)
