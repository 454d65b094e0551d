"""How long a start takes: of everything (`bascule up` with a divert and an ingress), and of a broker beside a running Kafka.

    python -m bench.starts [--rounds 5]

Each round begins without data. `bascule up` is ready when it prints its line `ready`, a broker when its admin server reports that it serves
clients. Results go to bench/results/starts-*.json and .md. The exit code tells whether the median of each start reached its goal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bascule.embedded.kafka import EmbeddedKafka
from bench.recovery import CONFIG
from bench.run import machine, markdown, write_results
from tests.support.system import System, wait_for
from tests.support.up import Up

#: What starts -> the seconds within which it has to be ready (median).
GOAL_S = {"bascule up": 15.0, "broker": 3.0}


def start_of_up(directory: Path) -> float:
    """Return the seconds until `bascule up` is ready."""
    directory.mkdir()
    file = directory / "bascule.toml"
    file.write_text(CONFIG)
    begun_s = time.monotonic()
    with Up(directory, "--config", file):
        return time.monotonic() - begun_s


def start_of_broker(kafka: str, directory: Path, number: int) -> float:
    """Return the seconds until a broker with a new journal serves clients."""
    system = System(kafka, directory, prefix=f"start-{number}")
    begun_s = time.monotonic()
    system.broker.launch()
    try:
        wait_for(system.serves, "a broker that serves clients")
        return time.monotonic() - begun_s
    finally:
        system.broker.stop()


def judge(rounds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return for each start its rounds, their median, and whether the median reached the goal."""
    return {
        what: {
            "rounds_s": [round(each, 2) for each in taken],
            "p50_s": round(statistics.median(taken), 2),
            "goal_s": GOAL_S[what],
            "reached": statistics.median(taken) <= GOAL_S[what],
        }
        for what, taken in rounds.items()
    }


def page(result: Mapping[str, Any]) -> str:
    """Return the result as text."""
    rows = [["start", "goal s (p50)", "p50 s", "rounds s", "reached"]]
    for what, each in result["judged"].items():
        rounds = ", ".join(map(str, each["rounds_s"]))
        rows.append([what, f"{each['goal_s']:g}", f"{each['p50_s']:g}", rounds, "yes" if each["reached"] else "**no**"])
    return f"# Time until a start is ready\n\n{markdown(rows)}\n\n{result['machine']}"


def main() -> int:
    """Run the benchmark. The exit code tells whether both goals were reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each kind, whose median counts (default: 5)")
    options = parser.parse_args()
    rounds: dict[str, list[float]] = {what: [] for what in GOAL_S}
    with tempfile.TemporaryDirectory(prefix="bascule-starts-") as name:
        directory = Path(name)
        for number in range(options.rounds):
            rounds["bascule up"].append(start_of_up(directory / f"up-{number}"))
        with EmbeddedKafka(directory / "kafka") as kafka:
            for number in range(options.rounds):
                rounds["broker"].append(start_of_broker(kafka.bootstrap, directory / f"broker-{number}", number))
    result = {**vars(options), "machine": machine(), "judged": judge(rounds)}
    write_results("starts", result, page(result))
    return int(not all(each["reached"] for each in result["judged"].values()))


if __name__ == "__main__":
    sys.exit(main())
