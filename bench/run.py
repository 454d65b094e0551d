"""The same load on Bascule and on Apache Artemis, in turns: rates, latencies, memory and processor time side by side.

    python -m bench.run [--mode sync-1x1 ...] [--seconds 8] [--rounds 2] [--only artemis|bascule] [--artemis created ...]

README.md explains the figures. Results go to bench/results/ as JSON and as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from bascule import __version__
from bascule.core.build import build
from bench.artemis import JOURNALS, Artemis, JournalUnavailable
from bench.bascule_up import BasculeUp
from tests.support.java import java_command
from tests.support.usage import cpu_s, memory_mib

RESULTS = Path(os.environ.get("BASCULE_BENCH_RESULTS") or Path(__file__).with_name("results"))
#: The client shares the processors with the brokers. With the first compiler only, it is fast at once and compiles less.
CLIENT_JVM = ("-Xms256m", "-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
WARM_UP_S = 3
#: The flush time of the disk is the median of this number of file syncs.
FLUSHES = 100
#: Time in addition to the measured time: start, warm-up, and draining the queue.
RUN_TIMEOUT_S = 120


class Broker(Protocol):
    """A system under measurement."""

    name: str

    @property
    def url(self) -> str:
        """Return the URL for clients."""

    @property
    def durability(self) -> str:
        """Return what an answer to a sender means."""

    @property
    def processes(self) -> dict[str, int]:
        """Return process ids by part."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A kind of load. ``options`` are those of java/Load.java."""

    name: str
    title: str
    options: str
    destination: str = "queue"


MODES = (
    Mode("sync-1x1", "persistent, sync, 1 producer, 1 consumer", "--send sync"),
    Mode("sync-4x4", "persistent, sync, 4 producers, 4 consumers", "--send sync --producers 4 --consumers 4"),
    Mode("async", "persistent, asynchronous, window 1000", "--send async"),
    Mode("tx-1", "persistent, transactions of 1", "--send tx --batch 1"),
    Mode("tx-100", "persistent, transactions of 100", "--send tx --batch 100"),
    Mode("non-persistent", "non-persistent", "--send sync --persistent false"),
    Mode(
        "topic-3",
        "persistent, sync, topic with 3 non-durable subscribers: neither broker stores the message",
        "--send sync --consumers 3",
        "topic",
    ),
)

#: Column: (key of the result, whether more is better).
COLUMNS = {
    "sent/s": ("sent_per_s", True),
    "received/s": ("received_per_s", True),
    "send p50 ms": ("send_p50_ms", False),
    "send p99 ms": ("send_p99_ms", False),
    "end to end p50 ms": ("end_p50_ms", False),
    "end to end p99 ms": ("end_p99_ms", False),
}
#: Column: key of what each process of a broker used.
USED = {"CPU us/message": "cpu_us", "RSS MB": "rss_mb"}


def load(broker: Broker, mode: Mode, seconds: int, run: str) -> dict[str, Any]:
    """Run the load client once. Return its figures, and what each process of the broker used meanwhile."""
    command = java_command("Load", "--url", broker.url, "--to", f"{mode.destination}:bench.{mode.name}.{run}", jvm=CLIENT_JVM)
    command += [*mode.options.split(), "--seconds", str(seconds), "--warmup-s", str(WARM_UP_S)]
    processes = broker.processes
    before = {part: cpu_s(pid) for part, pid in processes.items()}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds + RUN_TIMEOUT_S, check=False)
        result: dict[str, Any] = json.loads(done.stdout or '{"failures": 1}')
    except subprocess.TimeoutExpired:
        result = {"failures": 1, "timeout": True}
    messages = result.get("sent") or 1
    result["cpu_us"] = {part: round((cpu_s(pid) - before[part]) * 1e6 / messages) for part, pid in processes.items()}
    result["rss_mb"] = {part: rss_mb(pid) for part, pid in processes.items()}
    return result


def rss_mb(pid: int) -> float:
    """Return the current resident memory of a process."""
    return round(memory_mib(pid), 1)


def flaws(result: dict[str, Any]) -> str:
    """Return what went wrong as text; "" if nothing did."""
    return ", ".join(f"{result[key]} {key}" for key in ("failures", "lost", "duplicated", "disordered") if result.get(key))


