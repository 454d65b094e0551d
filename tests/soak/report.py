"""The report of a soak: one self-contained page, and the same content as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from tests.soak.charts import Mark, Points, chart, legend
from tests.soak.figures import Figures
from tests.soak.plan import KINDS
from tests.soak.run import Result, settings_of
from tests.support.history import ANOMALIES, Tally

PAGE = Template((Path(__file__).with_name("report.html")).read_text())


def write_report(result: Result, directory: Path) -> Path:
    """Write report.html and report.json into a directory. Return the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = Figures(result)
    content = contents(figures)
    (directory / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    page = directory / "report.html"
    page.write_text(_page(figures, content))
    return page


def contents(figures: Figures) -> dict[str, Any]:
    """Return everything in the report except the pictures."""
    result = figures.result
    return {
        "seed": result.plan.seed,
        "good": result.good,
        "begun": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result.begun_s)),
        "totals": figures.totals(),
        "anomalies": {name: _found(result.tally, name) for name in ANOMALIES},
        "not_judged": result.evidence.gap,
        "found": list(map(str, result.tally.anomalies)),
        "failures": list(result.failures),
        "kinds": figures.by_kind(),
        "faults": [
            {
                "at_s": round(fault.at_s - result.begun_s, 1), "kind": fault.kind, "target": fault.target, "away_s": round(fault.away_s, 1),
                "sends_back_s": _rounded(sends), "diverts_back_s": _rounded(diverts),
            }
            for fault, (sends, diverts) in zip(result.faults, figures.back(), strict=True)
        ],
        "own_ends": [
            {"at_s": round(end.at_s - result.begun_s, 1), "what": str(end), "excuse": end.excuse} for end in result.own_ends
        ],
        "stalls": [{"at_s": round(stall.at_s - result.begun_s, 1), "what": str(stall)} for stall in result.stalls],
        "settings": settings_of(result.plan),
        "environment": dict(result.environment),
    }  # fmt: skip


def _found(tally: Tally, name: str) -> int | str:
    """Return a count; a text if it could not be determined."""
    return "not judged" if name in tally.unjudged else sum(len(each.ids) for each in tally.anomalies if each.name == name)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


# -- the page --------------------------------------------------------------------------------------------------------------------------


def _page(figures: Figures, content: Mapping[str, Any]) -> str:
    result = figures.result
    verdict = "No anomaly" if result.good else "FAILED: " + ("; ".join(result.faulted) or "no message was sent")
    if result.tally.unjudged:
        verdict += f"; not judged: {', '.join(sorted(result.tally.unjudged))} ({content['not_judged']})"
    kinds = [{"kind": kind, "meaning": KINDS[kind], **found} for kind, found in content["kinds"].items()]
    anomalies = [{"anomaly": name, "meaning": ANOMALIES[name], "found": count} for name, count in content["anomalies"].items()]
    return PAGE.substitute(
        title=escape(f"Soak of {content['begun']}, seed {content['seed']}"),
        verdict=escape(verdict),
        verdict_class="good" if result.good else "bad",
        totals=_table([{"": name.replace("_", " "), "value": value} for name, value in content["totals"].items()]),
        charts="\n".join(_charts(figures)),
        mark_legend=" ".join(f'<span class="mark-name {_style(kind)}">{kind}</span>' for kind in result.plan.kinds),
        anomalies=_table(anomalies),
        kinds=_table(kinds),
        faults=_table(content["faults"]),
        own_ends=_table(content["own_ends"]) if content["own_ends"] else "<p>None.</p>",
        stalls=_table(content["stalls"]) if content["stalls"] else "<p>None.</p>",
        settings=_table([{"setting": name, "value": value} for name, value in content["settings"].items()]),
        environment=_table([{"": name, "value": value} for name, value in content["environment"].items()]),
    )


def _charts(figures: Figures) -> list[str]:
    result = figures.result
    times = [(fault.at_s - result.begun_s, fault) for fault in result.faults]
    marks = [Mark(at_s, _style(fault.kind), f"{at_s:.0f} s: {fault}") for at_s, fault in times]
    marks.append(Mark(result.healed_s - result.begun_s, "healed", "all parts work from here on"))

    def drawn(title: str, unit: str, series: Mapping[str, Points], *, logarithmic: bool = False) -> str:
        picture = chart(series, figures.length_s, marks, logarithmic=logarithmic)
        return f"<figure><figcaption>{escape(title)}, {escape(unit)} {legend(list(series))}</figcaption>{picture}</figure>"

    parts = [name for name in ("broker-0", "broker-1", "kafka") if any(name in sample.rss_mib for sample in result.samples)]
    return [
        drawn(
            "Messages", "per second",
            {
                "sent and answered": figures.rate(figures.sent_ms), "received and committed": figures.rate(figures.received_ms),
                "stored in the diverts' topics": figures.rate(figures.diverted_ms),
            },
        ),
        drawn(
            "From send to answer", "ms", {"p50": figures.latency(figures.sends, 0.5), "p99": figures.latency(figures.sends, 0.99)},
            logarithmic=True,
        ),
        drawn(
            "From send to the divert's topic", "ms",
            {"p50": figures.latency(figures.carried, 0.5), "p99": figures.latency(figures.carried, 0.99)}, logarithmic=True,
        ),
        drawn("Messages in all queues", "messages", {"backlog": figures.sampled("backlog")}),
        drawn(
            "Faults and anomalies so far", "count",
            {
                "faults": figures.so_far(fault.at_s for fault in result.faults), "anomalies": figures.so_far(figures.anomalies_s()),
            },
        ),
        drawn("Resident memory", "MiB", {name: figures.sampled(name) for name in parts}),
        drawn("Journal on the disk", "MiB", {"journal": figures.sampled("journal")}),
    ]  # fmt: skip


def _style(kind: str) -> str:
    return kind.partition("-")[0]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join("<tr>" + "".join(_cell(row.get(name)) for name in names) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value)
    return f"<td>{escape(text)}</td>"
