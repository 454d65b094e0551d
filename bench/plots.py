"""Draws the page of plots, docs/plots.md, from the results of the benchmarks.

    python -m bench.plots            # from the newest results
    python -m bench.plots --same     # from the results that the page names already

Each plot is an SVG in docs/plots. A benchmark without results has no plot.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.bridges import TITLES
from bench.run import MODES
from bench.svg import Bar, Chart, drawn

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "bench" / "results"
PAGE: Final = ROOT / "docs" / "plots.md"
PLOTS: Final = ROOT / "docs" / "plots"
_NAMED: Final = re.compile(r"bench/results/([\w-]+)\.md")
_HEAD: Final = """# Plots

`make plots` draws these plots from the newest results of the benchmarks, and writes this page. [Performance](performance.md) explains the
figures, and [the page of the benchmarks](../bench/README.md) says how they are measured. A red line is a goal.
"""
BASCULE, ARTEMIS = "Bascule", "Artemis"
#: Goals of p50 and p99 from JMS to a reader of Kafka, and back, in ms.
LATENCY_GOALS: Final[Mapping[str, float | None]] = {"p50": 20.0, "p99": 60.0}
#: The same for transformations, and for request and reply.
LONG_PATH_GOALS: Final[Mapping[str, float | None]] = {"p50": 60.0, "p99": None}
_LONG_PATHS: Final = ("transformation", "back to JMS")
RECOVERY_GOAL_S: Final = 5.0


@dataclass(frozen=True)
class Result:
    """A result of a benchmark. ``kind`` is the first part of its name, "" for the comparison with Artemis."""

    name: str
    content: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Return the benchmark."""
        return self.name.partition("-")[0] if not self.name[0].isdigit() else ""

    @property
    def when(self) -> str:
        """Return date and time, which sort."""
        return self.name.removeprefix(f"{self.kind}-")

    def said(self) -> str:
        """Return the result as a link, with its date and the state of the machine."""
        machine = self.content.get("machine", {})
        parts = [f"{self.when[:4]}-{self.when[4:6]}-{self.when[6:8]}"]
        if machine:
            parts += [f"load average {machine['load_average'][0]:.0f} on {machine['cores']} cores"]
        if "build" in machine:
            parts.append(f"{machine['build']} build")
        return f"[{self.name}](../bench/results/{self.name}.md) ({', '.join(parts)})"


@dataclass
class Plot:
    """A plot of the page."""

    name: str
    heading: str
    chart: Chart
    results: list[Result] = field(default_factory=list)
    note: str = ""


def results(names: Iterable[str] | None = None) -> list[Result]:
    """Return all results, or those with these names. The newest result comes first."""
    found = [Result(path.stem, json.loads(path.read_text())) for path in RESULTS.glob("*.json") if names is None or path.stem in set(names)]
    return sorted(found, key=lambda result: result.when, reverse=True)


def plots(found: Sequence[Result]) -> list[Plot]:
    """Return the plots for which there are results."""
    makers = (broker_rates, broker_cpu, bridge_backlog, bridge_latency, latency, recovery, times)
    return [plot for make in makers if (plot := make(found)) is not None]


def newest(found: Iterable[Result], kind: str, good: Callable[[Mapping[str, Any]], Any] = lambda _: True) -> Result | None:
    """Return the newest result of a benchmark with a property."""
    return next((result for result in found if result.kind == kind and good(result.content)), None)


