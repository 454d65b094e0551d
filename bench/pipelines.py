"""Bascule's exactly-once divert and Spark's own at-least-once Kafka sink, in turns: the same journal, mapping and machine.

    python -m bench.pipelines [--records 100000] [--rounds 2] [--rate 100] [--seconds 20]

README.md explains the figures. Results go to bench/results/ as JSON and as a table.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from bascule.amqp.types import Int
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import Child
from bascule.kafka.admin import Topics
from bench.carry import ADDRESS
from bench.run import machine, markdown, write_results
from tests.support.journal import SyntheticJournal, text_message
from tests.support.system import descendants
from tests.support.usage import cpu_s

DIVERT, SINK, COPY = "divert", "sink", "copy"
TITLES = {
    DIVERT: "Bascule divert, exactly once",
    SINK: "Spark Kafka sink with the same mapping, at least once",
    COPY: "Spark Kafka sink, bytes copied unread, at least once",
}
#: Start of a body: the number of the message, and its time of creation (ns of the monotonic clock).
MARK = re.compile(rb"@bench (\d+) (\d+) ")
BODY_BYTES = 1024
RUN_TIMEOUT_S = 300.0
#: A pause without output after which a run has ended; longer than any pause within a run.
QUIET_S = 3.0
SAMPLE_S = 0.02
#: Messages at a fixed rate before the latency is measured.
WARM_UP_S = 3
#: Share of the records before the measurement starts: by then both have started up, and both are measured from an output to an output.
WARM_UP_SHARE = 0.25
#: A Kafka that has just started uses three times the processor time for a record, so a short run before the first round is not counted.
WARM_UP_RECORDS = 50_000
#: Column: (key of the result, digits, whether more is better).
COLUMNS = {
    "records/s": ("records_per_s", 0, True),
    "pipeline CPU us/record": ("cpu_us", 1, False),
    "Kafka CPU us/record": ("kafka_cpu_us", 1, False),
    "p50 ms": ("p50_ms", 1, False),
    "p99 ms": ("p99_ms", 1, False),
}


def message(number: int) -> bytes:
    """Return a text message of 1 KiB as Qpid JMS would send it, with the properties of the demo."""
    now_ms = int(time.time() * 1000)
    properties = {
        "carrier": "UA", "origin": "EWR", "dest": "IAH", "dep_delay": Int(number % 200), "distance": Int(1400), "tailnum": "N14228",
    }  # fmt: skip
    text = f"@bench {number} {time.monotonic_ns()} "
    return text_message(
        text.ljust(BODY_BYTES, "x"), message_id=f"ID:bench-{number}", destination=ADDRESS, destination_kind="queue",
        timestamp_ms=now_ms, properties=properties,
    )  # fmt: skip


class Reader:
    """A read_committed reader of a topic of one partition, from its start."""

    def __init__(self, servers: str, topic: str) -> None:
        self._consumer = Consumer({
            "bootstrap.servers": servers, "group.id": f"bench-{uuid.uuid4()}", "enable.auto.commit": False,
            "isolation.level": "read_committed", "fetch.wait.max.ms": 10, "auto.offset.reset": "earliest",
        })  # fmt: skip
        self._consumer.assign([TopicPartition(topic, 0, 0)])
        self.seen: Counter[int] = Counter()
        #: Milliseconds from the creation of a message to its arrival, by its number.
        self.latency_ms: dict[int, float] = {}

    def read(self, until: Callable[[], bool], quiet_s: float) -> None:
        """Read until all expected records are there and no record has come for ``quiet_s``."""
        last = time.monotonic()
        while not until() or time.monotonic() - last < quiet_s:
            if time.monotonic() - last > RUN_TIMEOUT_S:
                return
            for record in self._consumer.consume(2_000, 0.01):
                assert record.error() is None, record.error()
                now_ns = time.monotonic_ns()
                mark = MARK.search(record.value() or b"")
                assert mark is not None, "an unknown record"
                number, made_ns = map(int, mark.groups())
                self.seen[number] += 1
                self.latency_ms[number] = (now_ns - made_ns) / 1e6
                last = time.monotonic()

    def close(self) -> None:
        """Close the reader."""
        self._consumer.close()


class Target:
    """Return the end of the target topic for a read_committed reader."""

    def __init__(self, servers: str, topic: str) -> None:
        self._admin = AdminClient({"bootstrap.servers": servers})
        self._at = {TopicPartition(topic, 0): OffsetSpec.latest()}

    def end(self) -> int:
        """Return the last stable offset."""
        (found,) = self._admin.list_offsets(dict(self._at), isolation_level=IsolationLevel.READ_COMMITTED).values()
        return int(found.result().offset)


def settle(servers: str) -> None:
    """Return when the group coordinator of a new Kafka answers; an earlier consumer might be told to rejoin."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "bench"})
    while True:
        try:
            consumer.committed([TopicPartition("none", 0)], timeout=10)
            break
        except KafkaException:
            time.sleep(SAMPLE_S)
    consumer.close()


