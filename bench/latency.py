"""Latency across the bridge at fixed rates, in an open loop: from the time when a message was due to its arrival.

    python -m bench.latency [--rate 100 --rate 1000] [--seconds 20] [--rounds 3] [--path plain]

`bascule up` runs broker, Kafka and pipelines. The clients are threads of this process. See README.md for what the figures mean. Results go
to bench/results/latency-*.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer

from bascule.client import Message, Queue, connect
from bascule.kafka.admin import Topics
from bench.run import machine, markdown, write_results
from tests.soak.figures import quantile
from tests.support.system import Late, descendants, wait_for
from tests.support.up import Up
from tests.support.usage import cpu_s

BODY_BYTES = 1024
#: A message begins with its mark: path, rate, round and number.
MARK_BYTES = 32
NUMBER_DIGITS = 10
WARM_UP_RATE, WARM_UP_S = 50, 5
#: How long the last messages may take.
ARRIVAL_S = 30.0
#: The clients wait this long for a message before they look whether the run is over.
POLL_S = 0.1
#: How long a Kafka client of the load waits for further records. Without a wait it sends 800 requests a second at 1,000 records a second,
#: whose handling takes Kafka's processor time from the bridge; with 1 ms, it sends some 400. The clients' own default is 5 ms.
LINGER_MS = 1
DIVERTED, PLAIN, SELECTED, KEYED, TRANSFORMED, REPLIED = "out", "plain", "selected", "keyed", "transformed", "replied"
SOURCE, TAKEN, REQUESTS = "source", "taken", "requests"
#: The pipelines of each path.
PIPELINES = {
    PLAIN: f"""
[[divert]]
name = "plain"
from = "{PLAIN}"
to = "{DIVERTED}.{PLAIN}"
""",
    SELECTED: f"""
[[divert]]
name = "selected"
from = "{SELECTED}"
to = "{DIVERTED}.{SELECTED}"
selector = "kind = 1"
""",
    KEYED: f"""
[[divert]]
name = "keyed"
from = "{KEYED}"
to = "{DIVERTED}.${{address}}"
key = "property:number"
""",
    TRANSFORMED: f"""
[[divert]]
name = "transformed"
from = "{TRANSFORMED}"
to = "{DIVERTED}.{TRANSFORMED}"
group = "transformed"
select = ["properties['number'] AS key", "concat(text, '!') AS value"]
""",
    SOURCE: f"""
[[ingress]]
name = "in"
topics = ["{SOURCE}"]
to = "{TAKEN}"
routing = "anycast"
body = "bytes"
start = "earliest"
""",
    REQUESTS: f"""
