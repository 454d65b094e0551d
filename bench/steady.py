"""Steady traffic for an hour: whether journal, memory and start time stay constant, minute by minute.

    python -m bench.steady [--seconds 3600] [--rate 200] [--body-bytes 1024]

A Python client sends persistent messages to one queue at a fixed rate, and another one receives them. The broker keeps the journal no
longer than needed (`journal.retention_s = 0`). The benchmark kills the broker a few times at the beginning of the run and again at its end:
the start time is the time until the broker serves again. It prints a line every minute, and compares the thirds of the run at the end.
Results go to bench/results/steady-*.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bascule.client import Acknowledge, Message, Queue, connect
from bascule.kafka.history import TopicHistory
from bench.bascule_up import BasculeUp
from bench.run import machine, markdown, rss_mb, write_results
from tests.soak.figures import quantile
from tests.support.system import wait_for
from tests.support.usage import cpu_s, disk_mib

QUEUE = Queue("steady")
CONFIG = "[journal]\nretention_s = 0\n"
#: Time of the first kill: duplicate windows and caches are full by then.
SETTLED_S = 150.0
MINUTE_S = 60.0
START_TIMEOUT_S = 300.0
#: Kills at each end of the run.
KILLS = 3
SEND_TIMEOUT_S = 300.0
RECEIVE_S = 1.0
#: Measure -> how much the peak of the last third may exceed the first one's, in addition to a tenth. Kafka deletes the journal in whole
#: segments of 140 MiB.
FLAT = {
    "journal_mb": 145.0,
    "journal_records": 60_000.0,
    "snapshots_mb": 10.0,
    "kafka_mb": 300.0,
    "rss_mb": 10.0,
    "kafka_rss_mb": 50.0,
    "snapshot_age_s": 60.0,
    "depth": 1_000.0,
    "send_p99_ms": 20.0,
}
#: The same for the medians of the starts at both ends. Processor time does not depend on other work of the machine.
FLAT_STARTS = {"start_s": 1.0, "start_cpu_s": 0.2}
SHARE = 0.1
COLUMNS = ("minute", "sent", "sent_per_s", "send_p50_ms", *FLAT)


class Traffic:
    """A sender and a receiver on threads of their own, until they are stopped."""

    def __init__(self, url: str, rate: float, body_bytes: int) -> None:
        self._url = f"failover:({url})"
        self._rate = rate
        self._body = "x" * body_bytes
        self._stopping = threading.Event()
        self._latencies_ms: list[float] = []
        self.sent = 0
        self.seen: set[int] = set()
        self.duplicated = 0
        self.errors: list[str] = []
        self._sender, self._receiver = (threading.Thread(target=self._guarded, args=(work,)) for work in (self._send, self._receive))
        self._sender.start()
        self._receiver.start()

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            self.errors.append(f"{work.__name__}: {error!r}")

    def _send(self) -> None:
        with connect(self._url, timeout_s=SEND_TIMEOUT_S) as context:
            producer = context.producer(QUEUE)
            due_s = time.monotonic()
            while not self._stopping.is_set():
                due_s += 1 / self._rate
                time.sleep(max(0.0, due_s - time.monotonic()))
                begun_s = time.monotonic()
                producer.send(Message(self._body, properties={"n": self.sent}))
                self.sent += 1
                self._latencies_ms.append((time.monotonic() - begun_s) * 1000)

    def _receive(self) -> None:
        with connect(self._url, acknowledge=Acknowledge.AUTO, timeout_s=SEND_TIMEOUT_S) as context, context.consumer(QUEUE) as consumer:
            while self._sender.is_alive() or len(self.seen) < self.sent:
                message = consumer.receive(RECEIVE_S)
                if message is not None:
                    # After a kill, unacknowledged messages are redelivered, and marked.
                    self.duplicated += message.properties["n"] in self.seen and not message.redelivered
                    self.seen.add(message.properties["n"])

    def latencies_ms(self) -> list[float]:
        """Return the time of the sends since the last call."""
        taken, self._latencies_ms = self._latencies_ms, []
        return taken

    def stop(self) -> None:
        """Stop sending, and return when all messages are received."""
        self._stopping.set()
        self._sender.join(SEND_TIMEOUT_S)
        self._receiver.join(SEND_TIMEOUT_S)


class Place:
    """The broker under test, and its measures."""

    def __init__(self, broker: BasculeUp) -> None:
        self.broker = broker
        kafka = {"bootstrap.servers": broker.kafka}
        self._journal = TopicHistory(kafka, "bascule.journal", 0)
        self._snapshots = TopicHistory(kafka, "bascule.snapshots", 0)
        self._logs = broker.data_dir / "kafka" / "data"

    def kill(self) -> dict[str, float]:
        """Kill the broker with kill -9, and start it. Return the seconds until it serves, and the processor time of the new process."""
        killed_s = time.monotonic()
        os.kill(self.broker.processes["broker"], signal.SIGKILL)
        wait_for(lambda: self.broker.ask("status")["serving"], "the broker to serve again", START_TIMEOUT_S)
        start_s = time.monotonic() - killed_s
        return {"start_s": start_s, "start_cpu_s": cpu_s(self.broker.processes["broker"])}

    def look(self) -> dict[str, float]:
        """Return the current sizes."""
        processes = self.broker.processes
        return {
            "journal_mb": round(disk_mib(self._logs / "bascule.journal-0"), 1),
            "journal_records": self._journal.latest() - self._journal.earliest(),
            "snapshots_mb": round(disk_mib(self._logs / "bascule.snapshots-0"), 1),
            "kafka_mb": round(disk_mib(self._logs), 1),
            "rss_mb": rss_mb(processes["broker"]),
            "kafka_rss_mb": rss_mb(processes["kafka"]),
            "snapshot_age_s": self._snapshot_age_s(),
            "depth": sum(queue["messages"] + queue["delivering"] for queue in self.broker.ask("status")["queues"]),
        }

    def _snapshot_age_s(self) -> float:
        end = self._snapshots.latest()
        stamps = [record.timestamp()[1] for record in self._snapshots.records(max(0, end - 1), end)]
        return round(time.time() - stamps[-1] / 1000, 1) if stamps else 0.0


def judge(minutes: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Return for each measure its peak in the three thirds, and whether the last one is no higher than the first."""
    third = max(1, len(minutes) // 3)
    parts = [minutes[:third], minutes[third:-third] or minutes[:third], minutes[-third:]]
    judged = {}
    for name, slack in FLAT.items():
        peaks = [max(minute[name] for minute in part) for part in parts]
        judged[name] = {"peaks": peaks, "flat": peaks[2] <= peaks[0] * (1 + SHARE) + slack}
    return judged


def judge_starts(starts: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Return the medians of the starts at both ends of the run, and whether the last is no higher."""
    judged = {}
    for name, slack in FLAT_STARTS.items():
        young, old = (statistics.median(start[name] for start in part) for part in (starts[:KILLS], starts[KILLS:]))
        judged[name] = {"peaks": [round(young, 2), round(old, 2)], "flat": old <= young * (1 + SHARE) + slack}
    return judged


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return a Markdown table."""
    return markdown([columns, *([f"{row[name]:,g}" for name in columns] for row in rows)])


def page(result: Mapping[str, Any]) -> str:
    """Return the result as text."""
    starts = ", ".join(
        f"{each['start_s']:.1f} s ({each['start_cpu_s']:.2f} s of processor time) after {each['at_s']:,.0f} s of traffic"
        for each in result["starts"]
    )
    flat = "flat" if all(each["flat"] for each in result["judged_starts"].values()) else "**not flat**"
    lines = [
        f"# {result['seconds']:,.0f} s of steady traffic, {result['rate']:g} messages/s of {result['body_bytes']:,} bytes",
        "",
        f"{result['sent']:,} sent, {result['received']:,} received, {result['lost']:,} lost, {result['duplicated']:,} unmarked duplicates.",
        f"From kill -9 to serving, {flat}: {starts}.",
        "The first kills are before the first minute shown: the broker's memory is that of one process.",
        "",
        markdown(
            [
                ["measure", "peak of 1st third", "2nd", "3rd", "flat"],
                *(
                    [name, *(f"{peak:,g}" for peak in each["peaks"]), "yes" if each["flat"] else "**no**"]
                    for name, each in result["judged"].items()
                ),
            ]
        ),
        "",
        table(result["minutes"], COLUMNS),
        "",
        f"{result['machine']}",
    ]
    return "\n".join(lines)


def kills(place: Place, at_s: float) -> list[dict[str, float]]:
    """Measure starts after kills, one after the other."""
    starts = []
    for _ in range(KILLS):
        starts.append({"at_s": round(at_s), **place.kill()})
        print(json.dumps(starts[-1]), flush=True)
    return starts


def measure(place: Place, traffic: Traffic, seconds: float) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Kill, sample every minute, and kill again. Return the minutes and the starts."""
    begun_s = time.monotonic()
    settled_s = min(SETTLED_S, seconds / 4)
    time.sleep(settled_s)
    if traffic.errors or not traffic.seen:
        sys.exit(f"no traffic: {traffic.errors}")
    starts = kills(place, settled_s)
    traffic.latencies_ms()
    minutes: list[dict[str, float]] = []
    due_s, sent = time.monotonic(), traffic.sent
    while time.monotonic() - begun_s < seconds:
        due_s += min(MINUTE_S, seconds / 12)
        time.sleep(max(0.0, due_s - time.monotonic()))
        latencies_ms = traffic.latencies_ms()
        minute = {
            "minute": round((time.monotonic() - begun_s) / 60, 1),
            "sent": traffic.sent,
            "sent_per_s": round((traffic.sent - sent) / min(MINUTE_S, seconds / 12), 1),
            "send_p50_ms": round(quantile(latencies_ms, 0.5), 2),
            "send_p99_ms": round(quantile(latencies_ms, 0.99), 2),
            **place.look(),
        }
        sent = traffic.sent
        minutes.append(minute)
        print(json.dumps(minute), flush=True)
    return minutes, starts + kills(place, time.monotonic() - begun_s)


def main() -> int:
    """Run the benchmark. The exit code tells whether everything stayed constant and nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--body-bytes", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bascule-steady-") as directory:
        config = Path(directory, "bascule.toml")
        config.write_text(CONFIG)
        with BasculeUp(Path(directory), "--config", str(config)) as broker:
            traffic = Traffic(broker.url, options.rate, options.body_bytes)
            try:
                minutes, starts = measure(Place(broker), traffic, options.seconds)
            finally:
                traffic.stop()
    result = {
        **vars(options),
        "machine": machine(),
        "sent": traffic.sent,
        "received": len(traffic.seen),
        "lost": traffic.sent - len(traffic.seen),
        "duplicated": traffic.duplicated,
        "errors": traffic.errors,
        "starts": starts,
        "judged": judge(minutes),
        "judged_starts": judge_starts(starts),
        "minutes": minutes,
    }
    write_results("steady", result, page(result))
    judged = (*result["judged"].values(), *result["judged_starts"].values())
    return int(bool(result["lost"] or result["duplicated"] or traffic.errors or not all(each["flat"] for each in judged)))


if __name__ == "__main__":
    sys.exit(main())