def tree_cpu_s(root: int) -> float:
    """Return the processor time so far of a process and its descendants."""
    total = 0.0
    for pid in (root, *descendants(root)):
        try:
            total += cpu_s(pid)
        except OSError:
            continue  # the process has just ended
    return total


def throughput(target: Target, child: Child, kafka_pid: int, records: int) -> dict[str, Any]:
    """Return the time from the first visible output after the warm-up to the last output."""
    pid = child.pid
    assert pid is not None
    first: tuple[float, int, float, float] | None = None
    last = (0.0, 0, 0.0, 0.0)
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < deadline:
        assert child.running, "the pipeline has ended"
        end, now = target.end(), time.monotonic()
        if end > last[1]:
            last = (now, end, tree_cpu_s(pid), cpu_s(kafka_pid))
            if first is None and end >= records * WARM_UP_SHARE:
                first = last
        elif end >= records and now - last[0] > QUIET_S:
            break
        time.sleep(SAMPLE_S)
    assert first is not None, "nothing came out"
    # Markers of transactions also have offsets; they are a few in ten thousand.
    written = max(1, last[1] - first[1])
    span_s = max(SAMPLE_S, last[0] - first[0])
    return {
        "records_per_s": written / span_s, "cpu_us": (last[2] - first[2]) / written * 1e6,
        "kafka_cpu_us": (last[3] - first[3]) / written * 1e6, "measured": written, "seconds": span_s,
    }  # fmt: skip


def at_rate(journal: SyntheticJournal, first: int, rate: int, seconds: int) -> int:
    """Append messages at a fixed rate. Return the number after the last message."""
    begun = time.monotonic()
    count = rate * seconds
    for number in range(count):
        time.sleep(max(0.0, begun + number / rate - time.monotonic()))
        journal.send(message(first + number), address=ADDRESS)
    journal.flush()
    return first + count


