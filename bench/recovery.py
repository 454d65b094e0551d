"""Pipelines after kill -9: the longest wait of a record that was due after the kill, in both directions.

    python -m bench.recovery [--kills 20] [--kind driver] [--pause 25]

`bascule up` runs one divert and one ingress. See README.md for what the figures mean. Results go to bench/results/recovery-*.json and .md.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer

from bascule.client import Message, Queue, connect
from bascule.kafka.admin import Topics
from bench.run import machine, markdown, write_results
from tests.support.spark_processes import daemons, jvms, workers
from tests.support.system import descendants, wait_for
from tests.support.up import Up

DIVERTED, TAKEN = "recovery.diverted", "recovery.taken"
CONFIG = f"""
[[divert]]
name = "out"
from = "out"
to = "{DIVERTED}"
[[ingress]]
name = "in"
topics = ["{TAKEN}"]
to = "in"
routing = "anycast"
body = "bytes"
start = "earliest"
"""
#: A record is due at this interval, in each direction.
INTERVAL_S = 0.05
#: How long a pipeline may take.
DEADLINE_S = 180.0
POLL_S = 0.1
PROMISED_S = 5.0


class Flow:
    """Sends numbered records in both directions all the time, and notes which have arrived."""

    def __init__(self, up: Up, opened: ExitStack) -> None:
        """Start senders and readers."""
        self._up = up
        self._over = threading.Event()
        self._kafka = {"bootstrap.servers": up.kafka, "log_level": 0}
        self.due_s: list[float] = []
        self.at_s: dict[str, dict[int, float]] = {"divert": {}, "ingress": {}}
        self.duplicated = 0
        self._settled = 0  # all records with a lower number have arrived
        for topic in (DIVERTED, TAKEN):
            Topics(self._kafka).create(topic, 1, {})
        threads = [threading.Thread(target=run) for run in (self._send, self._read_kafka, self._read_jms)]
        for thread in threads:
            thread.start()
            opened.callback(thread.join)
        opened.callback(self._over.set)

    def settle(self) -> None:
        """Return when all records that were due before this call have arrived."""
        last = len(self.due_s)
        for direction, at_s in self.at_s.items():
            wait_for(
                lambda at_s=at_s: all(number in at_s for number in range(self._settled, last)), f"records of the {direction}", DEADLINE_S
            )  # type: ignore[misc]
        self._settled = last

    def waits_s(self, first: int, since_s: float) -> dict[str, float]:
        """Return the longest wait of a record from the number ``first`` on, in each direction. A wait begins at ``since_s`` or later."""
        return {
            direction: max(at_s[number] - max(since_s, self.due_s[number]) for number in range(first, self._settled))
            for direction, at_s in self.at_s.items()
        }

    def close(self) -> dict[str, int]:
        """Stop sending. Return how many records were sent, and how many were duplicated."""
        self.settle()
        self._over.set()
        return {"sent": 2 * self._settled, "duplicated": self.duplicated}

    def _send(self) -> None:
        producer = Producer({**self._kafka, "linger.ms": 0})
        with connect(self._up.url) as context:
            jms = context.producer(Queue("out"))
            begun_s = time.monotonic()
            while not self._over.is_set():
                number = len(self.due_s)
                due_s = begun_s + number * INTERVAL_S
                time.sleep(max(0.0, due_s - time.monotonic()))
                jms.send_async(Message(str(number)))
                producer.produce(TAKEN, str(number))
                producer.poll(0)
                self.due_s.append(due_s)
        producer.flush(DEADLINE_S)

    def _read_kafka(self) -> None:
        settings = {**self._kafka, "group.id": "recovery", "isolation.level": "read_committed", "auto.offset.reset": "earliest"}
        with closing(Consumer(settings)) as consumer:
            consumer.subscribe([DIVERTED])
            while not self._over.is_set():
                message = consumer.poll(POLL_S)
                if message is not None and message.error() is None:
                    self._note("divert", int(message.value() or b""))

    def _read_jms(self) -> None:
        with connect(self._up.url) as context, context.consumer(Queue("in")) as consumer:
            while not self._over.is_set():
                message = consumer.receive(POLL_S)
                if message is not None:
                    self._note("ingress", int(message.body))  # type: ignore[arg-type]

    def _note(self, direction: str, number: int) -> None:
        if self.at_s[direction].setdefault(number, now_s := time.monotonic()) is not now_s:
            self.duplicated += 1


def driver_of(up: Up) -> int:
    """Return the process id of the driver."""
    return int(wait_for(lambda: up.pids["pipelines"], "a driver", DEADLINE_S))


def spark_of(up: Up) -> int:
    """Return the process id of Spark's JVM."""
    return int(wait_for(lambda: jvms(driver_of(up)), "Spark", DEADLINE_S)[0])


