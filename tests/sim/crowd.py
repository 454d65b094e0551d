"""Senders of messages that the journal does not store, to topics with many subscriptions: a simulation of turns of the event loop.

Each message enters its queues over several turns. Meanwhile other senders wait in the line of ``bascule.broker.sender_line``. Senders come,
and some of them are lost while they wait. The code that runs is the engine, ``bascule.broker.fan_out`` and ``sender_line`` among its parts.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

from bascule.amqp.codec import decode
from bascule.broker.engine import Engine
from bascule.broker.journaling import Journaling
from bascule.broker.message import Bodies
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.turns import Retry
from bascule.core.destination import Routing
from bascule.jms.sections import VALUE, places, scan
from bascule.testing.broker import Sender as Answers
from bascule.testing.broker import message_bytes
from tests.support.history import Tally

TOPICS: Final = ("news", "prices")
#: A message for more queues than these enters them in slices; the steps of one turn are few.
MANY: Final = 2
STEPS: Final = (8, 20, 60)
SUBSCRIPTIONS: Final = (3, 12)
SENDERS: Final = (3, 12)
MESSAGES_MAX: Final = 6
#: The time of one turn. Senders are lost in the first ones. After the last one, every other sender must have sent everything.
TURN_MS: Final = 5
LOSING_TURNS: Final = 100
TURNS_MAX: Final = 1_500


@dataclass(slots=True)
class Client:
    """A sender with a connection. It sends one message after another, and goes on with the one that waits, as a connection does."""

    name: str
    topic: str
    left: int
    begins: int  # the turn of its first message
    sent: list[str] = field(default_factory=list)
    waiting: Retry | None = None
    since: int | None = None  # its place among those that wait, by the first time that it asked in vain
    lost: bool = False


class CrowdSimulation:
    """A run. ``loss`` is how often a waiting sender is lost in one turn."""

    def __init__(
        self, seed: int, violations: Collection[enum.StrEnum] = (), *, arrange: Callable[[CrowdSimulation], None] | None = None
    ) -> None:  # fmt: skip
        """``violations`` are rules that the run breaks on purpose. ``arrange`` changes the run once it is drawn."""
        pick = self.random = Random(seed)
        self.now_ms = 1_000_000
        journaling = Journaling(lambda *_: None, violations=violations)
        policy = Policy(AddressPolicy(auto_delete=False))
        self.engine = Engine(journaling, Bodies(None, 1 << 40), lambda: self.now_ms, policy, violations=violations)
        self.engine.deliveries.fan_out.many = MANY
        self.engine.turns.steps = pick.choice(STEPS)
        self.loss = pick.choice((0.0, 0.02, 0.1))
        self.hurry = pick.choice((1.0, 0.5))  # the part of the waiting senders that a turn has time for
        self.queues: dict[str, list[BrokerQueue]] = {}
        for topic in TOPICS:
            names = [f"{topic}.{number}" for number in range(pick.randint(*SUBSCRIPTIONS))]
            self.queues[topic] = [self.engine.create_queue(name, topic, Routing.MULTICAST, durable=False) for name in names]
        self.clients = [
            Client(f"c{number}", pick.choice(TOPICS), pick.randint(1, MESSAGES_MAX), pick.choice((0, 0, pick.randrange(60))))
            for number in range(pick.randint(*SENDERS))
        ]
        self._asked = 0
        self._calm_ms = self.now_ms + LOSING_TURNS * TURN_MS
        self.waited = self.losses = 0
        self.overtaken: list[str] = []
        if arrange is not None:
            arrange(self)

    def run(self) -> Tally:
        """Run turns until every sender is done or lost, and return the verdict."""
        behind: deque[Client] = deque()  # in the order in which the event loop goes on with them
        for turn in range(TURNS_MAX):
            self.now_ms += TURN_MS
            self.engine.turns.begin_turn()
            self.engine.go_on()
            for _ in range(max(1, int(len(behind) * self.hurry)) if behind else 0):
                self._serve(behind.popleft(), behind)
            for client in self.clients:
                if client.begins == turn:
                    self._serve(client, behind)
            if not behind and not self.engine.turns.pending and turn >= max(client.begins for client in self.clients):
                break
        return self._judge()

    def _serve(self, client: Client, behind: deque[Client]) -> None:
        """Go on with a connection, until it waits or has nothing more to send. Its connection may be gone instead."""
        if client.waiting is not None and self.now_ms < self._calm_ms and self.random.random() < self.loss:
            client.lost, client.waiting = True, None
            self.losses += 1
            return
        while client.waiting is not None or client.left:
            client.waiting = self._send(client) if client.waiting is None else client.waiting()
            if client.waiting is not None:
                if client.since is None:
                    self._asked += 1
                    client.since = self._asked
                    self.waited += 1
                behind.append(client)
                return
            self._note_accepted(client)

    def _send(self, client: Client) -> Retry | None:
        name = f"{client.name}-{len(client.sent)}"
        body = message_bytes(name, durable=False)
        return self.engine.send(client.topic, Routing.MULTICAST, body, scan(body), client.name, Answers(), name, waits=True)

    def _note_accepted(self, client: Client) -> None:
        before = [each for each in self.clients if each.waiting is not None and not each.lost and each.since is not None]
        late = [each.name for each in before if client.since is None or (each.since or 0) < client.since]
        self.overtaken += [f"{name} by {client.name}-{len(client.sent)}" for name in late]
        client.sent.append(f"{client.name}-{len(client.sent)}")
        client.since = None
        client.left -= 1

    def _contents(self, queue: BrokerQueue) -> list[str]:
        bodies = [self.engine.bodies.read(message) for message in queue.ready]
        return [str(next(decode(body, start)[0] for section, start, _ in places(body) if section == VALUE)) for body in bodies]

    def _judge(self) -> Tally:
        tally = Tally()
        tally.report("out-of-order", "went on although others had waited for longer", self.overtaken)
        tally.report("stuck", "senders that still wait", (client.name for client in self.clients if client.left and not client.lost))
        for topic, queues in self.queues.items():
            clients = [client for client in self.clients if client.topic == topic]
            for queue in queues:
                self._judge_queue(tally, queue, clients)
        return tally

    def _judge_queue(self, tally: Tally, queue: BrokerQueue, clients: list[Client]) -> None:
        found = self._contents(queue)
        by_client: dict[str, list[str]] = defaultdict(list)
        for name in found:
            by_client[name.partition("-")[0]].append(name)
        tally.report("duplicated", f"twice in {queue.name}", (name for name, count in Counter(found).items() if count > 1))
        tally.report("lost", f"accepted and not in {queue.name}", {name for client in clients for name in client.sent}.difference(found))
        tally.report("out-of-order", f"late in {queue.name}", _late(by_client, clients))


def _late(found: dict[str, list[str]], clients: list[Client]) -> Iterator[str]:
    """Yield the messages that are behind later ones of their sender."""
    for client in clients:
        sent = {name: place for place, name in enumerate(client.sent)}
        there = [sent[name] for name in found[client.name] if name in sent]
        yield from (client.sent[place] for place, last in zip(there[1:], there, strict=False) if place < last)
