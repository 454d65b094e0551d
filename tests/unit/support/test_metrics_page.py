"""The page of metrics agrees with the code."""

from __future__ import annotations

import re

from tests.support.metrics_page import PAGE, documented, page, sections


def test_metrics_page_equals_the_generated_page() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.support.metrics_page` to regenerate the page"


def test_each_metric_has_a_name_of_its_own_and_a_meaning() -> None:
    metrics = [metric for section in sections() for metric in documented(section)]
    assert len({metric.name for metric in metrics}) == len(metrics) > 80
    for metric in metrics:
        assert re.fullmatch(r"(bascule|process)_[a-z][a-z0-9_]*", metric.name), metric
        assert metric.text.strip(" .") == metric.text, metric
        assert metric.type in ("gauge", "counter", "histogram"), metric
        if metric.type == "histogram":
            assert metric.unit == "seconds", metric
