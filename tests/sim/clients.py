"""JMS clients of the simulation, which behave as Qpid JMS: they reconnect, repeat an unanswered send, and never repeat a commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from random import Random
from typing import Any, Final

from bascule.amqp.types import Int
from bascule.broker.engine import Engine
from bascule.broker.errors import QueueFull
from bascule.broker.message import BrokerMessage
from bascule.broker.transactions import LocalTransaction
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.jms.sections import Scan, scan
from tests.sim.broker import Broker
from tests.sim.connections import Connection, ConnectionLost, Port
from tests.sim.world import Process, Promise, TimeOut, World
from tests.support.operations import Facts, Operation, Outcome, Place

TOPIC: Final = "topic:"
#: How long a consumer waits for a first message before it checks whether to stop, and for more before it settles what it has.
FIRST_MS: Final = 150.0
MORE_MS: Final = 5.0
PREFETCH: Final = 6
#: Interval at which a napping client checks whether its nap is over.
STEP_MS: Final = 25.0
#: How often a message of a transaction is refused, if the seed has refusals.
REFUSED: Final = 0.15


@lru_cache(maxsize=10_000)
def id_of(body: bytes) -> str:
    """Return the id in a message's text."""
    return str(decode_message(body).body)


@dataclass(slots=True)
class Stage:
    """The state that all clients share. ``ending`` is set when consumers should stop once no more messages come."""

    world: World
    brokers: Sequence[Broker]
    operations: list[Operation] = field(default_factory=list)
    facts: dict[str, Facts] = field(default_factory=dict)
    ending: bool = False
    #: How long some consumers may leave their messages unsettled.
    nap_ms: float = 0.0
    #: Deliveries of a broker that did not know of a newer epoch yet. It can no longer acknowledge them. Only a timely election can prevent
    #: such deliveries; the fence makes sure that their acknowledgements do not count.
    stale: int = 0
    last_work_ms: float = 0.0
    #: Decides which messages of transactions the broker refuses; None: none. Separate from the world's chance, whose course must not
    #: change.
    refusals: Random | None = None

    def refuses(self) -> bool:
        """Return True if the broker refuses the next message of a transaction."""
        return self.refusals is not None and self.refusals.random() < REFUSED

    def note(self, operation: Operation) -> int:
        """Record an operation that has ended. Return its place in the history."""
        self.last_work_ms = self.world.now_ms
        self.world.say(f"{operation.client}: {operation.op} {','.join(operation.ids)} {operation.outcome}")
        self.operations.append(operation)
        return len(self.operations) - 1