def table(results: dict[str, dict[str, list[dict[str, Any]]]], brokers: Sequence[str]) -> str:
    """Return a Markdown table: a line per mode and broker with medians and spread of the rounds, then Bascule beside Artemis."""
    rows = [["mode", "broker", *COLUMNS, *USED, "flaws"]]
    for mode in MODES:
        rounds = {broker: results.get(mode.name, {}).get(broker, []) for broker in brokers}
        whole = {broker: [run for run in runs if "sent_per_s" in run] for broker, runs in rounds.items()}
        for broker, runs in rounds.items():
            if not runs:
                continue
            figures = [spread([run[key] for run in whole[broker]], 2) for key, _ in COLUMNS.values()]
            used = [used_by_parts(whole[broker], key) for key in USED.values()]
            rows.append([mode.name, broker, *figures, *used, "; ".join(filter(None, map(flaws, runs))) or "none"])
        for other in brokers:
            both = list(zip(rounds.get("bascule", []), rounds[other], strict=False)) if other != "bascule" else []
            if both := [each for each in both if all("sent_per_s" in run for run in each)]:
                ours, theirs = zip(*both, strict=True)
                better = [ratios(ours, theirs, itemgetter(key), more) for key, more in COLUMNS.values()]
                shares = [ratios(ours, theirs, together(key), True) for key in USED.values()]
                beside = "" if other == "artemis" else f" to {other}"
                rows.append([mode.name, f"**ratio{beside}**", *better, *(f"{share} of Artemis" for share in shares), ""])
    return markdown(rows)


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median of a figure over the rounds, with the least and the greatest in parentheses; "-" without a round."""
    if not values:
        return "-"
    middle, least, greatest = (f"{each:,.{digits}f}" for each in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least} to {greatest})"


def together(key: str) -> Callable[[Mapping[str, Any]], float]:
    """Return a function of a round: what all processes of the broker used together."""
    return lambda run: float(sum(run[key].values()))


def used_by_parts(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return what each process used and, if there are several, what all of them used together."""
    parts = {part: [run[key][part] for run in runs] for part in (runs[0][key] if runs else ())}
    if len(parts) > 1:
        parts["together"] = [*map(together(key), runs)]
    return ", ".join(f"{part} {spread(values, 0)}" for part, values in parts.items()) or "-"


def ratios(
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    figure: Callable[[Mapping[str, Any]], float],
    more_is_better: bool,
) -> str:
    """Return how much better Bascule is by a figure: the ratio of the medians, and the range of the ratios of the rounds.

    ``ours`` and ``theirs`` are the rounds of Bascule and of Artemis. Each round succeeded for both brokers. The ratio is Bascule divided by
    Artemis, or Artemis divided by Bascule if a smaller figure is better. It is "-" if a divisor is 0.
    """
    above, below = (ours, theirs) if more_is_better else (theirs, ours)
    pairs = [(figure(each), figure(other)) for each, other in zip(above, below, strict=True)]
    middle, other = (statistics.median(map(figure, runs)) for runs in (above, below))
    if not other or not all(each for _, each in pairs):
        return "-"
    of_rounds = [each / other for each, other in pairs]
    text = f"**{middle / other:.2f}**"
    return text if len(of_rounds) == 1 else f"{text} ({min(of_rounds):.2f} to {max(of_rounds):.2f})"


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Bascule and Apache Artemis under the same load, in turns.")
    parser.add_argument(
        "--mode", action="append", choices=[mode.name for mode in MODES], help="mode to measure; may be repeated (default: all)"
    )
    parser.add_argument("--seconds", type=int, default=8, help=f"seconds to measure, after {WARM_UP_S} s of warm-up (default: 8)")
    parser.add_argument("--rounds", type=int, default=2, help="number of runs, whose median counts (default: 2)")
    parser.add_argument("--only", choices=("artemis", "bascule"), help="measure only this broker")
    parser.add_argument(
        "--artemis", action="append", choices=list(JOURNALS),
        help="journal of Artemis; may be repeated (default: as artemis create makes it, and all others that the machine allows)",
    )  # fmt: skip
    return parser.parse_args()