def measure(what: str, kafka: EmbeddedKafka, directory: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one of the pipelines, with a new journal and a new target topic."""
    prefix, topic = f"{name}-{what}", f"{name}-{what}.out"
    topics = Topics({"bootstrap.servers": kafka.bootstrap})
    for each in (f"{prefix}.journal", topic):
        topics.create(each, 1, {})
    journal = SyntheticJournal(kafka.bootstrap, f"{prefix}.journal")
    journal.start_epoch()
    for number in range(options.records):
        journal.send(message(number), address=ADDRESS)
    journal.flush()
    log = directory / f"{prefix}.log"
    checkpoints = directory / f"{prefix}.checkpoints"
    checkpoints.mkdir()
    command: list[str | Path] = [sys.executable, "-m", "bench.carry", what, kafka.bootstrap, prefix, topic, checkpoints]
    child = Child(command, log_file=log, name=what)
    child.start()
    try:
        assert kafka.pid is not None
        result = throughput(Target(kafka.bootstrap, topic), child, kafka.pid, options.records)
        reader = Reader(kafka.bootstrap, topic)
        reader.read(lambda: len(reader.seen) >= options.records, QUIET_S)
        from_number = options.records
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(at_rate, journal, from_number, options.rate, WARM_UP_S + options.seconds)
            reader.read(sent.done, QUIET_S)
            total = sent.result()
        reader.read(lambda: len(reader.seen) >= total, QUIET_S)
        reader.close()
    finally:
        child.stop()
    counted = [reader.latency_ms[number] for number in range(from_number + WARM_UP_S * options.rate, total) if number in reader.latency_ms]
    quantiles = statistics.quantiles(counted, n=100, method="inclusive")
    return result | {
        "p50_ms": quantiles[49], "p99_ms": quantiles[98], "load_average": os.getloadavg()[0], "sent": total,
        "lost": total - len(reader.seen), "duplicated": sum(reader.seen.values()) - len(reader.seen),
    }  # fmt: skip


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table: medians of the rounds, and how many times better Bascule is."""
    rows = [["pipeline", *COLUMNS, "sent", "lost", "duplicated"]]
    medians = {what: {key: statistics.median(run[key] for run in runs) for key, _, _ in COLUMNS.values()} for what, runs in results.items()}
    for what, runs in results.items():
        figures = [f"{medians[what][key]:,.{digits}f}" for key, digits, _ in COLUMNS.values()]
        rows.append([TITLES[what], *figures, *(str(sum(run[key] for run in runs)) for key in ("sent", "lost", "duplicated"))])
    for what in [what for what in medians if what != DIVERT and DIVERT in medians]:
        ours, theirs = medians[DIVERT], medians[what]
        ratios = [ours[key] / theirs[key] if more else theirs[key] / ours[key] for key, _, more in COLUMNS.values()]
        rows.append([f"**divert : {what}**", *(f"**{value:.2f}**" for value in ratios), "", "", ""])
    return markdown(rows)


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Bascule's divert and Spark's Kafka sink on the same journal, in turns.")
    parser.add_argument("--records", type=int, default=100_000, help="records in the journal before a run starts (default: 100000)")
    parser.add_argument("--rounds", type=int, default=2, help="number of runs, whose median counts (default: 2)")
    parser.add_argument("--rate", type=int, default=100, help="messages per second of the latency measurement (default: 100)")
    parser.add_argument(
        "--seconds", type=int, default=20, help=f"duration of the latency measurement, after {WARM_UP_S} s of warm-up (default: 20)"
    )
    parser.add_argument("--only", action="append", choices=tuple(TITLES), help="measure only this pipeline; may be repeated")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark. The exit code tells whether Bascule's divert lost or duplicated anything."""
    options = arguments()
    results: dict[str, list[dict[str, Any]]] = {what: [] for what in TITLES if not options.only or what in options.only}
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as name, EmbeddedKafka(Path(name) / "kafka") as kafka:
        settle(kafka.bootstrap)
        short = {"records": min(options.records, WARM_UP_RECORDS), "seconds": 1}
        measure(next(iter(results)), kafka, Path(name), "warm-up", argparse.Namespace(**{**vars(options), **short}))
        for number in range(options.rounds):
            # The order changes from round to round.
            for what in list(results) if number % 2 == 0 else reversed(list(results)):
                result = measure(what, kafka, Path(name), f"round{number + 1}", options)
                results[what].append(result)
                said = ", ".join(f"{title} {result[key]:,.{digits}f}" for title, (key, digits, _) in COLUMNS.items())
                print(
                    f"round {number + 1} {what}: {said}, lost {result['lost']}, duplicated {result['duplicated']}",
                    file=sys.stderr,
                    flush=True,
                )
    page = table(results) + f"\n\n{options.records:,} records of {BODY_BYTES} bytes; latency at {options.rate}/s for {options.seconds} s."
    content = {"machine": machine(), "options": vars(options), "results": results}
    write_results("pipelines", content, page)
    return int(any(run["lost"] or run["duplicated"] for run in results.get(DIVERT, [])))


if __name__ == "__main__":
    sys.exit(main())
