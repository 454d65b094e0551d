"""The load of bench/bridge.py: clients of one bridge, a backlog, fixed rates, and kills.

Every message has a mark with its phase and number. All latencies begin when a message was due, so a stall counts for each message that it
delays.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from bascule.client import Message, Queue, connect
from bascule.core.errors import Unavailable
from bench.bridges import FROM_KAFKA, STORED_S, TO_KAFKA, Bridge, Sender, Usage
from bench.latency import BODY_BYTES, LINGER_MS, POLL_S, WARM_UP_RATE, WARM_UP_S, Arrivals, at_rate, judged, numbered
from tests.support.speed import SLOWNESS
from tests.support.system import Late, wait_for

#: Share of a backlog before the measurement: by then the bridge has started up.
WARM_UP_SHARE = 0.25
#: A pause without arrivals after which the missing messages count as lost; longer than a restart of any bridge.
QUIET_S = 60.0 * SLOWNESS
#: After the last expected message, duplicates may follow for so long.
DUPLICATES_S = 5.0
#: Longest backlog or drain.
ARRIVAL_MAX_S = 1_800.0
#: Between two kills each path carries messages for so long.
BETWEEN_KILLS_S = 3.0
#: A reader asks for so many records at a time.
READ_MAX = 2_000
BACKLOG, KILLS = "backlog", "kills"


class KafkaSender(Sender):
    """Writes records to a topic, each within ``LINGER_MS``."""

    def __init__(self, servers: str, topic: str) -> None:
        self._producer = Producer(
            {"bootstrap.servers": servers, "linger.ms": LINGER_MS, "acks": "all", "queue.buffering.max.messages": 1_000_000}
        )
        self._topic = topic

    def send(self, body: bytes) -> None:
        self._producer.produce(self._topic, body)
        self._producer.poll(0)

    def flush(self) -> None:
        if left := self._producer.flush(STORED_S):
            raise Unavailable(f"Kafka has not answered {left} records for topic {self._topic} within {STORED_S:g} s")


class Clients:
    """The senders and readers of a bridge."""

    def __init__(self, bridge: Bridge, opened: ExitStack, body_bytes: int = BODY_BYTES) -> None:
        """Start the readers; they end with ``opened``."""
        self._bridge = bridge
        self._body_bytes = body_bytes
        self._over = threading.Event()
        self.arrivals = {path: Arrivals() for path in bridge.paths}
        context = opened.enter_context(connect(bridge.url)) if bridge.url else None
        self._senders = {TO_KAFKA: bridge.sender(context)}
        readers = [self._read_kafka]
        if FROM_KAFKA in bridge.paths:
            self._senders[FROM_KAFKA] = KafkaSender(bridge.kafka.bootstrap, bridge.source)
            readers.append(self._read_jms)
        threads = [threading.Thread(target=read) for read in readers]
        for thread in threads:
            thread.start()
            opened.callback(thread.join)
        opened.callback(self._over.set)

    def fill(self, path: str, phase: str, count: int) -> list[bytes]:
        """Send messages as fast as possible, and return their marks when all are stored."""
        marks = [numbered(phase, number) for number in range(count)]
        for mark in marks:
            self._send(path, mark)
        self._senders[path].flush()
        return marks

    def at_rate(self, path: str, phase: str, rate: int, numbers: Iterable[int]) -> dict[bytes, float]:
        """Send at a fixed rate, and return when each message was due, when all are stored."""
        due_s = at_rate(lambda mark: self._send(path, mark), phase, rate, numbers)
        self._senders[path].flush()
        return due_s

    def await_count(self, path: str, count: int) -> bool:
        """Return when a path has carried ``count`` different messages in all; False if no further message comes."""
        seen = self.arrivals[path].at_s
        before, since_s, began_s = len(seen), time.monotonic(), time.monotonic()
        while len(seen) < count:
            now_s = time.monotonic()
            if len(seen) > before:
                before, since_s = len(seen), now_s
            elif now_s - since_s > QUIET_S or now_s - began_s > ARRIVAL_MAX_S:
                return False
            time.sleep(POLL_S / 10)
        return True

    def _send(self, path: str, mark: bytes) -> None:
        self._senders[path].send(mark.ljust(self._body_bytes, b"x"))

    def _read_kafka(self) -> None:
        settings = {"bootstrap.servers": self._bridge.kafka.bootstrap, "group.id": self._bridge.run, "enable.auto.commit": False}
        with closing(Consumer({**settings, "isolation.level": "read_committed", "fetch.wait.max.ms": 10})) as consumer:
            consumer.assign([TopicPartition(self._bridge.target, 0, 0)])
            while not self._over.is_set():
                for record in consumer.consume(READ_MAX, POLL_S / 10):
                    if record.error() is None:
                        self.arrivals[TO_KAFKA].note(bytes(record.value() or b""))

    def _read_jms(self) -> None:
        assert self._bridge.url is not None
        with connect(self._bridge.url) as context:
            context.consumer(Queue(self._bridge.source)).listener = self._take
            self._over.wait()

    def _take(self, message: Message) -> None:
        body = message.body
        self.arrivals[FROM_KAFKA].note(body if isinstance(body, bytes) else str(body).encode())


def backlog(bridge: Bridge, clients: Clients, path: str, count: int) -> dict[str, Any]:
    """Let the bridge carry messages that waited before its start. Return the rate, and what each part used for a message."""
    seen = clients.arrivals[path].at_s
    before = len(seen)
    marks = clients.fill(path, f"{BACKLOG} {path}", count)
    bridge.start()
    if not clients.await_count(path, before + int(count * WARM_UP_SHARE)):
        raise Late(f"{bridge.name} has carried {len(seen) - before} of {count} messages ({path})")
    first, first_s, used = len(seen), time.monotonic(), bridge.usage()
    complete = clients.await_count(path, before + count)
    last, last_s, after = len(seen), max(seen.values()), bridge.usage()
    carried = max(1, last - first)
    return {
        "records_per_s": carried / max(last_s - first_s, POLL_S / 10), "measured": carried, "complete": complete,
        "cpu_us": {part: 1e6 * spent_s / carried for part, spent_s in spent(used, after).items()},
        "rss_mb": {part: usage.rss_mb for part, usage in after.items()},
    } | counts(marks, clients.arrivals[path])  # fmt: skip


def latency(bridge: Bridge, clients: Clients, path: str, rate: int, seconds: int) -> dict[str, Any]:
    """Send at a fixed rate, after a warm-up. Return the latencies in ms, and what each part used during the sends, in percent of a core."""
    before = len(clients.arrivals[path].at_s)
    warm = clients.at_rate(path, f"w{rate} {path}", WARM_UP_RATE, range(WARM_UP_RATE * WARM_UP_S))
    before += len(warm)
    clients.await_count(path, before)
    used, began_s = bridge.usage(), time.monotonic()
    due_s = clients.at_rate(path, f"{rate} {path}", rate, range(rate * seconds))
    span_s, after = time.monotonic() - began_s, bridge.usage()
    clients.await_count(path, before + len(due_s))
    found = judged(due_s, clients.arrivals[path])
    percent = {part: 100 * spent_s / span_s for part, spent_s in spent(used, after).items()}
    return found | counts(due_s, clients.arrivals[path]) | {"cpu_percent": percent}


def kills(bridge: Bridge, clients: Clients, rate: int, times: int) -> dict[str, dict[str, Any]]:
    """Kill and restart the bridge some times while all paths carry messages at a fixed rate. Return the counts for each path."""
    over = threading.Event()
    seen = {path: arrivals.at_s for path, arrivals in clients.arrivals.items()}
    before = {path: len(at_s) for path, at_s in seen.items()}
    killed_s: list[float] = []

    def sent(path: str) -> dict[bytes, float]:
        return clients.at_rate(path, f"{KILLS} {path}", rate, itertools.takewhile(lambda _: not over.is_set(), itertools.count()))

    with ThreadPoolExecutor(len(bridge.paths)) as pool:
        futures = {path: pool.submit(sent, path) for path in bridge.paths}
        try:
            for _ in range(times):
                await_more(clients, int(rate * BETWEEN_KILLS_S))
                bridge.kill()
                killed_s.append(time.monotonic())
                bridge.start()
            await_more(clients, int(rate * BETWEEN_KILLS_S))
        finally:
            over.set()
        due_s = {path: future.result() for path, future in futures.items()}
    found = {}
    for path, due in due_s.items():
        clients.await_count(path, before[path] + len(due))
        await_duplicates(clients.arrivals[path])
        found[path] = counts(due, clients.arrivals[path]) | {"back_s": back_after_s(killed_s, due, seen[path])}
    return found


def await_more(clients: Clients, count: int) -> None:
    """Return when each path has carried some more messages. Raises Late."""
    before = {path: len(arrivals.at_s) for path, arrivals in clients.arrivals.items()}
    for path, already in before.items():
        if not clients.await_count(path, already + count):
            raise Late(f"the path {path} carries no messages")


def await_duplicates(arrivals: Arrivals) -> None:
    """Return when nothing has arrived for some seconds."""

    def quiet() -> bool:
        total = arrivals.times.total()
        time.sleep(DUPLICATES_S)
        return arrivals.times.total() == total

    with suppress(Late):
        wait_for(quiet, "the end of the duplicates")


def back_after_s(killed_s: Iterable[float], due_s: Mapping[bytes, float], at_s: Mapping[bytes, float]) -> list[float]:
    """Return for each kill the time until the first message that was due later had arrived."""
    arrived = [(due, at_s[mark]) for mark, due in due_s.items() if mark in at_s]
    found = []
    for moment_s in killed_s:
        later = [at for due, at in arrived if due > moment_s]
        if later:
            found.append(min(later) - moment_s)
    return found


def counts(marks: Iterable[bytes], arrivals: Arrivals) -> dict[str, int]:
    """Return how many messages were sent, lost, duplicated, and arrived for the first time after a later message."""
    sent = set(marks)
    highest, disordered, arrived = b"", 0, 0
    for mark in list(arrivals.at_s):  # in the order of the first arrivals
        if mark in sent:
            arrived += 1
            disordered += mark < highest
            highest = max(highest, mark)
    duplicated = sum(arrivals.times[mark] - 1 for mark in sent if mark in arrivals.at_s)
    return {"sent": len(sent), "lost": len(sent) - arrived, "duplicated": duplicated, "disordered": disordered}


def spent(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> dict[str, float]:
    """Return the processor time of each part between two moments, in s."""
    nothing = Usage(0, 0)
    return {part: max(0.0, usage.cpu_s - before.get(part, nothing).cpu_s) for part, usage in after.items()}