def workers_of(up: Up) -> list[int]:
    """Return the process ids of the Python workers."""
    return list(wait_for(lambda: workers(driver_of(up)), "a worker", DEADLINE_S))


#: The processes that each kind of kill ends. `worker` ends one worker, each time another. `workers` ends all workers and their daemons.
KINDS: dict[str, Callable[[Up, int], list[int]]] = {
    "driver": lambda up, _: [driver_of(up)],
    "jvm": lambda up, _: [spark_of(up)],
    "worker": lambda up, number: [(found := workers_of(up))[number % len(found)]],
    "workers": lambda up, _: [*daemons(driver_of(up)), *workers_of(up)],
    "everything": lambda up, _: [driver_of(up), *descendants(driver_of(up))],
}


def kill(up: Up, flow: Flow, kind: str, number: int, pause_s: float) -> float:
    """Kill, and return the longest wait of a record that was due between the kill and the end of the pause.

    The processes that are left may carry records for a moment before they end, so the first record proves nothing.
    """
    flow.settle()
    pids, first, killed_s = KINDS[kind](up, number), len(flow.due_s), time.monotonic()
    for pid in pids:
        with suppress(ProcessLookupError):  # ended with another one that was killed
            os.kill(pid, signal.SIGKILL)
    time.sleep(pause_s)
    flow.settle()
    waits_s = flow.waits_s(first, killed_s)
    print(f"{kind}: {', '.join(f'{name} {wait_s:.2f} s' for name, wait_s in waits_s.items())}", file=sys.stderr, flush=True)
    return max(waits_s.values())


def judged(taken_s: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each kind."""
    return {
        kind: {"kills": len(each), "p50_s": round(statistics.median(each), 2), "max_s": round(max(each), 2), "each_s": each}
        for kind, each in taken_s.items()
    }


def page(result: Mapping[str, Any]) -> str:
    """Return the result as text."""
    rows = [["killed", "kills", "p50 s", "longest s"]]
    rows += [[kind, str(each["kills"]), f"{each['p50_s']:g}", f"{each['max_s']:g}"] for kind, each in result["judged"].items()]
    counts = ", ".join(f"{count} {name}" for name, count in result["counts"].items())
    return f"# Pipelines after kill -9\n\n{markdown(rows)}\n\nRecords: {counts}. Promised: p50 below {PROMISED_S:g} s.\n\n{machine()}"


def main() -> int:
    """Run the benchmark. The exit code tells whether a record was duplicated, or a median was too long. A lost record ends it with Late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills of each kind (default: 20)")
    parser.add_argument("--kind", action="append", choices=tuple(KINDS), help="kill only this; may be repeated")
    parser.add_argument("--pause", type=float, default=25.0, help="seconds from a kill to the next one, at least (default: 25)")
    options = parser.parse_args()
    kinds = options.kind or list(KINDS)
    taken_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="bascule-recovery-") as name, ExitStack() as opened:
        config = Path(name) / "bascule.toml"
        config.write_text(CONFIG)
        begun_s = time.monotonic()
        up = opened.enter_context(Up(Path(name), "--config", config))
        ready_s = round(time.monotonic() - begun_s, 2)
        print(f"bascule up: ready after {ready_s:.2f} s", file=sys.stderr, flush=True)
        flow = Flow(up, opened)
        for number in range(options.kills):
            for kind in kinds:
                taken_s[kind].append(round(kill(up, flow, kind, number, options.pause), 2))
        counts = flow.close()
    result = {**vars(options), "ready_s": ready_s, "judged": judged(taken_s), "counts": counts, "machine": machine()}
    write_results("recovery", result, page(result))
    return int(counts["duplicated"] > 0 or any(each["p50_s"] > PROMISED_S for each in result["judged"].values()))


if __name__ == "__main__":
    sys.exit(main())
