"""The arithmetic of `bench.xa`: figures of a run, medians and spreads of the rounds, ratios to the peer, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from bench.run import markdown
from bench.xa_modes import JAVA, MODES, PEER, PYTHON, Clients

#: Figures of a run: transactions per second of all clients, the milliseconds of one, and how many clients have failed.
Run = Mapping[str, float]
#: The runs of each contender, one per round, by mode and clients.
Results = Mapping[tuple[str, str, Clients], Sequence[Run]]
#: Columns of the table: what a run comes to, with the number of digits.
FIGURES: Final = {
    "transactions/s": ("per_s", 0), "p50 ms": ("p50_ms", 1), "p99 ms": ("p99_ms", 1), "processor ms: client": ("cpu_client_ms", 1),
    "broker": ("cpu_broker_ms", 1), "PostgreSQL": ("cpu_postgres_ms", 1),
}  # fmt: skip
HEAD: Final = ("transaction", "clients", "who", *FIGURES, "ratio transactions/s", "ratio p50", "failures")


def figures(taken_ms: Sequence[float], seconds: float) -> dict[str, float]:
    """Return the figures of a run from the milliseconds of its transactions. Without any, only its failures."""
    if not taken_ms:
        return {"failures": 1}
    ordered = sorted(taken_ms)
    return {
        "failures": 0,
        "per_s": len(ordered) / seconds,
        "p50_ms": ordered[int(len(ordered) * 0.5)],
        "p99_ms": ordered[int(len(ordered) * 0.99)],
    }


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median, with minimum and maximum if there are several values; "-" without any."""
    if not values:
        return "-"
    text = f"{statistics.median(values):,.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def ratios(ours: Sequence[Run], theirs: Sequence[Run], key: str, *, more_is_better: bool) -> list[float]:
    """Return how many times better ours are.

    The ratio is computed round by round, because the other work of the machine differs between rounds. A round in which one of the two has
    failed is omitted.
    """
    found = []
    for our, their in zip(ours, theirs, strict=False):
        if our["failures"] or their["failures"]:
            continue
        above, below = (our[key], their[key]) if more_is_better else (their[key], our[key])
        found.append(above / below)
    return found


def table(results: Results) -> str:
    """Return a Markdown table with one row for each contender. Rows of Bascule show the ratio to the peer."""
    rows: list[Sequence[str]] = [HEAD]
    for (mode, contender, clients), runs in results.items():
        whole = [run for run in runs if not run["failures"]]
        row = [next(each.title for each in MODES if each.name == mode), clients.title, contender]
        row += [spread([run[key] for run in whole], digits) for key, digits in FIGURES.values()]
        theirs = results.get((peer_of(mode), PEER, peer_clients(clients)), ()) if contender in (PYTHON, JAVA) else ()
        for key, more in (("per_s", True), ("p50_ms", False)):
            found = ratios(runs, theirs, key, more_is_better=more)
            row.append(f"**{spread(found, 2)}**" if found else "")
        rows.append([*row, str(sum(int(run["failures"]) for run in runs))])
    return markdown(rows)


def peer_of(mode: str) -> str:
    """Return the mode in which the peer does the same work; "" without one."""
    return next(each.peer for each in MODES if each.name == mode) or ""


def peer_clients(clients: Clients) -> Clients:
    """Return how the peer runs the same number of concurrent transactions: it has threads where Python has processes."""
    return Clients(1, clients.processes * clients.threads)
