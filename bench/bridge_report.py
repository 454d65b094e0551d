"""The tables of bench/bridge.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench.bridges import FROM_KAFKA, TITLES, TO_KAFKA, Bascule
from bench.run import markdown

PATHS = (TO_KAFKA, FROM_KAFKA)
FLAWS = ("lost", "duplicated", "disordered")
LATENCIES = {"p50 ms": "p50_ms", "p99 ms": "p99_ms", "longest ms": "longest_ms"}

Runs = Sequence[dict[str, Any]]


def page(content: Mapping[str, Any]) -> str:
    """Return the tables, and what a reader must know beside them."""
    results: dict[str, Runs] = content["results"]
    options, machine = content["options"], content["machine"]
    busy = max(run["load_average"] for runs in results.values() for run in runs) > machine["cores"]
    rates = ", ".join(f"{rate}/s" for rate in options["rate"])
    about = [
        f"{options['rounds']} rounds; medians, with the least and the greatest in parentheses. Messages of {options['bytes']} bytes.",
        f"{machine['cores']} cores ({machine['cpu']}), load average {machine['load_average'][0]:.1f} at the begin, "
        f"{content['load_average_at_end'][0]:.1f} at the end"
        + (". **Busy machine: other work ran beside the benchmark. Only the ratios within this run mean anything.**" if busy else "."),
        f"fdatasync takes {content['flush_ms']:.2f} ms. Modules of Bascule: {machine['build']}. "
        + ", ".join(f"{product} {version}" for product, version in content["versions"].items())
        + f", Python {machine['python']}.",
    ]
    parts = [
        "\n".join(f"- {each}" for each in about),
        f"## A backlog of {options['records']:,} messages\n\n" + backlog_table(results),
        f"## Latency at {rates} for {options['seconds']} s\n\n" + latency_table(results),
    ]
    if options["kills"]:
        head = f"## {options['kills']} times kill -9, at {options['kill_rate']}/s on each path\n\n"
        parts.append(head + kills_table(results))
    return "\n\n".join(parts)


def backlog_table(results: Mapping[str, Runs]) -> str:
    """Return rates, processor time and memory while a backlog is carried."""
    rows = [["path", "bridge", "records/s", "CPU us/record", "all without clients", "RSS MB", *FLAWS]]
    for path, runs in by_path(results, lambda run: run["backlog"]):
        for name, found in runs.items():
            totals = [sum(us for part, us in run["cpu_us"].items() if part != "clients") for run in found]
            rows.append([
                path, TITLES[name], spread((run["records_per_s"] for run in found), 0), by_part(found, "cpu_us"), spread(totals, 0),
                by_part(found, "rss_mb"), *flaws(found),
            ])  # fmt: skip
        rows += ratio_rows(path, runs, "records_per_s")
    return markdown(rows)


def latency_table(results: Mapping[str, Runs]) -> str:
    """Return latencies and the processor time at fixed rates."""
    rows = [["path", "rate/s", "bridge", *LATENCIES, "CPU, % of a core", *FLAWS]]
    rates = dict.fromkeys(rate for runs in results.values() for run in runs for path in run["latency"].values() for rate in path)
    for rate in rates:
        for path, runs in by_path(results, partial(at_rate, rate)):
            for name, found in runs.items():
                figures = [spread((run[key] for run in found), 1) for key in LATENCIES.values()]
                rows.append([path, rate, TITLES[name], *figures, by_part(found, "cpu_percent"), *flaws(found)])
    return markdown(rows)


def at_rate(rate: str, run: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run at one rate, by path."""
    return {path: found[rate] for path, found in run["latency"].items()}


def kills_table(results: Mapping[str, Runs]) -> str:
    """Return the counts of the kills, and the time from each kill until the first later message had arrived."""
    rows = [["path", "bridge", "sent", *FLAWS, "back after s (median, longest)"]]
    for path, runs in by_path(results, lambda run: run["kills"]):
        for name, found in runs.items():
            back_s = [each for run in found for each in run["back_s"]] or [float("nan")]
            sent = str(sum(run["sent"] for run in found))
            rows.append([path, TITLES[name], sent, *flaws(found), f"{statistics.median(back_s):.1f}, {max(back_s):.1f}"])
    return markdown(rows)


def by_path(results: Mapping[str, Runs], part: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[tuple[str, dict[str, Runs]]]:
    """Yield for each path the runs of each bridge that has it."""
    for path in PATHS:
        found = {name: [part(run)[path] for run in runs if path in part(run)] for name, runs in results.items()}
        yield path, {name: runs for name, runs in found.items() if runs}


def ratio_rows(path: str, runs: Mapping[str, Runs], key: str) -> list[list[str]]:
    """Return how many times better Bascule is than each other bridge: the ratio of each round."""
    rows = []
    for name, theirs in runs.items():
        if name != Bascule.name and Bascule.name in runs:
            pairs = zip(runs[Bascule.name], theirs, strict=True)
            ratios = [ours[key] / other[key] for ours, other in pairs]
            rows.append([path, f"**{Bascule.name} : {name}**", f"**{spread(ratios, 2)}**", "", "", "", *[""] * len(FLAWS)])
    return rows


def by_part(runs: Runs, key: str) -> str:
    """Return the median of each part of a bridge."""
    parts = dict.fromkeys(part for run in runs for part in run[key])
    return ", ".join(f"{part} {statistics.median(run[key].get(part, 0) for run in runs):,.0f}" for part in parts)


def flaws(runs: Runs) -> list[str]:
    """Return the sums of lost, duplicated and disordered messages."""
    return [str(sum(run[key] for run in runs)) for key in FLAWS]


def flawed(turns: Runs) -> bool:
    """Return whether a bridge lost, duplicated or reordered anything."""
    found = [each for run in turns for part in ("backlog", "kills") for each in run[part].values()]
    found += [each for run in turns for rates in run["latency"].values() for each in rates.values()]
    return any(each[key] for each in found for key in FLAWS)


def spread(values: Iterable[float], digits: int) -> str:
    """Return the median, with the least and the greatest in parentheses if there are several."""
    found = list(values)
    middle = f"{statistics.median(found):,.{digits}f}"
    return middle if len(found) == 1 else f"{middle} ({min(found):,.{digits}f}, {max(found):,.{digits}f})"
