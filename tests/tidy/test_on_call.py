"""The guide for a night on call: tests of each section assert that its alerts fire, that its events are logged, and what the console shows.

An alert counts if a test demands ``fires(...)`` with its name; an event if a test demands that a text which contains it is in something, or
waits for it by ``said(...)``; a quoted text of the console if a test demands ``shows(TITLE, ...)`` with a text that contains it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.examples.pages import ROOT
from tests.support.alerts import RULES
from tests.tidy.test_log_events import events

PAGE = (ROOT / "docs" / "guides" / "on-call.md").read_text()
TITLES = {
    title
    for page in (ROOT / "src/bascule/server/console_files").glob("page-*.js")
    for title in re.findall(r'^  title: "([^"]+)"', page.read_text(), re.MULTILINE)
}
SECTIONS = dict(re.findall(r"^## \d+\. ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
#: What a night may bring.
FAILURES_MIN = 10
#: An event of a log: some words in lower case. A single word may be the state of a process.
EVENT = re.compile(r"`([a-z]+(?:,? [a-z]+)+)`")
NOTHING = "nothing"


def row(section: str, name: str) -> str:
    found = re.search(rf"^\| {name} \| (.*) \|$", section, re.MULTILINE)
    assert found is not None, f"no row {name}"
    return found[1]


class Demands(ast.NodeVisitor):
    """What a test demands: names of alerts, texts in something, and texts on pages of the console."""

    def __init__(self) -> None:
        self.alerts: set[str] = set()
        self.texts: list[str] = []
        self.shown: list[tuple[str, str]] = []

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Leave out what must not be."""
        if not isinstance(node.op, ast.Not):
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Note what must be in something."""
        if all(isinstance(each, ast.In) for each in node.ops):
            self.texts += words(node.left)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Note the calls that wait for something."""
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        texts = [text for each in node.args for text in words(each)]
        if name == "fires":
            self.alerts |= set(texts)
        elif name == "said":
            self.texts += texts
        elif name == "shows" and texts:
            self.shown += [(texts[0], text) for text in texts[1:]]
        self.generic_visit(node)


def words(node: ast.AST) -> list[str]:
    """Return the fixed texts of an expression."""
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / "tests" / Path(file)).read_text())


def cited(section: str) -> list[tuple[str, str]]:
    """Return file and name of the tests of a section."""
    found = re.search(r"^Tests?(?: \(slow\))?: (.*?)(?=\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    assert found is not None, "no test"
    return re.findall(r"`([^`:]+)::(\w+)`", found[1])


def demands(section: str) -> Demands:
    """Return what all tests of a section demand together."""
    found = Demands()
    for file, name in cited(section):
        (test,) = (each for each in tree(file).body if isinstance(each, ast.FunctionDef) and each.name == name)
        for each in test.body:
            found.visit(each)
    return found


def parts(shown: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each page of the console in a row, and the texts that it shows."""
    for part in re.split(r"(?=\*\*[A-Z])", shown):
        if title := re.match(r"\*\*([^*]+)\*\*", part):
            yield title[1], re.findall(r"`([^`]+)`", part)


def test_guide_has_a_section_for_each_of_its_failures() -> None:
    assert len(SECTIONS) >= FAILURES_MIN
    table = PAGE.partition("\n## ")[0]
    assert re.findall(r"\| \[([^\]]+)\]\(#", table) == list(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
def test_alert_of_a_failure_exists_uses_the_named_metric_and_fires_in_a_test(title: str) -> None:
    said = row(SECTIONS[title], "Alert")
    alerts = re.findall(r"`(Bascule\w+)`", said)
    metrics = re.findall(r"`(bascule_\w+)", said)
    assert alerts
    assert set(alerts) <= set(RULES)
    assert metrics
    assert all(any(metric in RULES[alert] for alert in alerts) for metric in metrics)
    assert all(alert in PAGE.partition("\n## ")[0] for alert in alerts)
    assert set(alerts) <= demands(SECTIONS[title]).alerts


@pytest.mark.parametrize("alert", re.findall(r"`(Bascule\w+)`", PAGE.partition("\n## ")[0]))
def test_alert_of_the_table_fires_in_a_test(alert: str) -> None:
    (line,) = (line for line in PAGE.splitlines() if line.startswith("|") and f"`{alert}`" in line and "](#" in line)
    (title,) = re.findall(r"\[([^\]]+)\]\(#", line)
    assert alert in demands(SECTIONS[title]).alerts


@pytest.mark.parametrize("title", SECTIONS)
def test_log_events_of_a_failure_exist_and_are_in_the_log_of_a_test(title: str) -> None:
    said = row(SECTIONS[title], "Log")
    named = EVENT.findall(said)
    assert named or NOTHING in said
    assert set(named) <= events().keys()
    texts = demands(SECTIONS[title]).texts
    assert [event for event in named if not any(event in text for text in texts)] == []


@pytest.mark.parametrize("title", SECTIONS)
def test_console_shows_the_texts_of_a_failure_in_a_test(title: str) -> None:
    said = row(SECTIONS[title], "Console")
    pages = list(parts(said))
    assert pages or said == NOTHING
    shown = demands(SECTIONS[title]).shown
    for page, texts in pages:
        assert page in TITLES
        assert texts, f"no text of page {page}"
        assert [text for text in texts if not any(page == place and text in found for place, found in shown)] == []


@pytest.mark.parametrize(
    ("source", "alerts", "texts", "shown"),
    [
        ("assert not watch.fires('A') + watch.fires('B')", set(), [], []),
        ("assert 'gone' not in said()", set(), [], []),
        ("wait_for(lambda: driver.fires('A') and f'n {1} stopped' in log)", {"A"}, ["n ", " stopped"], []),
        ("console.shows('Broker', f'Epoch {1}', 'active')", set(), [], [("Broker", "Epoch "), ("Broker", "active")]),
        ("said('ended')", set(), ["ended"], []),
    ],
)
def test_only_what_a_test_demands_counts(source: str, alerts: set[str], texts: list[str], shown: list[tuple[str, str]]) -> None:
    found = Demands()
    found.visit(ast.parse(source))
    assert (found.alerts, found.texts, found.shown) == (alerts, texts, shown)
