"""A broker on a log in memory, a clock under the test's control, and short ways to send and receive."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.amqp.codec import decode
from bascule.broker.addresses import Diverts
from bascule.broker.engine import Engine
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.core.destination import Routing
from bascule.jms.sections import VALUE, message_annotation, places
from bascule.jms.selector import compile_selector
from bascule.testing.broker import BrokerInMemory, Receiver, Sender, message_bytes

START_MS = 1_000_000


class Bench:
    """The broker under test and one producer."""

    def __init__(self, policy: Policy, **options: Any) -> None:
        self.now_ms = START_MS
        self.broker = BrokerInMemory(clock=lambda: self.now_ms, policy=policy, **options)
        self.sender = Sender()

    @property
    def engine(self) -> Engine:
        return self.broker.engine

    def queue(self, name: str = "q") -> BrokerQueue:
        return self.engine.queue(name)

    def subscription(self, name: str, address: str = "t", **options: Any) -> BrokerQueue:
        return self.engine.create_queue(name, address, Routing.MULTICAST, **options)

    def encode(self, content: Any, **options: Any) -> bytes:
        return message_bytes(content, **options)

    def content(self, message: BrokerMessage) -> Any:
        """Return the content that the test chose: the body, without the sections before it."""
        body = self.engine.bodies.read(message)
        return next(decode(body, start)[0] for section, start, _ in places(body) if section == VALUE)

    def put(
        self, content: Any, *, to: str = "q", container: str = "client", transaction: Any = None, user: str = "", **options: Any
    ) -> None:  # fmt: skip
        """Send to a queue, or to a topic if the name begins with "t". The content is also the token."""
        routing = Routing.MULTICAST if to.startswith("t") else Routing.ANYCAST
        body = self.encode(content, **options)
        self.broker.send(to, body, self.sender, content, routing=routing, container=container, transaction=transaction, user=user)

    def fill(self, *contents: Any, **options: Any) -> None:
        """Send, and store."""
        for content in contents:
            self.put(content, **options)
        self.broker.settle()

    def consumer(self, queue: BrokerQueue | None = None, credit: int = 100, selector: str | None = None) -> Receiver:
        receiver = self.broker.attach(queue or self.queue(), credit, selector=selector if selector is None else compile_selector(selector))
        self.broker.settle()
        return receiver

    def got(self, receiver: Receiver) -> list[Any]:
        return [self.content(message) for message in receiver.messages]

    def counts(self, receiver: Receiver) -> list[int]:
        return [count for _, count in receiver.received]

    def annotation(self, queue: str, name: str) -> Any:
        """Return an annotation of the only message that waits in a queue."""
        (message,) = self.queue(queue).ready
        return message_annotation(self.engine.bodies.read(message), name)

    def waiting(self, queue: BrokerQueue) -> list[Any]:
        return [self.content(message) for message in queue.ready]

    def acknowledge(self, receiver: Receiver, *indexes: int) -> None:
        for index in indexes or range(len(receiver.messages)):
            self.engine.acknowledge(receiver.consumer, receiver.messages[index])

    def crash(self, stored: int = 0) -> None:
        self.broker.start(stored=stored)

    def values(self) -> list[bytes]:
        """Return the journal."""
        return [value for _, value in self.broker.log.records]

    def use(self, diverts: Diverts) -> None:
        self.engine.addresses.use(diverts)


@pytest.fixture
def policy() -> Policy:
    return Policy(AddressPolicy(deliveries_max=3))


@pytest.fixture
def bench(policy: Policy) -> Bench:
    return Bench(policy)
