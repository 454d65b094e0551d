"""What a transaction over several resources costs: against each resource alone, and against doing the same without any atomicity.

    python -m bench.xa [--seconds 5] [--rounds 2] [--threads 1 --threads 8]

One Bascule (broker and Kafka) and one PostgreSQL, which syncs its commits. See README.md for what the figures mean. Results go to
bench/results/ as JSON and as a table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Producer

from bascule.client import Acknowledge, Queue, connect
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.kafka.admin import Topics
from bascule.xa import FileLog, TransactionManager
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from bascule.xa.postgres import PostgresResource
from bench.bascule_up import BasculeUp
from bench.run import machine, write_results

BODY = "x" * 200
INSERT = "INSERT INTO payments (body) VALUES (%s)"
TOPIC = "bench.receipts"
QUEUE = Queue("bench.receipts")
WARM_UP_S = 1.0
#: One thread's transaction, again and again.
Work = Callable[[], None]


@dataclass
class Place:
    """The services, and what works on them."""

    conninfo: str
    kafka: dict[str, Any]
    url: str
    directory: Path

    def resource(self, name: str) -> Any:
        """A resource of its own for each manager."""
        if name == "postgres":
            return PostgresResource(name, self.conninfo, idle_max=32)
        return KafkaResource(name, self.kafka) if name == "kafka" else JmsResource(name, self.url, idle_max=32)


def in_postgres(handle: Any) -> None:
    """One row."""
    handle.execute(INSERT, (BODY,))


def in_kafka(handle: Any) -> None:
    """One record."""
    handle.send(TOPIC, BODY.encode())


def in_jms(handle: Any) -> None:
    """One message."""
    handle.send(QUEUE, BODY)


STEPS = {"postgres": in_postgres, "kafka": in_kafka, "jms": in_jms}


@contextmanager
def transactional(place: Place, *names: str) -> Iterator[Callable[[], Work]]:
    """Each call makes one thread's work: a transaction over the resources named."""
    resources = {name: place.resource(name) for name in names}
    log = FileLog(place.directory / f"{'-'.join(names)}.xalog")
    with TransactionManager("bench-" + "-".join(names), log, list(resources.values())) as manager:

        def work() -> None:
            with manager.begin() as transaction:
                for name, resource in resources.items():
                    STEPS[name](transaction.enlist(resource))

        yield lambda: work


@contextmanager
def plain(place: Place, *names: str) -> Iterator[Callable[[], Work]]:
    """The same without a transaction over all: each resource commits for itself, one after the other."""
    with ExitStack() as opened:

        def one() -> Work:
            calls: list[Work] = []
            for name in names:
                if name == "postgres":
                    database = opened.enter_context(psycopg.connect(place.conninfo, autocommit=True))
                    calls.append(lambda database=database: in_postgres(database))  # type: ignore[misc]
                elif name == "kafka":
                    producer = Producer({**place.kafka, "enable.idempotence": True, "linger.ms": 0})
                    calls.append(lambda producer=producer: (producer.produce(TOPIC, BODY), producer.flush())[0])  # type: ignore[misc]
                else:
                    context = opened.enter_context(connect(place.url, acknowledge=Acknowledge.AUTO))
                    calls.append(lambda context=context: in_jms(context))  # type: ignore[misc]
            return lambda: [call() for call in calls] and None

        yield one


MODES: dict[str, Callable[[Place], Any]] = {
    "PostgreSQL and Kafka, XA": lambda place: transactional(place, "postgres", "kafka"),
    "PostgreSQL and Kafka, not atomic": lambda place: plain(place, "postgres", "kafka"),
    "PostgreSQL and JMS, XA": lambda place: transactional(place, "postgres", "jms"),
    "PostgreSQL and JMS, not atomic": lambda place: plain(place, "postgres", "jms"),
    "PostgreSQL alone, by the manager": lambda place: transactional(place, "postgres"),
    "Kafka alone, by the manager": lambda place: transactional(place, "kafka"),
    "JMS alone, by the manager": lambda place: transactional(place, "jms"),
    "PostgreSQL alone": lambda place: plain(place, "postgres"),
    "Kafka alone": lambda place: plain(place, "kafka"),
    "JMS alone": lambda place: plain(place, "jms"),
}


def measure(place: Place, mode: str, threads: int, seconds: float) -> dict[str, float]:
    """Transactions per second of all threads, and the latency of one at p50 and p99."""
    taken_s: list[list[float]] = [[] for _ in range(threads)]
    failures: list[BaseException] = []
    begun_s = 0.0
    # The first transaction of a thread opens connections, and makes topics.
    ready = threading.Barrier(threads + 1)

    def run(work: Work, took_s: list[float]) -> None:
        try:
            work()
            ready.wait()
            ready.wait()
            while (start_s := time.monotonic()) < begun_s + seconds:
                work()
                if start_s >= begun_s:
                    took_s.append(time.monotonic() - start_s)
        except BaseException as error:
            failures.append(error)
            ready.abort()

    with MODES[mode](place) as make:
        running = [threading.Thread(target=run, args=(make(), each)) for each in taken_s]
        for thread in running:
            thread.start()
        with suppress(threading.BrokenBarrierError):
            ready.wait()
            begun_s = time.monotonic() + WARM_UP_S
            ready.wait()
        for thread in running:
            thread.join()
    if failures:
        raise failures[0]
    all_s = sorted(one for each in taken_s for one in each)
    return {
        "per_s": len(all_s) / seconds,
        "p50_ms": 1000 * statistics.median(all_s),
        "p99_ms": 1000 * all_s[int(len(all_s) * 0.99)],
    }


def table(results: dict[str, dict[int, list[dict[str, float]]]]) -> str:
    """Medians of all rounds, a line for each mode and number of threads."""
    lines = ["| | threads | transactions/s | p50 ms | p99 ms |", "| --- | --- | --- | --- | --- |"]
    for mode, by_threads in results.items():
        for threads, runs in by_threads.items():
            middle = {key: statistics.median(run[key] for run in runs) for key in ("per_s", "p50_ms", "p99_ms")}
            lines.append(f"| {mode} | {threads} | {middle['per_s']:,.0f} | {middle['p50_ms']:.1f} | {middle['p99_ms']:.1f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure all modes in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, action="append")
    options = parser.parse_args()
    threads = options.threads or [1, 8]
    results: dict[str, dict[int, list[dict[str, float]]]] = {mode: {each: [] for each in threads} for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="bascule-bench-") as name, tempfile.TemporaryDirectory(prefix="bascule-bench-") as data:
        Path(data).chmod(0o755)  # PostgreSQL does not run as root
        with BasculeUp(Path(name)) as broker, EmbeddedPostgres(Path(data, "postgres")) as postgres:
            with psycopg.connect(postgres.conninfo, autocommit=True) as database:
                database.execute("CREATE TABLE payments (id bigserial PRIMARY KEY, body text)")
            place = Place(postgres.conninfo, {"bootstrap.servers": broker.kafka}, broker.url, Path(name))
            Topics(place.kafka).create(TOPIC, 1, {})
            for number in range(options.rounds):
                for mode in list(MODES) if number % 2 == 0 else reversed(list(MODES)):
                    for each in threads:
                        result = measure(place, mode, each, options.seconds)
                        results[mode][each].append(result)
                        print(f"{mode}, {each}: {result['per_s']:.0f}/s", file=sys.stderr)
    content = {"machine": machine(), "options": vars(options), "results": results}
    write_results("xa", content, table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
