"""Senders that wait for room in the queues of their address: each gets its turn, whatever happens to the queues meanwhile."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bascule.broker.policy import BLOCK, REJECT, AddressPolicy, Policy
from bascule.broker.policy_change import change_policy
from bascule.broker.queue import BrokerQueue
from bascule.core.destination import Routing
from bascule.testing.broker import BrokerInMemory, Receiver, Sender, message_bytes

TOPIC = "t"
STEPS = 60


class WaitingSender:
    """A producer that asks for credit when it has none, as a link does, and waits if it gets none."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number
        self.credit = 0
        self.waits = False
        self.served: Counter[WaitingSender] = Counter()  # credit that others got while this sender waited
        run.engine.attach_producer(TOPIC, Routing.MULTICAST)

    def ask(self) -> None:
        """Get credit, or wait."""
        self.credit = self.run.engine.share_of_room(TOPIC, Routing.MULTICAST, 3)
        if not self.credit:
            self.waits = True
            self.run.engine.when_room(TOPIC, Routing.MULTICAST, self, self.resumed)
            return
        for other in self.run.senders:
            if other.waits:
                other.served[self] += 1
                assert other.served[self] <= 1, f"sender {self.number} got credit twice while sender {other.number} waited"

    def resumed(self) -> None:
        """Ask again."""
        assert self.waits
        self.waits = False
        self.ask()
        if not self.waits:
            self.served.clear()

    def send(self) -> None:
        """Use one credit."""
        self.credit -= 1
        self.run.sent += 1
        self.run.broker.send(TOPIC, message_bytes(0), self.run.port, 0, routing=Routing.MULTICAST)
        if not self.credit:
            self.ask()

    def end(self) -> None:
        """Close the link."""
        self.run.senders.remove(self)
        self.run.engine.detach_producer(TOPIC, Routing.MULTICAST)
        if self.waits:
            self.run.engine.forget_waiting(TOPIC, Routing.MULTICAST, self)
        for other in self.run.senders:
            other.served.pop(self, None)


class Run:
    """A topic with some subscriptions, of which most are full most of the time."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.broker = BrokerInMemory(policy=self.policy(BLOCK), turn_steps=STEPS)
        self.engine = self.broker.engine
        self.port = Sender()
        self.numbers = 0
        self.sent = 0
        self.senders: list[WaitingSender] = []
        self.consumers: dict[BrokerQueue, Receiver] = {}
        for _ in range(3):
            self.subscribe()
            self.begin()

    def policy(self, when_full: str) -> Policy:
        """Return settings with small queues."""
        most = self.pick.randint(1, 4)
        return Policy(AddressPolicy(auto_delete=False, when_full=when_full, max_messages=most, max_bytes=self.pick.choice((0, 200))))

    def subscribe(self) -> None:
        """Create a subscription with a consumer that settles a message when the test says so."""
        self.numbers += 1
        name = f"s{self.numbers}"
        queue = self.engine.create_queue(name, self.pick.choice((TOPIC, "#")), Routing.MULTICAST, subscription=name)
        self.consumers[queue] = self.broker.attach(queue, 1 << 30)

    def begin(self) -> None:
        """Begin a sender."""
        self.numbers += 1
        self.senders.append(WaitingSender(self, self.numbers))
        self.senders[-1].ask()

    def settle_one(self, queue: BrokerQueue) -> bool:
        """Acknowledge the oldest message of a subscription. Return False if its consumer has none."""
        consumer = self.consumers[queue].consumer
        unsettled = next(iter(consumer.unacked.values()), None)
        if unsettled is not None:
            self.engine.acknowledge(consumer, unsettled)
        return unsettled is not None

    def command(self) -> None:
        """Do one thing of a random kind."""
        what, pick = self.pick.random(), self.pick
        ready = [sender for sender in self.senders if sender.credit]
        if what < 0.35 and ready:
            pick.choice(ready).send()
        elif what < 0.65 and self.consumers:
            self.settle_one(pick.choice(list(self.consumers)))
        elif what < 0.85:
            self.turn()
        elif what < 0.89 and len(self.senders) < 12:
            self.begin()
        elif what < 0.92 and self.senders:
            pick.choice(self.senders).end()
        elif what < 0.95 and len(self.consumers) < 6:
            self.subscribe()
        elif what < 0.97 and self.consumers:
            queue = pick.choice(list(self.consumers))
            del self.consumers[queue]
            self.engine.delete_queue(queue)
        elif what < 0.98:
            change_policy(self.engine, self.policy(pick.choice((BLOCK, BLOCK, REJECT))))

    def turn(self) -> None:
        """Run one turn of the event loop."""
        self.broker.flush()
        self.broker.confirm(len(self.broker.in_flight))

    def check(self) -> None:
        """Check that a sender waits only if a queue is full, and at one queue for all senders."""
        self.broker.settle()
        waits = any(sender.waits for sender in self.senders)
        full = [queue for queue in self.consumers if queue.full() and queue.settings.when_full == BLOCK]
        assert full or not waits, "a sender waits though no queue is full"
        assert sum(len(queue.blocked) for queue in self.consumers) == waits
        assert self.engine.room.waiting == sum(sender.waits for sender in self.senders)


@pytest.mark.parametrize("seed", range(60))
def test_each_sender_gets_its_turn_whatever_happens_to_the_queues_of_its_topic(seed: int) -> None:
    run = Run(seed)
    for number in range(400):
        run.command()
        if not number % 100:
            run.check()
    run.check()
    for _ in range(200):  # the consumers settle everything: then nobody waits
        if not sum(map(run.settle_one, run.consumers)) and not any(sender.waits for sender in run.senders):
            break
        run.broker.settle()
    assert not any(sender.waits for sender in run.senders)
    assert run.sent
    for sender in list(run.senders):
        sender.end()
    assert run.engine.room.waiting == 0
    assert not any(queue.blocked for queue in run.consumers)
