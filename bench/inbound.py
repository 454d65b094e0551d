"""Records per second through endpoints of the Kafka resource adapter, compared with a plain consumer loop in the same run.

    python -m bench.inbound [--records 20000] [--transactions 1000]

The benchmark prints a line for each case: a plain loop and endpoints that do nothing; the same with a wait of 1 ms for each record; and a
row in PostgreSQL with a receipt in Kafka, by a plain loop (not atomic: an autocommit and an asynchronous send) and in a transaction for
each record.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from confluent_kafka import Consumer, Producer

from bascule.adapter.inbound import Activation, ActivationSpec, InboundLog, Record, Xa
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.kafka.admin import Topics
from bascule.xa import FileLog, TransactionManager
from bascule.xa.kafka import KafkaResource
from bascule.xa.postgres import PostgresResource

WORKERS = (1, 4, 16)
PARTITIONS = 4
VALUE = b"x" * 200
WAIT_S = 0.001
DEADLINE_S = 300.0
#: Share of the records that is not measured, because of joining the group and of first connections.
WARM = 0.1


class Clock:
    """Counts records, and notes when the first measured record and the last record came."""

    def __init__(self, records: int) -> None:
        self._count = itertools.count(1)
        self._first, self._last = int(records * WARM), records
        self._times: dict[int, float] = {}
        self.ended = threading.Event()

    def tick(self) -> None:
        number = next(self._count)
        if number in (self._first, self._last):
            self._times[number] = time.monotonic()
            if number == self._last:
                self.ended.set()

    def rate(self) -> float:
        assert self.ended.wait(DEADLINE_S), "not all records came"
        return (self._last - self._first) / (self._times[self._last] - self._times[self._first])


class Bench:
    def __init__(self, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, directory: Path) -> None:
        self.settings = {"bootstrap.servers": kafka.bootstrap}
        self.conninfo = postgres.conninfo
        self._directory = directory
        self._numbers = itertools.count()
        self._first: float | None = None
        topics = Topics(self.settings)
        topics.create("receipts", PARTITIONS, {})
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            connection.execute("CREATE TABLE payments (id text, at int)")

    def filled(self, records: int) -> str:
        name = f"in{next(self._numbers)}"
        Topics(self.settings).create(name, PARTITIONS, {})
        producer = Producer({**self.settings, "queue.buffering.max.messages": 1_000_000})
        for number in range(records):
            producer.produce(name, VALUE, str(number).encode())
        producer.flush(60)
        return name

    def loop(self, records: int, work: Callable[[bytes, int], None]) -> float:
        """Run one thread: poll, work, and commit once for each batch."""
        topic, clock = self.filled(records), Clock(records)
        consumer = Consumer({**self.settings, "group.id": topic, "auto.offset.reset": "earliest", "enable.auto.commit": False})
        consumer.subscribe([topic])
        while not clock.ended.is_set():
            for message in consumer.consume(500, 0.1):
                work(message.key(), message.offset())
                clock.tick()
            if consumer.assignment():
                consumer.commit(asynchronous=True)
        consumer.close()
        return clock.rate()

    def adapter(self, records: int, workers: int, work: Callable[[Record], None]) -> float:
        topic, clock = self.filled(records), Clock(records)

        def endpoint(record: Record) -> None:
            work(record)
            clock.tick()

        with self._active(ActivationSpec(topics=(topic,), group=topic, workers=workers), endpoint):
            return clock.rate()

    def xa(self, records: int, workers: int) -> float:
        topic, clock = self.filled(records), Clock(records)
        database, kafka = PostgresResource("db", self.conninfo), KafkaResource("kafka", self.settings)
        inbound = InboundLog("inbound", self.settings, group=topic)
        manager = TransactionManager("bench", FileLog(self._directory / f"{topic}.xalog"), [inbound, database, kafka])

        def endpoint(record: Record) -> None:
            manager.enlist(database).execute("INSERT INTO payments VALUES (%s, %s)", (record.key, record.offset))
            manager.enlist(kafka).send("receipts", record.value, record.key)
            clock.tick()

        spec = ActivationSpec(topics=(topic,), group=topic, workers=workers, transacted=Xa(manager, inbound, kafka))
        with manager, self._active(spec, endpoint):
            rate = clock.rate()
        for each in (database, kafka, inbound):
            each.close()
        return rate

    def plain_row_and_receipt(self, records: int) -> float:
        producer = Producer(self.settings)
        with psycopg.connect(self.conninfo, autocommit=True) as connection:

            def work(key: bytes, offset: int) -> None:
                connection.execute("INSERT INTO payments VALUES (%s, %s)", (key, offset))
                producer.produce("receipts", VALUE, key)
                producer.poll(0)

            return self.loop(records, work)

    @contextmanager
    def _active(self, spec: ActivationSpec, endpoint: Callable[[Record], None]) -> Iterator[None]:
        activation = Activation(self.settings, spec, endpoint)
        activation.start()
        try:
            yield
        finally:
            activation.stop(30.0)

    def line(self, name: str, rate: float, *, first: bool = False) -> None:
        """``first`` is the rate that later lines are compared with."""
        self._first = rate if first or self._first is None else self._first
        print(f"{name:<48} {rate:>10,.0f} records/s  {rate / self._first:>6.2f} of the loop", flush=True)


def run(bench: Bench, records: int, transactions: int) -> None:
    bench.loop(records // 4, lambda *_: None)  # the first case warms Kafka up
    bench.line("consumer loop, nothing to do", bench.loop(records, lambda *_: None), first=True)
    for workers in WORKERS:
        bench.line(f"endpoint, nothing to do, workers {workers}", bench.adapter(records, workers, lambda _: None))
    bench.line("consumer loop, 1 ms of waiting", bench.loop(records // 10, lambda *_: time.sleep(WAIT_S)), first=True)
    for workers in WORKERS:
        bench.line(f"endpoint, 1 ms of waiting, workers {workers}", bench.adapter(records // 10, workers, lambda _: time.sleep(WAIT_S)))
    bench.line("consumer loop, row and receipt, not atomic", bench.plain_row_and_receipt(transactions), first=True)
    for workers in WORKERS:
        bench.line(
            f"endpoint, row and receipt in XA, workers {workers}", bench.xa(transactions if workers > 1 else transactions // 4, workers)
        )
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--transactions", type=int, default=1_000)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bascule-inbound-"))
    directory.chmod(0o755)  # PostgreSQL does not run as root
    try:
        with EmbeddedKafka(directory / "kafka") as kafka, EmbeddedPostgres(directory / "postgres") as postgres:
            run(Bench(kafka, postgres, directory), arguments.records, arguments.transactions)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
