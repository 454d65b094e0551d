"""Traffic that causes every kind of effect of a broker, and a check that each message is at its destination exactly once."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from bascule.client import Acknowledge, Consumer, Context, Message, Queue, TransactionError, connect
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.core.topics import UNBOUND_HEADER
from bascule.journal.records import KafkaOrigin, Kind, Send, SendFlag, encode_record, send_entry
from bascule.kafka import clients
from tests.support.journal import text_message
from tests.support.system import PYTHON_FAILOVER, System

#: Timeout of a call: much longer than the death and the restart of a broker.
CALL_S = 90.0
#: Pause between two messages that stay for some snapshots, so that they move to the store and leave it again, also on a slow machine.
LAP_S = 0.2
KEPT = 30
INGRESS_EACH_LAP = 3
#: Time within which the last record written to Kafka is in the broker's queue.
ARRIVAL_S = 60.0


class Load:
    """Run clients of a system under ``failover:`` until the block ends; then check. ``urls`` are the URLs of all brokers of the system."""

    def __init__(self, system: System, name: str, urls: str = "") -> None:
        self.system = system
        self._several = bool(urls)
        self._url = PYTHON_FAILOVER.format(urls or system.url)
        self.sent: list[str] = []
        self.failures: list[BaseException] = []
        self._name = name
        self._first, self._kept, self._out = (Queue(f"{name}.{part}") for part in ("in", "kept", "out"))
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(body,)) for body in (self._messages, self._laps)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            self.failures.append(error)

    def _connect(self, acknowledge: Acknowledge = Acknowledge.AUTO) -> Context:
        return connect(self._url, acknowledge=acknowledge, timeout_s=CALL_S)

    def _messages(self) -> None:
        """Send messages, and move each to another queue in a transaction."""
        with self._connect() as sending, self._connect(Acknowledge.TRANSACTED) as moving:
            producer = sending.producer(self._first)
            for number in itertools.count():
                if self._over.is_set():
                    break
                self.sent.append(f"message {number}")
                producer.send(self.sent[-1])
                self._move(moving, self._first, 2)

    def _laps(self) -> None:
        """Send messages that stay for a while, write messages to Kafka, create and delete queues."""
        kafka = clients.producer({"bootstrap.servers": self.system.bootstrap, "linger.ms": 0})
        with self._connect() as sending, self._connect(Acknowledge.TRANSACTED) as moving:
            for lap in itertools.count():
                if self._over.wait(LAP_S):
                    break
                self.sent.append(f"kept {lap}")
                sending.send(self._kept, self.sent[-1])
                if lap >= KEPT:
                    self._move(moving, self._kept, 1)
                for number in range(INGRESS_EACH_LAP):
                    self.sent.append(f"from Kafka {lap} {number}")
                    # also for a queue that no client has used
                    keep = [(UNBOUND_HEADER, b"keep")]
                    kafka.produce(f"{self.system.prefix}.ingress", from_kafka(self._first.name, self.sent[-1]), headers=keep)
                assert kafka.flush(30) == 0
                if self._several:  # an administrator would have to know which broker serves
                    continue
                with suppress(OSError, BasculeError):  # the broker is dead, or no longer knows the request
                    self.system.act("queues/create", name=f"{self._name}.passing")
                with suppress(OSError, BasculeError):
                    self.system.act("queues/delete", name=f"{self._name}.passing")

    def _move(self, moving: Context, queue: Queue, count: int) -> None:
        # After a rollback, messages are redelivered; after a transaction in doubt, the check decides.
        with suppress(TransactionError), moving.consumer(queue, prefetch=count) as consumer:
            for _ in range(count):
                message = consumer.receive_no_wait()
                if message is not None:
                    moving.send(self._out, message.body)
            moving.commit()

    def check(self) -> None:
        """Check that no message is lost or duplicated, whichever queue it is in."""
        assert self.failures == []
        found: Counter[str] = Counter()
        with self._connect() as context:
            for queue in (self._out, self._kept, self._first):
                with context.consumer(queue) as consumer:
                    while (message := consumer.receive_no_wait() or self._on_its_way(consumer, queue, found)) is not None:
                        found[str(message.body)] += 1
                        assert message.body in self.sent
        wrong = {text: found[text] for text in self.sent if found[text] != 1}
        assert wrong == {}, f"of {len(self.sent)} messages, how often: {wrong}"

    def _on_its_way(self, consumer: Consumer, queue: Queue, found: Counter[str]) -> Message | None:
        """Write a message that the broker does not have yet: it comes from Kafka, into the queue that is checked last."""
        return consumer.receive(ARRIVAL_S) if queue is self._first and found.total() < len(self.sent) else None


def from_kafka(address: str, text: str) -> bytes:
    """Return a message in the form in which an ingress passes it to the broker."""
    flags = SendFlag.DURABLE | SendFlag.FROM_KAFKA | SendFlag.SOURCE
    send = Send(flags, Routing.ANYCAST, 4, 0, 0, 0, address, (), (), (), KafkaOrigin("load", 0, 0), text_message(text))
    return encode_record(Kind.DATA, 0, 0, send_entry(send))
