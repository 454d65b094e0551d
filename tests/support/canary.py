"""A client in its own process that measures whether a broker serves it while other clients load the broker."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as PipeConnection
from multiprocessing.synchronize import Event

from bascule.client import Producer, Queue, connect
from tests.support.speed import SLOWNESS
from tests.support.system import System, wait_for
from tests.support.usage import main_thread_cpu_s

BODY = "x" * 1024
SOON_S = 30.0 * SLOWNESS
PAUSE_S = 0.1
#: Messages for a canary that does not send: ten each second, for two minutes and some time before and after.
MESSAGES = 3_000


class Canary:
    """A client that the load of other clients in this process does not slow down.

    It receives persistent messages, one after the other. It has sent them before, since near the limit of memory a sending client has to
    wait; with ``sends`` it sends each message right before it receives it. ``times_s`` has the duration of each round trip, ``broker_s``
    the processor time of the broker's event loop meanwhile, which does not depend on the share of the machine that the broker gets.
    """

    def __init__(self, system: System, queue: str, *, sends: bool = False) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._over = spawn.Event()
        self._said, says = spawn.Pipe(duplex=False)
        arguments = (system.url, queue, sends, system.broker.pid, self._over, says)
        self._process = spawn.Process(target=_round_trips, args=arguments, daemon=True)
        self._process.start()
        self.times_s: list[float] = []
        self.broker_s: list[float] = []

    def look(self) -> int:
        """Read the reports of the canary, and return the number of its round trips."""
        with suppress(EOFError):  # the canary has ended
            while self._said.poll():
                time_s, broker_s = self._said.recv()
                self.times_s.append(time_s)
                self.broker_s.append(broker_s)
        return len(self.times_s)

    def stop(self) -> None:
        """End the canary."""
        self._over.set()
        self._process.join(SOON_S)
        self.look()


@contextmanager
def canary(system: System, queue: str, *, sends: bool = False) -> Iterator[Canary]:
    """Yield a canary that has made its first round trip."""
    bird = Canary(system, queue, sends=sends)
    try:
        wait_for(bird.look, "the canary")
        yield bird
    finally:
        bird.stop()


def _round_trips(url: str, name: str, sends: bool, broker: int, over: Event, says: PipeConnection) -> None:
    queue = Queue(name)
    if not sends:
        with connect(url) as context:
            context.producer(queue).send_many((BODY for _ in range(MESSAGES)), timeout_s=SOON_S)
    with connect(url) as context, context.consumer(queue, prefetch=0) as consumer:
        producer: Producer | None = context.producer(queue) if sends else None
        while not over.wait(PAUSE_S):
            begun_s, used_s = time.monotonic(), main_thread_cpu_s(broker)
            if producer is not None:
                producer.send(BODY, timeout_s=SOON_S)
            message = consumer.receive(SOON_S)
            time_s = time.monotonic() - begun_s if message is not None else SOON_S
            says.send((time_s, main_thread_cpu_s(broker) - used_s))
