"""Clients that need more memory than a broker has, and a canary client beside them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from bascule.amqp.connection import Connection
from bascule.amqp.performatives import Role, Source, Target
from bascule.amqp.sasl import AnonymousClient, SaslClient
from bascule.client import Acknowledge, Queue, TimedOut, TransactionRolledBack, connect
from bascule.core.errors import BasculeError
from tests.support.canary import BODY, SOON_S, Canary
from tests.support.system import System
from tests.support.usage import memory_mib

LARGE_BODY = "x" * 100_000
#: Messages of one large transaction: their total exceeds a quarter of 64 MiB.
LARGE_MESSAGES = 200
#: How often a client checks whether it has to end.
LOOK_S = 0.5


@dataclass
class Figures:
    """What the clients have observed."""

    sent: int = 0
    received: int = 0
    round_trips: int = 0
    longest_gap_s: float = 0.0  # between two round trips of the canary
    longest_gap_broker_s: float = 0.0  # largest processor time of the broker's event loop in a round trip
    blocked_seen: int = 0
    idle_mib: float = 0.0
    peak_mib: float = 0.0
    longest_turn_s: float = 0.0  # of the broker's event loop, in processor time: an upper bound
    normal_after_s: float = 0.0
    refused: int = 0  # refused transactions
    refusal: str = ""  # why the last one was refused


class Overload:
    """Clients in threads, from ``start`` to ``stop``."""

    def __init__(self, system: System, queue: str) -> None:
        self.system = system
        self.queue = Queue(queue)
        self.figures = Figures(idle_mib=memory_mib(system.broker.pid))
        self.canary = Canary(system, f"{queue}.canary")
        self._over = threading.Event()
        self._load_over = threading.Event()
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        self._errors: list[Exception] = []

    def start(self, client: Callable[[threading.Event], None], *, load: bool = True) -> None:
        """Run a client until its event is set: the event of the load, or the event of all clients."""
        over = self._load_over if load else self._over

        def run() -> None:
            try:
                client(over)
            except Exception as error:
                self._errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append((thread, over))
        thread.start()

    def end_load(self) -> None:
        """End the load. The canary and the consumers continue."""
        self._end(self._load_over)

    def stop(self) -> None:
        """End all clients, and raise the errors that they met."""
        self._end(self._load_over)
        self._end(self._over)
        self.canary.stop()
        self.figures.round_trips, self.figures.longest_gap_s = len(self.canary.times_s), max(self.canary.times_s, default=SOON_S)
        self.figures.longest_gap_broker_s = max(self.canary.broker_s, default=SOON_S)
        if self._errors:
            raise self._errors[0]

    def _end(self, over: threading.Event) -> None:
        over.set()
        for thread, its in self._threads:
            if its is over:
                thread.join(SOON_S)

    # -- clients -----------------------------------------------------------------------------------------------------

    def produce(self, over: threading.Event) -> None:
        """Send as fast as the broker grants credit."""
        with suppress(BasculeError), connect(self.system.url) as context:  # a send that waits for credit has no orderly end
            producer = context.producer(self.queue, persistent=False)
            while not over.is_set():
                with suppress(BasculeError):
                    producer.send_async(BODY, timeout_s=LOOK_S)
                    self.figures.sent += 1

    def consume(self, pause_s: float) -> Callable[[threading.Event], None]:
        """Consume, with a pause for each message."""

        def client(over: threading.Event) -> None:
            with connect(self.system.url) as context, context.consumer(self.queue, prefetch=10) as consumer:
                while not over.wait(pause_s):
                    self.figures.received += consumer.receive(LOOK_S) is not None

        return client

    def transact(self, over: threading.Event) -> None:
        """Send more in one transaction than fits into memory, try to commit, and repeat."""
        with suppress(BasculeError), connect(self.system.url) as connection:
            context = connection.create_context(Acknowledge.TRANSACTED)
            producer = context.producer(Queue(f"{self.queue.name}.transactions"))
            while not over.is_set():
                with suppress(TimedOut):  # the sender has no credit
                    for _ in range(LARGE_MESSAGES):
                        producer.send(LARGE_BODY, timeout_s=LOOK_S)
                try:
                    context.commit(timeout_s=SOON_S)
                except TransactionRolledBack as error:
                    self.figures.refused += 1
                    self.figures.refusal = str(error)

    def hang(self, over: threading.Event) -> None:
        """Grant much credit, and read nothing."""
        client = Connection(Role.CLIENT, container_id=f"hung-{threading.get_ident()}", sasl=SaslClient([AnonymousClient()]))
        client.open()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", self.system.port))
            link = client.begin().attach_receiver("consumer", Source(self.queue.name), Target())
            while not link.attached:
                sock.sendall(client.data_to_send())
                client.receive(sock.recv(65536), time.monotonic())
            link.flow(50_000)
            sock.sendall(client.data_to_send())
            over.wait()

    def look(self, over: threading.Event) -> None:
        """Record the status of the broker's memory."""
        while not over.wait(0.1):
            memory = self.system.status()["memory"]
            self.figures.blocked_seen += bool(memory["blocked"])
            self.figures.peak_mib = max(self.figures.peak_mib, memory_mib(self.system.broker.pid))
