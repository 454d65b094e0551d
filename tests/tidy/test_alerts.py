"""The evaluator of alert rules that other tests use agrees with promtool: it finds the alerts that the tests of the rules expect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.examples.pages import ROOT
from tests.support.alerts import NAME, RULES, Watch

TESTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts_test.yaml").read_text())["tests"]
#: They use functions that the evaluator does not know.
UNKNOWN = {"BasculeEventLoopStalls", "BasculePipelineLagGrows"}
UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([smh])", text))


def values(text: str) -> Iterator[float | None]:
    """Yield the values of a series in the notation of promtool."""
    for word in text.split():
        found = re.fullmatch(r"(_|stale|[\d.e]+)(?:([+-][\d.e]+))?(?:x(\d+))?", word)
        assert found is not None, word
        for number in range(int(found[3] or 1) if found[1] == "_" else int(found[3] or 0) + 1):
            yield None if found[1] in ("_", "stale") else float(found[1]) + number * float(found[2] or 0)


def watch_of(test: Any, until_s: float) -> Watch:
    """Return what Prometheus has read at a time of a test."""
    interval_s, watch = seconds(test["interval"]), Watch()
    series = []
    for each in test["input_series"]:
        name, _, rest = each["series"].partition("{")
        labels = {NAME: name, **dict(re.findall(r'(\w+)="([^"]*)"', rest))}
        series.append((tuple(sorted(labels.items())), list(values(each["values"]))))
    for number in range(int(until_s // interval_s) + 1):
        now = {labels: found[number] for labels, found in series if number < len(found) and found[number] is not None}
        watch.note(now, number * interval_s)  # type: ignore[arg-type]  # None is left out
    return watch


EXPECTED = [
    pytest.param(test, rule, id=f"{rule['alertname']} at {rule['eval_time']}: {test['name']}")
    for test in TESTS
    for rule in test.get("alert_rule_test", ())
    if rule["exp_alerts"] and rule["alertname"] not in UNKNOWN
]


@pytest.mark.parametrize(("test", "rule"), EXPECTED)
def test_evaluator_finds_the_alerts_that_promtool_expects(test: Any, rule: Any) -> None:
    wanted = [{name: value for name, value in each["exp_labels"].items() if name != "severity"} for each in rule["exp_alerts"]]
    found = watch_of(test, seconds(rule["eval_time"])).fires(rule["alertname"])
    shown = [{name: value for name, value in each.items() if name != NAME} for each in found]
    assert sorted(map(str, (dict(sorted(each.items())) for each in shown))) == sorted(
        map(str, (dict(sorted(each.items())) for each in wanted))
    )


def test_evaluator_finds_as_many_firing_alerts_as_promtool() -> None:
    expected, found = {}, {}
    for test in TESTS:
        for check in test.get("promql_expr_test", ()):
            watch = watch_of(test, seconds(check["eval_time"]))
            for sample in check["exp_samples"]:
                if (named := re.search(r'alertname="(\w+)"', sample["labels"])) and named[1] not in UNKNOWN:
                    key = (test["name"], check["eval_time"], named[1])
                    expected[key], found[key] = sample["value"], len(watch.fires(named[1]))
    assert len(expected) > 15
    assert found == expected


def test_evaluator_can_read_all_other_rules() -> None:
    watch = Watch()
    watch.read(at_s=0.0, one="")
    assert [alert for alert in RULES if alert not in UNKNOWN and watch.fires(alert)] == ["BasculeNoActiveBroker"]
