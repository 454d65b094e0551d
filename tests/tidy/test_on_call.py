"""The guide for a night on call names alerts, log events, console pages and tests that exist, and metrics that the alerts use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.examples.pages import ROOT
from tests.tidy.test_log_events import events

PAGE = (ROOT / "docs" / "guides" / "on-call.md").read_text()
RULES = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((ROOT / "deploy/helm/bascule/files/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
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


def row(section: str, name: str) -> str:
    found = re.search(rf"^\| {name} \| (.*) \|$", section, re.MULTILINE)
    assert found is not None, f"no row {name}"
    return found[1]


def test_guide_has_a_section_for_each_of_its_failures() -> None:
    assert len(SECTIONS) >= FAILURES_MIN
    table = PAGE.partition("\n## ")[0]
    assert re.findall(r"\| \[([^\]]+)\]\(#", table) == list(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
def test_alert_of_a_failure_exists_and_uses_the_named_metric(title: str) -> None:
    said = row(SECTIONS[title], "Alert")
    alerts = re.findall(r"`(Bascule\w+)`", said)
    metrics = re.findall(r"`(bascule_\w+)", said)
    assert alerts
    assert set(alerts) <= set(RULES)
    assert metrics
    assert all(any(metric in RULES[alert] for alert in alerts) for metric in metrics)
    assert all(alert in PAGE.partition("\n## ")[0] for alert in alerts)


@pytest.mark.parametrize("title", SECTIONS)
def test_log_events_and_console_pages_of_a_failure_exist(title: str) -> None:
    assert set(EVENT.findall(row(SECTIONS[title], "Log"))) <= events().keys()
    shown = row(SECTIONS[title], "Console")
    assert shown == "nothing" or re.findall(r"\*\*([^*]+)\*\*", shown)
    assert set(re.findall(r"\*\*([^*]+)\*\*", shown)) <= TITLES


@pytest.mark.parametrize("title", SECTIONS)
def test_test_of_a_failure_exists_and_its_file_checks_the_metric_or_the_event(title: str) -> None:
    section = SECTIONS[title]
    found = re.search(r"^Test(?: \(slow\))?: `([^`:]+)::(\w+)`$", section, re.MULTILINE)
    assert found is not None
    source = (ROOT / "tests" / Path(found[1])).read_text()
    assert f"def {found[2]}(" in source
    metrics = re.findall(r"`bascule_(?:pipeline_)?(\w+)", row(section, "Alert"))
    named = [*EVENT.findall(row(section, "Log")), *metrics]
    assert any(each in source for each in named), f"{found[1]} has none of {named}"