def _modes(result: Result) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return the rounds of both brokers for each mode that has both."""
    both = {mode.name: result.content["results"].get(mode.name, {}) for mode in MODES}
    whole = {
        name: tuple([run for run in rounds.get(broker, []) if "sent_per_s" in run] for broker in ("bascule", "artemis"))
        for name, rounds in both.items()
    }
    return {name: (pair[0], pair[1]) for name, pair in whole.items() if all(pair)}


def _median(runs: Iterable[Mapping[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def broker_rates(found: Sequence[Result]) -> Plot | None:
    """Draw the ratio of the rates of Bascule and Artemis."""
    result = newest(found, "", _compared)
    if result is None:
        return None
    groups = []
    for name, (ours, theirs) in _modes(result).items():
        mine, other = _median(ours, "sent_per_s"), _median(theirs, "sent_per_s")
        groups.append((name, [Bar(BASCULE, mine / other, f"{mine / other:.2f} ({mine:,.0f}/s : {other:,.0f}/s)", 1.0)]))
    chart = Chart("Messages/s of Bascule beside Artemis", "rate of Bascule divided by the rate of Artemis", groups)
    return Plot("broker-rates", "Rate beside Artemis", chart, [result], "The red line is the rate of Artemis.")


def broker_cpu(found: Sequence[Result]) -> Plot | None:
    """Draw the processor time of a message."""
    result = newest(found, "", _compared)
    if result is None:
        return None
    groups = []
    for name, pair in _modes(result).items():
        used = [statistics.median(sum(run["cpu_us"].values()) for run in runs) for runs in pair]
        groups.append((name, [Bar(series, us, f"{us:,.0f}") for series, us in zip((f"{BASCULE} and Kafka", ARTEMIS), used, strict=True)]))
    chart = Chart("Processor time of a message", "us of processor time", groups)
    return Plot("broker-cpu", "Processor time beside Artemis", chart, [result])


def _compared(content: Mapping[str, Any]) -> bool:
    return any({"bascule", "artemis"} <= rounds.keys() for rounds in content["results"].values())


def bridge_backlog(found: Sequence[Result]) -> Plot | None:
    """Draw the rates of bridges that carry a backlog."""
    result = newest(found, "bridge")
    if result is None:
        return None
    groups: dict[str, list[Bar]] = {}
    for name, runs in result.content["results"].items():
        for path in runs[0]["backlog"]:
            rate = statistics.median(run["backlog"][path]["records_per_s"] for run in runs)
            groups.setdefault(path, []).append(Bar(TITLES[name], rate, f"{rate:,.0f}"))
    chart = Chart("A backlog that a bridge carries", "records/s", list(groups.items()))
    return Plot("bridge-backlog", "Bridges: a backlog", chart, [result])


def bridge_latency(found: Sequence[Result]) -> Plot | None:
    """Draw the latencies of bridges at fixed rates."""
    result = newest(found, "bridge")
    if result is None:
        return None
    groups: dict[str, list[Bar]] = {}
    for name, runs in result.content["results"].items():
        for path, rates in runs[0]["latency"].items():
            for rate in rates:
                ms = statistics.median(run["latency"][path][rate]["p50_ms"] for run in runs)
                groups.setdefault(f"{path}, {rate}/s", []).append(Bar(TITLES[name], ms, f"{ms:,.0f}"))
    chart = Chart("Latency of bridges, p50", "ms", list(groups.items()), logarithmic=True)
    return Plot("bridge-latency", "Bridges: latency", chart, [result])


def latency(found: Sequence[Result]) -> Plot | None:
    """Draw the latency of each path of Bascule, each from the newest result that has the path."""
    groups: dict[str, list[Bar]] = {}
    used: dict[str, Result] = {}
    for result in (each for each in found if each.kind == "latency"):
        for path, runs in result.content["results"].items():
            label = path.replace("the same with", "JMS to Kafka, with")
            if label in groups:
                continue
            goals = LONG_PATH_GOALS if any(word in path for word in _LONG_PATHS) else LATENCY_GOALS
            figures = [(series, _median(runs, f"{series}_ms"), goal_ms) for series, goal_ms in goals.items()]
            groups[label] = [Bar(series, ms, f"{ms:,.0f}", goal_ms) for series, ms, goal_ms in figures]
            used[result.name] = result
    if not groups:
        return None
    chart = Chart("Latency across the bridge at fixed rates", "ms", sorted(groups.items()), logarithmic=True)
    return Plot("latency", "Latency across the bridge", chart, list(used.values()))


def recovery(found: Sequence[Result]) -> Plot | None:
    """Draw how long records wait after a kill of a part of the pipelines."""
    result = newest(found, "recovery")
    if result is None:
        return None
    groups = [
        (f"kill of {kind}", [
            Bar("p50", of["p50_s"], f"{of['p50_s']:.1f} of {of['kills']} kills", RECOVERY_GOAL_S),
            Bar("longest", of["max_s"], f"{of['max_s']:.1f}"),
        ])
        for kind, of in result.content["judged"].items()
    ]  # fmt: skip
    chart = Chart("Longest wait of a record after kill -9", "s", groups)
    return Plot("recovery", "Pipelines after a kill", chart, [result])


def times(found: Sequence[Result]) -> Plot | None:
    """Draw starts and takeovers."""
    groups: list[tuple[str, list[Bar]]] = []
    used = [result for kind in ("starts", "takeover") if (result := newest(found, kind)) is not None]
    for result in used:
        for name, of in result.content["judged"].items():
            s = statistics.median(of["rounds_s"])
            label = f"start: {name}" if result.kind == "starts" else f"takeover: {name}"
            groups.append((label, [Bar("p50", s, f"{s:.1f} of {len(of['rounds_s'])}", of.get("goal_s", of.get("promised_s")))]))
    if not groups:
        return None
    return Plot("times", "Starts and takeovers", Chart("Starts and takeovers", "s", groups), used)


def written(found: Sequence[Result]) -> dict[Path, str]:
    """Return the files of the page and its plots."""
    files: dict[Path, str] = {}
    parts = [_HEAD]
    for plot in plots(found):
        files[PLOTS / f"{plot.name}.svg"] = drawn(plot.chart)
        origin = "\n".join(f"- {result.said()}" for result in plot.results)
        note = f"{plot.note} Results:" if plot.note else "Results:"
        parts.append(f"## {plot.heading}\n\n![{plot.chart.title}](plots/{plot.name}.svg)\n\n{note}\n\n{origin}\n")
    files[PAGE] = "\n".join(parts)
    return files


def named() -> set[str]:
    """Return the names of the results that the page uses."""
    return set(_NAMED.findall(PAGE.read_text())) if PAGE.exists() else set()


def main() -> int:
    """Write the page and its plots."""
    parser = argparse.ArgumentParser(description="Draw the plots of the documentation.")
    parser.add_argument("--same", action="store_true", help="use the results that the page names (default: the newest ones)")
    files = written(results(named() if parser.parse_args().same else None))
    PLOTS.mkdir(exist_ok=True)
    for old in set(PLOTS.glob("*.svg")) - files.keys():
        old.unlink()
    for path, text in files.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