[[divert]]
name = "requests"
from = "{REQUESTS}"
to = "{DIVERTED}.{REQUESTS}"
[[ingress]]
name = "replies"
topics = ["{REPLIED}"]
to = "{REPLIED}"
routing = "anycast"
body = "bytes"
start = "earliest"
""",
}
#: The paths, and what each of them is.
PATHS = {
    PLAIN: "JMS to a read_committed reader, plain divert",
    SELECTED: "the same with a selector",
    KEYED: "the same with a key and a template",
    TRANSFORMED: "the same with a Spark SQL transformation",
    SOURCE: "Kafka record to a JMS consumer",
    REQUESTS: "JMS to Kafka and back to JMS",
}
COLUMNS = {"p50 ms": "p50_ms", "p99 ms": "p99_ms", "longest ms": "longest_ms", "CPU, % of a core": "cpu_percent"}
COUNTS = ("sent", "lost", "duplicated")


@dataclass
class Arrivals:
    """When the messages came, by their marks."""

    at_s: dict[bytes, float] = field(default_factory=dict)
    times: Counter[bytes] = field(default_factory=Counter)

    def note(self, body: bytes) -> None:
        """Note a message."""
        mark = body[:MARK_BYTES]
        self.at_s.setdefault(mark, time.monotonic())
        self.times[mark] += 1


class Clients:
    """The readers and senders of all paths."""

    def __init__(self, up: Up, opened: ExitStack) -> None:
        """Start the readers."""
        self._up = up
        self._over = threading.Event()
        self.arrivals = Arrivals()
        self._kafka = {"bootstrap.servers": up.kafka, "log_level": 0}
        self._producer = Producer({**self._kafka, "linger.ms": LINGER_MS})
        opened.callback(self._producer.flush, ARRIVAL_S)
        context = opened.enter_context(connect(up.url))
        self._senders = {path: context.producer(Queue(path)) for path in (PLAIN, SELECTED, KEYED, TRANSFORMED, REQUESTS)}
        Topics(self._kafka).create(SOURCE, 1, {})
        Topics(self._kafka).create(REPLIED, 1, {})
        for path in (PLAIN, SELECTED, KEYED, TRANSFORMED, REQUESTS):
            Topics(self._kafka).create(f"{DIVERTED}.{path}", 1, {})
        threads = [threading.Thread(target=read) for read in (self._read_kafka, self._answer, self._read_jms)]
        for thread in threads:
            thread.start()
            opened.callback(thread.join)
        opened.callback(self._over.set)

    def send(self, path: str, mark: bytes) -> None:
        """Send one message of a path; do not wait for its answer."""
        body = mark.ljust(BODY_BYTES, b"x")
        if path == SOURCE:
            self._producer.produce(SOURCE, body)
            self._producer.poll(0)
        else:
            self._senders[path].send_async(Message(body.decode(), properties={"kind": 1, "number": int(mark[-NUMBER_DIGITS:])}))

    def _read_kafka(self) -> None:
        with closing(self._consumer(PLAIN, SELECTED, KEYED, TRANSFORMED)) as consumer:
            while not self._over.is_set():
                message = consumer.poll(POLL_S)
                if message is not None and message.error() is None:
                    self.arrivals.note(bytes(message.value() or b""))

    def _answer(self) -> None:
        with closing(self._consumer(REQUESTS)) as consumer:
            while not self._over.is_set():
                message = consumer.poll(POLL_S)
                if message is not None and message.error() is None:
                    self._producer.produce(REPLIED, message.value())
                self._producer.poll(0)

    def _read_jms(self) -> None:
        with connect(self._up.url) as context, connect(self._up.url) as replies:
            consumers = [context.consumer(Queue(TAKEN)), replies.consumer(Queue(REPLIED))]
            for consumer in consumers:
                consumer.listener = self._take
            self._over.wait()

    def _take(self, message: Message) -> None:
        assert isinstance(message.body, bytes), message.body
        self.arrivals.note(message.body)

    def _consumer(self, *paths: str) -> Consumer:
        consumer = Consumer(
            {**self._kafka, "group.id": f"bench-{paths[0]}", "isolation.level": "read_committed", "auto.offset.reset": "earliest"}
        )
        consumer.subscribe([f"{DIVERTED}.{path}" for path in paths])
        return consumer


def numbered(mark: str, number: int) -> bytes:
    """Return the mark of one message."""
    assert len(mark) <= MARK_BYTES - NUMBER_DIGITS, f"the mark {mark!r} is too long"
    return f"{mark:{MARK_BYTES - NUMBER_DIGITS}}{number:0{NUMBER_DIGITS}}".encode()


def at_rate(send: Callable[[bytes], None], mark: str, rate: int, numbers: Iterable[int]) -> dict[bytes, float]:
    """Send at a fixed rate, whatever the answers are. Return when each message was due, by its mark."""
    due_s: dict[bytes, float] = {}
    begun_s = time.monotonic()
    for number in numbers:
        due = begun_s + number / rate
        time.sleep(max(0.0, due - time.monotonic()))
        said = numbered(mark, number)
        due_s[said] = due
        send(said)
    return due_s


def measure(up: Up, clients: Clients, path: str, mark: str, rate: int, seconds: int) -> dict[str, Any]:
    """Send for some seconds, and return the latencies in ms and the processor time of all processes of Bascule."""
    before_s, begun_s = used_s(up), time.monotonic()
    due_s = at_rate(lambda said: clients.send(path, said), mark, rate, range(rate * seconds))
    span_s, after_s = time.monotonic() - begun_s, used_s(up)
    seen = clients.arrivals
    with suppress(Late):  # the messages that are missing are counted
        wait_for(lambda: all(said in seen.at_s for said in due_s), f"the messages of {path}", ARRIVAL_S)
    return judged(due_s, seen) | {"cpu_percent": 100 * (after_s - before_s) / span_s}


def judged(due_s: dict[bytes, float], seen: Arrivals) -> dict[str, Any]:
    """Return the latencies in ms, and how many messages were sent, lost and duplicated."""
    taken_ms = sorted((seen.at_s[said] - due) * 1000 for said, due in due_s.items() if said in seen.at_s)
    if not taken_ms:
        raise Late("no message has arrived")
    return {
        "p50_ms": quantile(taken_ms, 0.5), "p99_ms": quantile(taken_ms, 0.99), "longest_ms": taken_ms[-1],
        "sent": len(due_s), "lost": len(due_s) - len(taken_ms), "duplicated": sum(max(0, seen.times[said] - 1) for said in due_s),
    }  # fmt: skip


def used_s(up: Up) -> float:
    """Return the processor time of all processes of ``bascule up``."""
    parts = [pid for pid in up.pids.values() if pid is not None]
    return sum(map(cpu_s, {*parts, *(below for pid in parts for below in descendants(pid))}))


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table of medians over the rounds."""
    rows = [["path", *COLUMNS, *COUNTS]]
    for name, runs in results.items():
        figures = [f"{statistics.median(run[key] for run in runs):,.1f}" for key in COLUMNS.values()]
        rows.append([name, *figures, *(str(sum(run[key] for run in runs)) for key in COUNTS)])
    return markdown(rows)


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Latency across the bridge at fixed rates.")
    parser.add_argument("--rate", type=int, action="append", help="messages per second; may be repeated (default: 100 and 1000)")
    parser.add_argument("--seconds", type=int, default=20, help="duration of each run (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="number of runs, whose median counts (default: 3)")
    parser.add_argument("--path", action="append", choices=tuple(PATHS), help="measure only this path, with its pipelines; may be repeated")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark. The exit code tells whether a message was lost or duplicated."""
    options = arguments()
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="bascule-latency-") as name, ExitStack() as opened:
        config = Path(name) / "bascule.toml"
        paths = options.path or list(PATHS)
        config.write_text("".join(PIPELINES[path] for path in paths))
        up = opened.enter_context(Up(Path(name), "--config", config))
        clients = Clients(up, opened)
        for path in paths:
            measure(up, clients, path, f"warm {path}", WARM_UP_RATE, WARM_UP_S)
        for number in range(options.rounds):
            for path in paths:
                for rate in options.rate or (100, 1000):
                    result = measure(up, clients, path, f"{number} {path} {rate}", rate, options.seconds)
                    results.setdefault(f"{PATHS[path]}, {rate}/s", []).append(result)
                    print(path, rate, {key: round(value, 1) for key, value in result.items()}, file=sys.stderr, flush=True)
    page = table(results) + f"\n\nMessages of {BODY_BYTES} bytes, {options.rounds} rounds of {options.seconds} s, an open loop."
    write_results("latency", {"machine": machine(), "options": vars(options), "results": results}, page)
    return int(any(run["lost"] or run["duplicated"] for runs in results.values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
