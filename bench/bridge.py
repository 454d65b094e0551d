"""Bascule's bridge, Apache Camel and Spark's Kafka sink in turns, with one Kafka: throughput, latency, and five kills of each.

    python -m bench.bridge [--records 100000] [--rounds 3] [--rate 100 --rate 1000] [--seconds 20] [--kills 5] [--only camel]

README.md explains the figures. Results go to bench/results/ as JSON and as tables.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from bench.bridge_load import Clients, backlog, kills, latency
from bench.bridge_report import flawed, page
from bench.bridges import BRIDGES, DEFAULT, Bascule, Bridge, versions
from bench.latency import BODY_BYTES, MARK_BYTES
from bench.run import flush_ms, machine, write_results

#: A Kafka that has just started uses three times the processor time for a record, so a short turn before the first round is not counted.
WARM_UP_RECORDS = 20_000
SETTLE_S = 0.02


def settle(servers: str) -> None:
    """Return when the group coordinator of a new Kafka answers; an earlier consumer might be told to rejoin."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "bench"})
    while True:
        try:
            consumer.committed([TopicPartition("none", 0)], timeout=10)
            break
        except KafkaException:
            time.sleep(SETTLE_S)
    consumer.close()


def turn(bridge: Bridge, options: argparse.Namespace, kill_times: int) -> dict[str, Any]:
    """Measure one bridge: on each path a backlog and the fixed rates, then the kills on all paths together."""
    found: dict[str, Any] = {"backlog": {}, "latency": {}, "kills": {}}
    with bridge, ExitStack() as opened:
        clients = Clients(bridge, opened, options.bytes)
        for path in bridge.paths:
            found["backlog"][path] = backlog(bridge, clients, path, options.records)
            report(bridge, f"{path}: {found['backlog'][path]['records_per_s']:,.0f} records/s")
            found["latency"][path] = {}
            for rate in options.rate:
                found["latency"][path][str(rate)] = figures = latency(bridge, clients, path, rate, options.seconds)
                report(bridge, f"{path} at {rate}/s: p50 {figures['p50_ms']:,.0f} ms, p99 {figures['p99_ms']:,.0f} ms")
            bridge.stop()
        if kill_times:
            bridge.start()
            found["kills"] = kills(bridge, clients, options.kill_rate, kill_times)
            report(bridge, f"{kill_times} kills: {found['kills']}")
    return found | {"load_average": os.getloadavg()[0]}


def report(bridge: Bridge, text: str) -> None:
    """Print a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {bridge.run} {text}", file=sys.stderr, flush=True)


def warm_up(kafka: EmbeddedKafka, directory: Path, records: int) -> None:
    """Let Bascule carry some messages, so that Kafka is warm for all."""
    with Bascule(kafka, directory, "warm-up") as bridge, ExitStack() as opened:
        backlog(bridge, Clients(bridge, opened), bridge.paths[0], min(records, WARM_UP_RECORDS))


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Bridges between JMS and Kafka under the same load, in turns.")
    parser.add_argument("--records", type=int, default=100_000, help="messages that wait before the bridge starts (default: 100000)")
    parser.add_argument("--bytes", type=int, default=BODY_BYTES, help=f"size of a body, at least {MARK_BYTES} (default: {BODY_BYTES})")
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of each bridge (default: 3)")
    parser.add_argument("--rate", type=int, action="append", help="messages per second; may be repeated (default: 100 and 1000)")
    parser.add_argument("--seconds", type=int, default=20, help="duration of each run at a fixed rate (default: 20)")
    parser.add_argument("--kills", type=int, default=5, help="kills of each bridge in the first round (default: 5)")
    parser.add_argument("--kill-rate", type=int, default=100, help="messages per second of each path during the kills (default: 100)")
    parser.add_argument("--only", action="append", choices=tuple(BRIDGES), help="measure only this bridge; may be repeated")
    options = parser.parse_args()
    options.rate = options.rate or [100, 1000]
    if min(options.records, options.rounds, options.seconds, options.kill_rate, *options.rate) < 1 or options.kills < 0:
        parser.error("--records, --rounds, --seconds, --rate and --kill-rate are at least 1, and --kills is at least 0")
    if options.bytes < MARK_BYTES:
        parser.error(f"--bytes {options.bytes}: a body has at least {MARK_BYTES} bytes, its mark")
    return options


def main() -> int:
    """Run the benchmark. The exit code tells whether Bascule lost, duplicated or reordered anything."""
    options = arguments()
    chosen = list(dict.fromkeys(options.only or DEFAULT))
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    before = machine()
    with tempfile.TemporaryDirectory(prefix="bascule-bridge-") as name, EmbeddedKafka(Path(name) / "kafka") as kafka:
        settle(kafka.bootstrap)
        warm_up(kafka, Path(name), options.records)
        for number in range(options.rounds):
            # The order changes from round to round.
            for each in chosen if number % 2 == 0 else reversed(chosen):
                bridge = BRIDGES[each](kafka, Path(name), f"{each}-{number + 1}")
                results[each].append(turn(bridge, options, options.kills if number == 0 else 0))
        flushed_ms = flush_ms(Path(name))
    content = {
        "machine": before, "load_average_at_end": os.getloadavg(), "flush_ms": flushed_ms,
        "versions": {**versions(), "Java": find_jdk().version}, "options": vars(options), "results": results,
    }  # fmt: skip
    write_results("bridge", content, page(content))
    return int(flawed(results.get(Bascule.name, [])))


if __name__ == "__main__":
    sys.exit(main())