class Client:
    """A client with its process. The process is never killed, since the client's observations would be lost."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage = stage
        self.world = stage.world
        self.name = name
        self.process = Process(stage.world, name)
        self.done: Promise[None] = Promise()
        self._numbers = 0

    async def connect(self) -> Connection:
        """Connect to some broker that serves."""
        while True:
            serving = [broker for broker in self.stage.brokers if broker.serving]
            for broker in self.world.random.sample(serving, len(serving)) if serving else ():
                connection = broker.connect(self.name)
                if connection is not None:
                    return connection
            await self.process.sleep(4 + self.world.random.random() * 12)

    def message(self, to: str, facts: Facts) -> tuple[str, bytes, Scan]:
        """Return a new message: its id, its bytes and their scan."""
        id = f"{self.name}-{self._numbers}"
        self._numbers += 1
        self.stage.facts[id] = facts
        return id, *encoded(f"ID:{id}", to, id, facts.persistent, facts.priority, tuple(facts.properties.items()))

    def some_facts(self) -> Facts:
        """Draw the properties of a new message."""
        pick = self.world.random
        return Facts(priority=pick.choice((4, 4, 4, 9)), persistent=pick.random() < 0.9, properties={"kind": pick.randrange(3)})

    def send(
        self, connection: Connection, engine: Engine, to: str, body: bytes, said: Scan, token: Any, transaction: LocalTransaction | None
    ) -> None:
        """Send a message at the broker."""
        routing = Routing.MULTICAST if to.startswith(TOPIC) else Routing.ANYCAST
        engine.send(to.removeprefix(TOPIC), routing, body, said, self.name, connection, token, transaction)

    def note(self, op: str, ids: Sequence[str], outcome: Outcome, begun_ms: float, **more: Any) -> int:
        """Record an operation in the history."""
        if outcome == "indeterminate":
            self.world.note("doubt", self.name)
        facts = {id: self.stage.facts[id] for id in ids if id in self.stage.facts} if op == "send" else {}
        return self.stage.note(
            Operation(self.name, tuple(ids), outcome, op=op, begun_ms=begun_ms, ended_ms=self.world.now_ms, facts=facts, **more)
        )


class Sender(Client):
    """A client that sends one message after another, and repeats each until it is answered."""

    def __init__(self, stage: Stage, name: str, to: str, count: int, pause_ms: float) -> None:
        super().__init__(stage, name)
        self._to, self._count, self._pause_ms = to, count, pause_ms
        self.done = self.process.spawn(self._run())

    async def _run(self) -> None:
        connection = await self.connect()
        for _ in range(self._count):
            await self.process.sleep(self.world.random.random() * self._pause_ms)
            id, body, said = self.message(self._to, self.some_facts())
            begun_ms = self.world.now_ms
            outcome: Outcome = "ok"
            refused: Outcome = "fail"
            while True:
                try:
                    await connection.ask(self.send_one, connection, body, said)
                except ConnectionLost:
                    refused = "indeterminate"  # whatever the answer to the repetition is
                    connection = await self.connect()
                    continue
                except BasculeError:
                    outcome = refused
                break
            self.note("send", [id], outcome, begun_ms, target=self._to)

    def send_one(self, connection: Connection, body: bytes, said: Scan, token: Promise[None]) -> None:
        """Send a message at the broker."""
        self.send(connection, connection.broker.engine, self._to, body, said, token, None)


class Transacted(Client):
    """The common part of transacted sessions."""

    def _begin(self, connection: Connection, name: bytes) -> None:
        connection.transactions[name] = connection.broker.engine.begin(name)

    def _send_in(self, connection: Connection, name: bytes, to: str, body: bytes, said: Scan) -> None:
        """Send in a transaction. The client commits without looking at the outcome, as Qpid JMS does."""
        if self.stage.refuses():
            self.world.note("refuse message", f"{id_of(body)} of {self.name}")
            full = QueueFull(f"{to!r} is full")
            connection.broker.engine.refuse(connection, Promise(), full, connection.transactions[name])
            return
        self.send(connection, connection.broker.engine, to, body, said, Promise(), connection.transactions[name])

    def _acknowledge_in(self, connection: Connection, name: bytes, port: Port, message: BrokerMessage) -> None:
        connection.broker.engine.acknowledge_in(connection.transactions[name], port.consumer, message)

    def _end(self, connection: Connection, name: bytes, commit: bool, answer: Promise[None]) -> None:
        transaction = connection.transactions.pop(name)
        if commit:
            connection.broker.engine.commit(
                transaction, lambda error: connection.down(*((answer.keep, None) if error is None else (answer.fail, error)))
            )
        else:
            connection.broker.engine.rollback(transaction)
            connection.down(answer.keep, None)

    def _attach(self, connection: Connection, place: Place, selector: str, attached: Promise[Port]) -> None:
        engine = connection.broker.engine
        port = Port(connection, 0)
        name = place.destination.removeprefix(TOPIC)
        if place.subscription:
            queue = engine.addresses.subscriptions.get(place.subscription) or engine.create_queue(
                place.subscription, name, Routing.MULTICAST, selector=selector, subscription=place.subscription
            )
        else:
            queue = engine.queue(name)
        port.consumer = engine.attach(queue, port)
        connection.consumers.append(port)
        # The subscription exists for good only once it is stored.
        engine.journaling.then(connection.down, attached.keep, port)
        self._credit(connection, port, PREFETCH)

    def _detach(self, connection: Connection, port: Port) -> None:
        connection.consumers.remove(port)
        connection.broker.engine.detach(port.consumer, failed=False)

    def _credit(self, connection: Connection, port: Port, count: int) -> None:
        port.credit += count
        connection.broker.engine.wake(port.consumer.queue)

    async def _next(self, connection: Connection, port: Port, patience_ms: float) -> tuple[BrokerMessage, int] | None:
        if not port.inbox:
            try:
                await self.process.within(patience_ms, port.arrived)
            except TimeOut:
                return None
        if connection.lost.done:
            raise ConnectionLost
        return port.inbox.popleft()

    async def end(self, connection: Connection, name: bytes, *, commit: bool = True) -> Outcome:
        """Commit or roll back. Return what the client then knows of the outcome."""
        try:
            await connection.ask(self._end, connection, name, commit)
        except ConnectionLost:
            return "indeterminate" if commit else "fail"
        except BasculeError:
            return "fail"
        return "ok" if commit else "fail"


class TransactedSender(Transacted):
    """A client that sends to several destinations in each transaction."""

    def __init__(self, stage: Stage, name: str, targets: Sequence[str], count: int, pause_ms: float) -> None:
        super().__init__(stage, name)
        self._targets, self._count, self._pause_ms = targets, count, pause_ms
        self.done = self.process.spawn(self._run())

    async def _run(self) -> None:
        connection = await self.connect()
        for number in range(self._count):
            await self.process.sleep(self.world.random.random() * self._pause_ms)
            if connection.lost.done:
                connection = await self.connect()
            begun_ms = self.world.now_ms
            name = f"{self.name}:{number}".encode()
            sent: list[tuple[str, str]] = []
            connection.up(self._begin, connection, name)
            for to in self._targets:
                for _ in range(self.world.random.randint(1, 2)):
                    id, body, said = self.message(to, Facts(properties={"kind": self.world.random.randrange(3)}))
                    sent.append((to, id))
                    connection.up(self._send_in, connection, name, to, body, said)
                await self.process.sleep(self.world.random.random())
            rolls_back = self.world.chance(0.1)
            outcome = "fail" if connection.lost.done else await self.end(connection, name, commit=not rolls_back)
            for to in self._targets:
                ids = [id for target, id in sent if target == to]
                self.note("send", ids, outcome, begun_ms, target=to, transaction=name.decode())


class ReceivingClient(Transacted):
    """A client that receives in transactions or message by message, and may send on what it received in the same transaction."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        source: str,
        *,
        subscription: str = "",
        selector: str = "",
        to: str | None = None,
        transacted: bool = True,
        naps: bool = False,
    ) -> None:
        super().__init__(stage, name)
        self._naps = naps
        self._source, self._subscription, self._selector, self._to, self._transacted = source, subscription, selector, to, transacted
        self._where = {"source": source, "subscription": subscription}
        self.done = self.process.spawn(self._run())

    async def _run(self) -> None:
        begun_ms = self.world.now_ms  # an attach whose answer got lost may have made the subscription
        while not self.stage.ending:
            connection = await self.connect()
            try:
                port = await connection.ask(self._attach, connection, Place(self._source, self._subscription), self._selector)
            except ConnectionLost:
                continue
            if self._subscription:
                self.note("subscribe", (), "ok", begun_ms, selector=self._selector, **self._where)
            try:
                while not self.stage.ending:
                    await self._take(connection, port)
            except ConnectionLost:
                continue

    async def _nap(self) -> None:
        until_ms = self.world.now_ms + self.world.random.random() * self.stage.nap_ms
        while self.stage.nap_ms and self.world.now_ms < until_ms:
            await self.process.sleep(STEP_MS)

    async def _take(self, connection: Connection, port: Port) -> None:
        if self._naps:
            await self._nap()
        begun_ms = self.world.now_ms
        taken: list[tuple[BrokerMessage, int]] = []
        for _ in range(self.world.random.randint(1, 4)):
            found = await self._next(connection, port, MORE_MS if taken else FIRST_MS)
            if found is None:
                break
            taken.append(found)
        if connection.lost.done and not taken:
            raise ConnectionLost
        if not taken:
            return
        ids = [id_of(message.body or b"") for message, _ in taken]
        stale = connection.broker.superseded
        said: dict[str, Any] = {**self._where, "redelivered": tuple(id for id, (_, count) in zip(ids, taken, strict=True) if count)}
        if self._transacted:
            outcome = await self._settle(connection, port, [message for message, _ in taken], ids)
            if stale and outcome != "ok":
                self.stage.stale += len(ids)
            else:
                self.note("move" if self._to else "receive", ids, outcome, begun_ms, target=self._to, **said)
        else:
            if stale:
                self.stage.stale += len(ids)
            else:
                connection.lost.then(partial(self._in_doubt, self.note("receive", ids, "ok", begun_ms, **said)))
            for message, _ in taken:
                connection.up(self._acknowledge, connection, port, message)
        connection.up(self._credit, connection, port, len(taken))

    def _acknowledge(self, connection: Connection, port: Port, message: BrokerMessage) -> None:
        connection.broker.engine.acknowledge(port.consumer, message)

    def _in_doubt(self, place: int) -> None:
        """Mark an acknowledgement as in doubt: no one answers it, so a lost connection may have lost it."""
        self.stage.operations[place] = replace(self.stage.operations[place], outcome="indeterminate")

    async def _settle(self, connection: Connection, port: Port, messages: Sequence[BrokerMessage], ids: Sequence[str]) -> Outcome:
        if connection.lost.done:
            return "fail"
        name = f"{self.name}:{self._numbers}".encode()
        self._numbers += 1
        connection.up(self._begin, connection, name)
        for message, id in zip(messages, ids, strict=True):
            connection.up(self._acknowledge_in, connection, name, port, message)
            if self._to is not None:
                connection.up(self._send_in, connection, name, self._to, *moved(self._to, id, self.stage.facts))
        return await self.end(connection, name, commit=not (self.world.chance(0.1) and not self.stage.ending))


def moved(to: str, id: str, facts: Mapping[str, Facts]) -> tuple[bytes, Scan]:
    """Return a message that is sent on, with the persistence of the original."""
    first = facts.get(id, Facts())
    return encoded(f"ID:{to}:{id}", to, id, first.persistent, first.priority)


@lru_cache(maxsize=10_000)
def encoded(
    message_id: str, to: str, text: str, persistent: bool, priority: int, properties: Sequence[tuple[str, int]] = ()
) -> tuple[bytes, Scan]:
    """Return a message's bytes and their scan. Cached, because many runs send the same messages."""
    body = encode_message(
        JmsMessage(
            message_id=message_id, destination=to.removeprefix(TOPIC), destination_kind="topic" if to.startswith(TOPIC) else "queue",
            delivery_mode="PERSISTENT" if persistent else "NON_PERSISTENT", priority=priority,
            properties={name: Int(value) for name, value in properties}, body_kind="text", body=text,
        )
    )  # fmt: skip
    return body, scan(body)
