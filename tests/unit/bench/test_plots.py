"""The page of plots: what it draws from which results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import plots
from bench.plots import PAGE, Result, named, results, written
from bench.svg import Bar, Chart, Scale, drawn

MACHINE = {"cores": 2, "load_average": [1.0, 1.0, 1.0], "build": "compiled"}
SVG = "{http://www.w3.org/2000/svg}"


def of_broker(rate: float, **cpu_us: float) -> list[dict[str, Any]]:
    return [{"sent_per_s": rate, "cpu_us": cpu_us}]


def test_page_and_plots_in_the_repository_are_those_of_the_results_that_the_page_names() -> None:
    names = named()
    assert names
    files = written(results(names))
    for path, text in files.items():
        assert path.read_text() == text, "run: python -m bench.plots --same"
    assert {path for path in files if path.suffix == ".svg"} == set(plots.PLOTS.glob("*.svg"))


def test_every_plot_of_the_page_is_an_svg_with_a_title_and_the_figures_of_its_bars() -> None:
    drawings = [text for path, text in written(results(named())).items() if path.suffix == ".svg"]
    roots = [ElementTree.fromstring(text) for text in drawings]
    assert [title for root in roots if (title := root.findtext(f"{SVG}title")) not in PAGE.read_text()] == []
    widths = [rect.attrib["width"] for root in roots for rect in root.iter(f"{SVG}rect")]
    assert all(float(width) >= 0 for width in widths if width != "100%")
    assert len(widths) > 4 * len(roots) > 0


def test_bars_are_as_long_as_their_values_and_goals_are_marked() -> None:
    chart = Chart("T", "s", [("a", [Bar("x", 2.0, "two <"), Bar("y", 4.0, "four", goal=1.0)])])
    root = ElementTree.fromstring(drawn(chart))
    first, second = [rect for rect in root.iter(f"{SVG}rect") if rect.attrib.get("height") == "15"]
    assert float(second.attrib["width"]) == pytest.approx(2 * float(first.attrib["width"]), abs=0.2)
    assert first.attrib["fill"] != second.attrib["fill"]
    goal = next(line for line in root.iter(f"{SVG}line") if float(line.attrib["y1"]) > 50)
    assert float(goal.attrib["x1"]) - float(second.attrib["x"]) == pytest.approx(float(second.attrib["width"]) / 4, abs=0.2)
    assert {"two <", "four", "goal", "a"} <= {text.text for text in root.iter(f"{SVG}text")}


def test_logarithmic_scale_gives_equal_factors_equal_lengths() -> None:
    scale = Scale([20.0, 2_000.0], 100.0, logarithmic=True)
    assert scale.ticks() == [10.0, 100.0, 1000.0]
    assert scale.length_of(2_000.0) == pytest.approx(100.0)
    assert scale.length_of(200.0) - scale.length_of(20.0) == pytest.approx(scale.length_of(2_000.0) - scale.length_of(200.0))


@pytest.mark.parametrize(
    ("greatest", "ticks"), [(1.7, [0.0, 0.5, 1.0, 1.5]), (26.5, [0, 5, 10, 15, 20, 25]), (1000.0, [0, 200, 400, 600, 800, 1000])]
)
def test_linear_scale_has_a_few_round_ticks(greatest: float, ticks: list[float]) -> None:
    assert Scale([greatest], 100.0, logarithmic=False).ticks() == pytest.approx(ticks)


def test_broker_plots_are_from_the_newest_result_that_has_both_brokers() -> None:
    both = {"async": {"bascule": of_broker(8_000, broker=70, kafka=20), "artemis": of_broker(10_000, broker=100)}}
    alone = Result("20270102-000000", {"machine": MACHINE, "results": {"async": {"bascule": of_broker(1, broker=1)}}})
    older = Result("20261231-000000", {"machine": MACHINE, "results": {"async": {}}})
    newer = Result("20270101-000000", {"machine": MACHINE, "results": both})
    files = written([alone, newer, older])
    page = files[PAGE]
    assert set(re.findall(r"plots/([\w-]+)\.svg", page)) == {"broker-rates", "broker-cpu"}
    assert "[20270101-000000](../bench/results/20270101-000000.md) (2027-01-01, load average 1 on 2 cores, compiled build)" in page
    assert "0.80 (8,000/s : 10,000/s)" in files[plots.PLOTS / "broker-rates.svg"]
    assert ">90<" in files[plots.PLOTS / "broker-cpu.svg"]


def test_each_path_of_the_latency_is_from_the_newest_result_that_has_it_with_its_goals() -> None:
    def of(when: str, **paths: float) -> Result:
        runs = {path.replace("_", " "): [{"p50_ms": p50, "p99_ms": 10 * p50}] for path, p50 in paths.items()}
        return Result(f"latency-{when}", {"machine": MACHINE, "results": runs})

    older = of("20270101-000000", plain=11.0, the_same_with_a_transformation=70.0)
    newer = of("20270102-000000", plain=12.0)
    plot = plots.latency([newer, older])
    assert plot is not None
    assert {label: [(bar.value, bar.goal) for bar in bars] for label, bars in plot.chart.groups} == {
        "plain": [(12.0, 20.0), (120.0, 60.0)],
        "JMS to Kafka, with a transformation": [(70.0, 60.0), (700.0, None)],
    }
    assert [result.name for result in plot.results] == [newer.name, older.name]


def test_bridges_are_compared_by_rate_and_latency() -> None:
    def turn(rate: float, ms: float) -> dict[str, Any]:
        return {"backlog": {"JMS to Kafka": {"records_per_s": rate}}, "latency": {"JMS to Kafka": {"100": {"p50_ms": ms}}}}

    content = {"machine": MACHINE, "results": {"bascule": [turn(9.0, 20.0), turn(11.0, 30.0), turn(10.0, 40.0)], "camel": [turn(5.0, 4.0)]}}
    found = [Result("bridge-20270101-000000", content)]
    rates, waits = plots.bridge_backlog(found), plots.bridge_latency(found)
    assert rates is not None
    assert waits is not None
    assert [[bar.value for bar in bars] for _, bars in rates.chart.groups] == [[10.0, 5.0]]
    assert [(label, [bar.value for bar in bars]) for label, bars in waits.chart.groups] == [("JMS to Kafka, 100/s", [30.0, 4.0])]


def test_kills_and_starts_have_their_goals() -> None:
    kills = Result("recovery-20270101-000000", {"machine": MACHINE, "judged": {"worker": {"kills": 20, "p50_s": 3.0, "max_s": 9.0}}})
    starts = Result("starts-20270101-000000", {"machine": MACHINE, "judged": {"broker": {"rounds_s": [4.0, 2.0, 3.0], "goal_s": 3.0}}})
    over = Result("takeover-20270101-000000", {"machine": MACHINE, "judged": {"kill": {"rounds_s": [2.0], "promised_s": 2.0}}})
    waits, times = plots.recovery([kills]), plots.times([kills, starts, over])
    assert waits is not None
    assert times is not None
    assert [(bar.value, bar.goal) for bar in waits.chart.groups[0][1]] == [(3.0, 5.0), (9.0, None)]
    assert [(label, bars[0].value, bars[0].goal) for label, bars in times.chart.groups] == [
        ("start: broker", 3.0, 3.0),
        ("takeover: kill", 2.0, 2.0),
    ]


def test_command_writes_the_newest_results_or_the_same_ones_and_removes_old_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAGE", tmp_path / "plots.md"), ("PLOTS", tmp_path / "plots")):
        monkeypatch.setattr(plots, name, value)
    monkeypatch.setattr("sys.argv", ["plots"])
    assert plots.main() == 0
    newest = plots.PAGE.read_text()
    (plots.PLOTS / "old.svg").write_text("")
    plots.PAGE.write_text("[x](../bench/results/starts-20261129-205923.md)")
    monkeypatch.setattr("sys.argv", ["plots", "--same"])
    assert plots.main() == 0
    assert [path.name for path in plots.PLOTS.iterdir()] == ["times.svg"]
    assert plots.PAGE.read_text() != newest