def peers(
    directory: Path, journals: Sequence[str] | None, make: Callable[[Path, str], Artemis] = Artemis
) -> tuple[list[Artemis], list[str]]:
    """Return instances of Artemis with these journals, or with all that this machine allows, and why others are not measured.

    Of two instances with the same journal, only the first one is returned.
    """
    found: list[Artemis] = []
    missing: list[str] = []
    for journal in journals or JOURNALS:
        try:
            peer = make(directory / journal, journal)
        except JournalUnavailable as error:
            missing.append(f"artemis-{journal} was not measured: {error}")
            continue
        if all(peer.journal != other.journal for other in found):
            found.append(peer)
    return found, missing


def machine() -> dict[str, Any]:
    """Return a description of the machine and the versions."""
    said = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)", said, re.MULTILINE)
    cpu = model[1] if model else platform.processor()
    about = {"system": platform.platform(), "cores": os.cpu_count(), "cpu": cpu, "python": platform.python_version(), "build": build()}
    return {**about, "load_average": os.getloadavg()}


def flush_ms(directory: Path) -> float:
    """Return the median time of an fdatasync after 512 more bytes of a file, in ms: what a disk needs for a small commit."""
    taken_ms = []
    with (directory / "flush").open("wb", buffering=0) as file:
        for _ in range(FLUSHES):
            file.write(b"x" * 512)
            start_s = time.monotonic()
            os.fdatasync(file.fileno())
            taken_ms.append(1000 * (time.monotonic() - start_s))
    return statistics.median(taken_ms)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *others = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *others))


def write_results(bench: str, content: Mapping[str, Any], page: str) -> None:
    """Write the results of a benchmark as JSON and as a page, which ends with the build that ran, and print the page."""
    page = f"{page}\n\nBascule {__version__}, {build()} build, Python {platform.python_version()}."
    RESULTS.mkdir(exist_ok=True)
    name = RESULTS / "-".join(filter(None, (bench, time.strftime("%Y%m%d-%H%M%S"))))
    name.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    name.with_suffix(".md").write_text(f"{page}\n")
    print(page)


def main() -> int:
    """Run the benchmark. The exit code tells whether any run had a flaw."""
    options = arguments()
    chosen = [mode for mode in MODES if not options.mode or mode.name in options.mode]
    results: dict[str, dict[str, list[dict[str, Any]]]] = {mode.name: {} for mode in chosen}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bascule-bench-")))
        brokers: list[Broker] = []
        missing: list[str] = []
        if options.only != "artemis":
            brokers.append(stack.enter_context(BasculeUp(directory / "bascule")))
        if options.only != "bascule":
            found, missing = peers(directory / "artemis", options.artemis)
            brokers += map(stack.enter_context, found)
        for number in range(options.rounds):
            for mode in chosen:
                # The order changes from round to round.
                for broker in brokers if number % 2 == 0 else reversed(brokers):
                    result = load(broker, mode, options.seconds, str(number))
                    results[mode.name].setdefault(broker.name, []).append(result)
                    rate = f"{result.get('sent_per_s', 0):,.0f} sent/s, {result.get('received_per_s', 0):,.0f} received/s"
                    print(f"round {number + 1} {mode.name} {broker.name}: {rate} {flaws(result)}", file=sys.stderr, flush=True)
        durability = [*(broker.durability for broker in brokers), *missing]
        flushed_ms = flush_ms(directory)
        names = [broker.name for broker in brokers]
    page = "\n".join(
        [
            table(results, names),
            "",
            f"Medians of {options.rounds} rounds of {options.seconds} s, with the least and the greatest in parentheses.",
            f"A flush of the disk took {flushed_ms:.2f} ms (median of {FLUSHES}).",
            "",
            *(f"- {line}" for line in durability),
            *(f"- {mode.name}: {mode.title}" for mode in chosen),
        ]
    )
    content = {"machine": machine(), "flush_ms": flushed_ms, "seconds": options.seconds, "rounds": options.rounds}
    content |= {"durability": durability, "results": results}
    write_results("", content, page)
    return int(any(flaws(run) for modes in results.values() for runs in modes.values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
