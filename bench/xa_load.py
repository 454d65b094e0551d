"""A process that runs transactions of Bascule's manager, one after the other in each of its threads; `bench.xa` starts it.

    python -m bench.xa_load '{"mode": "jms-postgres-send", ...}'

It writes "ready" when each thread has run one transaction, reads from its standard input when to count (seconds of the monotonic clock,
which all processes share), and writes what each counted transaction took, in milliseconds, with the number of all transactions since it
was ready, and the processor time of the process for them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Producer

from bascule.client import Acknowledge, Queue, connect
from bascule.xa import FileLog, TransactionManager
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from bascule.xa.postgres import PostgresResource
from bench.xa_modes import MODES, Mode

INSERT = "INSERT INTO payments (body) VALUES (%s)"
TOPIC = "bench.receipts"
RECEIVE_S = 30.0
#: As many connections as threads, so that none is opened during the measurement.
IDLE_MAX = 64
#: Repeats one thread's transaction.
Work = Callable[[], None]


@dataclass(frozen=True)
class Done:
    """What the threads of a process have done: ``taken_ms`` of the counted transactions, the rest of all since it was ready."""

    taken_ms: list[float]
    transactions: int
    cpu_ms: float


@dataclass(frozen=True)
class Load:
    """The work of one process."""

    mode: str
    atomic: bool
    threads: int
    seconds: float
    size: int
    conninfo: str
    kafka: str
    url: str
    queue: str
    log: str

    @property
    def body(self) -> str:
        """Bytes of each message, record and row."""
        return "x" * self.size

    @property
    def kind(self) -> Mode:
        """Return the mode."""
        return next(each for each in MODES if each.name == self.mode)


def _steps(load: Load) -> dict[str, Callable[[Any], object]]:
    """Return the work in each resource except the receive, in the order of its execution."""
    return {
        "postgres": lambda handle: handle.execute(INSERT, (load.body,)),
        "kafka": lambda handle: handle.send(TOPIC, load.body.encode()),
        "jms": lambda handle: handle.send(Queue(load.queue), load.body),
    }


def _receive(handle: Any, queue: str) -> None:
    if handle.consumer(Queue(queue)).receive(RECEIVE_S) is None:
        raise TimeoutError(f"no message came within {RECEIVE_S} s")


@contextmanager
def transactional(load: Load) -> Iterator[Callable[[], Work]]:
    """Each call prepares one thread's work: transactions over the resources of the mode."""
    mode = load.kind
    made: dict[str, Callable[[], Any]] = {
        "postgres": lambda: PostgresResource("postgres", load.conninfo, idle_max=IDLE_MAX, prepared=not mode.decides),
        "kafka": lambda: KafkaResource("kafka", {"bootstrap.servers": load.kafka}),
        "jms": lambda: JmsResource("jms", load.url, idle_max=IDLE_MAX),
    }
    resources = {name: made[name]() for name in mode.resources}
    steps = _steps(load)
    manager = TransactionManager("bench", FileLog(Path(load.log)), list(resources.values()), shared=True)

    def work() -> None:
        with manager.begin() as transaction:
            if mode.receives:
                _receive(transaction.enlist(resources["jms"]), load.queue)
            for name, resource in resources.items():
                steps[name](transaction.enlist(resource))

    with manager:
        yield lambda: work


@contextmanager
def apart(load: Load) -> Iterator[Callable[[], Work]]:
    """Prepare the same work without a common transaction: each resource commits on its own, one after the other."""
    steps = _steps(load)
    with ExitStack() as opened:

        def one() -> Work:
            handles: dict[str, Any] = {}
            for name in load.kind.resources:
                if name == "postgres":
                    handles[name] = opened.enter_context(psycopg.connect(load.conninfo, autocommit=True))
                elif name == "kafka":
                    handles[name] = _Flushing(load.kafka)
                else:
                    handles[name] = opened.enter_context(connect(load.url, acknowledge=Acknowledge.AUTO))
            return lambda: [steps[name](handle) for name, handle in handles.items()] and None

        yield one


class _Flushing:
    """A producer that waits for each record."""

    def __init__(self, servers: str) -> None:
        self._producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 0})

    def send(self, topic: str, value: bytes) -> None:
        self._producer.produce(topic, value)
        self._producer.flush()


def seed(url: str, queue: str, count: int, size: int) -> None:
    """Send a number of messages to a queue."""
    with connect(url, acknowledge=Acknowledge.TRANSACTED) as context:
        for _ in range(count):
            context.send(Queue(queue), "x" * size)
        context.commit()


def run(load: Load, ready: Callable[[], float]) -> Done:
    """Run all threads. ``ready`` is called when each has run one transaction, and returns when to count from.

    The counted transactions are those that began in the measured time. Raises the first failure of a thread.
    """
    taken: list[list[float]] = [[] for _ in range(load.threads)]
    failures: list[BaseException] = []
    begun_s: list[float] = []
    cpu_s: list[float] = []

    def begin() -> None:
        begun_s.append(ready())
        cpu_s.append(time.process_time())

    barrier = threading.Barrier(load.threads, action=begin)

    def repeat(work: Work, all_ms: list[float], taken_ms: list[float]) -> None:
        try:
            work()
            barrier.wait()
            (from_s,) = begun_s
            while (start_s := time.monotonic()) < from_s + load.seconds:
                work()
                all_ms.append(1000 * (time.monotonic() - start_s))
                if start_s >= from_s:
                    taken_ms.append(all_ms[-1])
        except threading.BrokenBarrierError:
            return  # another thread has failed
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    every: list[list[float]] = [[] for _ in taken]
    with (transactional if load.atomic else apart)(load) as make:
        threads = [threading.Thread(target=repeat, args=(make(), *each)) for each in zip(every, taken, strict=True)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        ended_s = time.process_time()
    if failures:
        raise failures[0]
    return Done([each for one in taken for each in one], sum(map(len, every)), 1000 * (ended_s - cpu_s[0]))


def _ready() -> float:
    print("ready", flush=True)
    return float(sys.stdin.readline())


def main(argument: str) -> None:
    """Run what the argument says, as JSON with the fields of ``Load``."""
    options: Mapping[str, Any] = json.loads(argument)
    print(json.dumps(dataclasses.asdict(run(Load(**options), _ready))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
