"""The engine against a small model of JMS: random commands, crashes at any record, and a tally at the end.

The model is written from the rules (what a queue, a subscription, a transaction promises), not from the engine. Of the engine it knows
one thing: which journal record a decision went into, and so what a crash may take back.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from bascule.broker import branches
from bascule.broker import delivery as delivery_module
from bascule.broker import loading as loading_module
from bascule.broker import queue as queue_module
from bascule.broker import ready as ready_module
from bascule.broker.branches import Branches
from bascule.broker.delivery import Deliveries
from bascule.broker.duplicates import DuplicateWindow
from bascule.broker.engine import Engine
from bascule.broker.errors import BranchBusy, QueueFull, UnknownBranch
from bascule.broker.groups import BUCKETS, Groups
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.ready import Ready
from bascule.broker.sending import Sending
from bascule.broker.transactions import LocalTransaction
from bascule.core.destination import Routing
from bascule.core.xid import Xid
from bascule.jms.selector import compile_selector
from bascule.journal.branches import Ending
from bascule.testing.broker import BrokerInMemory, Receiver, Sender, message_bytes

#: Runs of the ordinary suite; BASCULE_MODEL_RUNS asks for more.
RUNS = int(os.environ.get("BASCULE_MODEL_RUNS", "10000"))
#: From where the seeds count: another value, other runs.
FIRST_SEED = int(os.environ.get("BASCULE_MODEL_SEED", "1"))
#: Of them those with limits so small that they are met all the time.
SHORT_RUNS = RUNS // 3
#: A planted fault must show within so many.
PLANTED_RUNS = 1_500
TIMEOUT_S = 120 + RUNS // 20
COMMANDS_MAX = 60
DELIVERIES_MAX = 3
TOPIC = "t"
KINDS = 3  # values of the property that selectors ask for
DEAD_LETTERS, EXPIRED = "DLQ", "ExpiryQueue"
NEVER = 1 << 60
DIGITS = 6  # of a message's number, which its body ends with
STEP_MS = 30
#: After so long everything that expired has been found.
SWEPT_MS = 5_000

#: Queues with rules of their own; each run has two of them beside the plain one.
PLAIN = "q"
SLOW, ALONE, SMALL, LOSSY, WAITING = "slow", "alone", "small", "lossy", "waiting"
DEPTH_MAX = 3
HELD_MAX = 2
PAUSE_MS, PAUSE_MAX_MS = 40, 70
RULES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        SLOW,
        {"redelivery_delay_ms": PAUSE_MS, "redelivery_multiplier": 2.0, "redelivery_delay_max_ms": PAUSE_MAX_MS, "prefetch_max": HELD_MAX},
    ),
    (ALONE, {"exclusive": True}),
    (SMALL, {"max_messages": DEPTH_MAX, "when_full": "reject"}),
    (LOSSY, {"max_messages": DEPTH_MAX, "when_full": "drop-oldest-nonpersistent"}),
    (WAITING, {"max_messages": DEPTH_MAX, "when_full": "block"}),
)
LIMITED = (SMALL, LOSSY, WAITING)
#: Message groups that a queue can tell apart: by chance two names may share a bucket.
GROUPS = tuple({hash(name) % BUCKETS: name for name in "abcd"}.values())[:2]


POLICY = Policy(AddressPolicy(deliveries_max=DELIVERIES_MAX, auto_delete=False), RULES)


class Facts(NamedTuple):
    """What a message is like; times in ms, 0 for none."""

    persistent: bool
    priority: int
    kind: int
    expiry_ms: int
    due_ms: int
    group: str | None


@dataclass(eq=False)
class Copy:
    """A message in one queue. ``stored`` and ``gone`` are the records that say so (0: none needed, NEVER: not yet)."""

    number: int
    facts: Facts
    durable: bool  # survives a crash here: a persistent message in a durable queue
    order: int  # in which it was decided
    stored: int = NEVER
    gone: int = NEVER
    place: int | None = None  # order of arrival, once consumers may have it
    holder: object = None  # a consumer, or a transaction
    delivered: bool = False
    count: int | None = 0  # failed deliveries; None after a crash: between the two below
    count_max: int = 0
    not_before_ms: int = 0  # of the next try after a failed delivery

    @property
    def there(self) -> bool:
        return self.gone == NEVER

    @property
    def waits(self) -> bool:
        return self.place is not None and self.holder is None and self.there


@dataclass(eq=False)
class Line:
    """A queue, or one subscription of the topic."""

    name: str
    durable: bool
    kind: int | None = None  # what its selector wants
    no_local: str = ""
    created: int = 0
    deleted: int = NEVER
    copies: list[Copy] = field(default_factory=list)
    consumers: list[Client] = field(default_factory=list)
    holders: dict[str, Client] = field(default_factory=dict)  # of message groups

    @property
    def depth(self) -> int:
        return sum(copy.there for copy in self.copies)


@dataclass(eq=False)
class Held:
    """A prepared branch: what it does when it is committed, and the records that say so."""

    actions: list[tuple[str, Any]]
    record: int
    over: int = NEVER
    ending: Ending | None = None


@dataclass
class Sent:
    """A persistent send outside transactions. ``record`` is NEVER again when a crash took it."""

    address: str
    body: bytes
    facts: Facts
    ttl_ms: int
    delay_ms: int
    record: int


class Client(Receiver):
    """A consumer under the model's eyes."""

    def __init__(self, run: Run, line: Line, credit: int, kind: int | None, *, settled: bool) -> None:
        super().__init__(credit)
        self.run, self.line, self.kind, self.settled = run, line, kind, settled
        self.held: dict[Copy, tuple[BrokerMessage, int]] = {}

    def wants(self, copy: Copy) -> bool:
        return self.kind in (None, copy.facts.kind)

    def deliver(self, message: BrokerMessage, delivery_count: int) -> None:
        assert self.credit > 0, "delivered without credit"
        super().deliver(message, delivery_count)
        self.run.delivered(self, message, delivery_count)


class Run:
    """One run of the engine and the model side by side."""

    POLICY = POLICY
    SETTLEMENTS = ("accept", "accept", "accept", "transaction", "transaction", "release", "fail", "reject")

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ms = 1_000
        self.history: list[str] = []
        self.lines: list[Line] = []
        self.clients: list[Client] = []
        self.transactions: dict[LocalTransaction, list[tuple[str, Any]]] = {}
        self.held: dict[Xid, Held] = {}  # prepared branches
        self.ended: dict[Xid, Ending] = {}
        self.sender = Sender()
        self.answers_due: dict[int, int] = {}  # token -> record it waits for
        self.answers_seen = 0
        self.refusals_due: set[int] = set()  # tokens of sends to a full queue
        self.sent: dict[int, Sent] = {}  # by number: what a client may repeat
        self.unplaced: list[tuple[Line, Copy]] = []  # not confirmed yet, in the order of their sends
        self.numbers = 0
        self.tokens = 0
        self.places = 0
        self.orders = 0
        self.delayed: list[tuple[Line, Copy]] = []  # stored, and not yet due
        self.crashes = 0
        special = self.random.sample([name for name, _ in RULES], 2)
        self.queues = (PLAIN, *special)
        self.broker = BrokerInMemory(clock=lambda: self.now_ms, policy=self.POLICY)
        for name, kind, no_local in (("all", None, ""), ("some", 1, ""), ("others", None, "me")):
            self.subscribe(name, durable=True, kind=kind, no_local=no_local)
        self.broker.settle()

    # -- what the model knows ----------------------------------------------------------------------------------------

    def record(self) -> int:
        """The journal record that all decisions up to now wait for; 0 for none."""
        journaling = self.broker.engine.journaling
        if not journaling.batch.empty:
            return journaling.batch.sequence
        return journaling.in_flight[-1].sequence if journaling.in_flight else 0

    def live(self) -> Iterator[Line]:
        return (line for line in self.lines if line.deleted == NEVER)

    def line(self, name: str) -> Line:
        found = next((line for line in self.live() if line.name == name), None)
        if found is None:
            self.broker.engine.queue(name)
            found = Line(name, durable=True, created=self.record())
            self.lines.append(found)
        return found

    def takers(self, address: str, container: str, kind: int) -> list[Line]:
        if address != TOPIC:
            return [self.line(address)]
        subscriptions = [line for line in self.live() if line.name not in (*self.queues, DEAD_LETTERS, EXPIRED)]
        return [line for line in subscriptions if line.kind in (None, kind) and line.no_local != container]

    def arrive(self, copies: list[tuple[Line, Copy]], record: int) -> None:
        for line, copy in copies:
            copy.stored = record
            line.copies.append(copy)
            if record:
                self.unplaced.append((line, copy))
            else:
                self.appear(line, copy)

    def copy(self, number: int, facts: Facts, *, durable: bool) -> Copy:
        self.orders += 1
        return Copy(number, facts, durable, self.orders)

    def appear(self, line: Line, copy: Copy) -> None:
        """It is in its queue: at once for consumers, or when its time comes."""
        if copy.facts.due_ms > self.now_ms:
            self.delayed.append((line, copy))
        else:
            self.places += 1
            copy.place = self.places

    def expired(self, copy: Copy) -> bool:
        return 0 < copy.facts.expiry_ms <= self.now_ms

    def may_have(self, client: Client, copy: Copy) -> bool:
        """Whether a consumer may be given a message that is in its queue."""
        line = client.line
        holder = line.holders.get(copy.facts.group or "")
        return (
            copy.waits
            and client.wants(copy)
            and not self.expired(copy)
            and copy.not_before_ms <= self.now_ms
            and (holder is None or holder is client or not holder.wants(copy))
        )

    def delivered(self, client: Client, message: BrokerMessage, count: int) -> None:
        assert message.body is not None
        number, line = int(message.body[-DIGITS:]), client.line
        if line.name == EXPIRED:
            self.find_expired(line, number)
        found = [copy for copy in line.copies if copy.number == number and copy.waits]
        assert found, f"message {number} of {line.name} delivered, which does not wait there"
        copy = min(found, key=lambda copy: copy.place or 0)
        assert client.wants(copy), f"message {number} does not fit the consumer's selector"
        assert not self.expired(copy), f"message {number} was expired"
        assert copy.not_before_ms <= self.now_ms, f"message {number} came again too early"
        assert self.may_have(client, copy), f"message {number} is of a group that another consumer has"
        assert line.name != ALONE or line.consumers[0] is client, "another consumer is the one that is served"
        assert line.name != SLOW or client.settled or len(client.held) < HELD_MAX, "too many held"
        if line.name not in (DEAD_LETTERS, EXPIRED):
            for other in line.copies:
                if self.may_have(client, other):
                    rank = (-copy.facts.priority, copy.place)
                    assert (-other.facts.priority, other.place) >= rank, f"message {number} overtook {other.number}"
        if copy.count is not None:
            assert count == copy.count, f"message {number}: delivery count {count}, not {copy.count}"
        else:
            assert int(copy.delivered) <= count <= copy.count_max, f"message {number}: delivery count {count} after a crash"
        copy.delivered, copy.count = True, count
        if copy.facts.group is not None:
            line.holders.setdefault(copy.facts.group, client)
        if client.settled:
            self.broker.engine.acknowledge(client.consumer, message)
            copy.gone = self.record() if copy.durable else 0
        else:
            copy.holder = client
            client.held[copy] = (message, count)

    def find_expired(self, line: Line, number: int) -> None:
        """What expired is moved some time later: here it is seen that it was, once for each copy that expired."""
        if any(copy.number == number and copy.waits for copy in line.copies):
            return
        for other in self.lines:
            for copy in other.copies:
                if copy.number == number and copy.there and copy.holder is None and self.expired(copy) and other is not line:
                    copy.gone = 0
                    moved = self.copy(number, copy.facts._replace(expiry_ms=0, due_ms=0), durable=copy.facts.persistent)
                    moved.count, moved.count_max = None, int(self.crashes > 0)
                    self.arrive([(line, moved)], 0)
                    return

    def give_back(self, line: Line, copies: list[Copy], *, failed: bool) -> None:
        """Copies wait again; too often failed ones have moved to the dead letters."""
        record = self.record()
        for copy in copies:
            copy.holder = None
            if line.deleted != NEVER or not failed:
                continue
            assert copy.count is not None
            copy.count += 1
            if line.name == SLOW:
                copy.not_before_ms = self.now_ms + min(PAUSE_MS * 2 ** (copy.count - 1), PAUSE_MAX_MS)
            if copy.count >= DELIVERIES_MAX and line.name != DEAD_LETTERS:
                self.dead_letter(copy, record)

    def dead_letter(self, copy: Copy, record: int) -> None:
        copy.gone = record if copy.durable else 0
        dead = self.copy(copy.number, copy.facts._replace(expiry_ms=0, due_ms=0), durable=copy.facts.persistent)
        self.arrive([(self.line(DEAD_LETTERS), dead)], record if copy.facts.persistent else 0)

    def answered(self) -> None:
        stored = self.broker.engine.journaling.confirmed_sequence
        for token, error in self.sender.answers[self.answers_seen :]:
            assert (type(error) is QueueFull) == (token in self.refusals_due), f"send {token}: {error}"
            if token in self.refusals_due:
                self.refusals_due.remove(token)
                continue
            record = self.answers_due.pop(token, None)
            assert record is not None, f"send {token} answered twice"
            assert record <= stored, f"send {token} answered before record {record} was stored"
        self.answers_seen = len(self.sender.answers)

    # -- commands ----------------------------------------------------------------------------------------------------

    def subscribe(self, name: str, *, durable: bool, kind: int | None, no_local: str = "") -> Line:
        selector = "" if kind is None else f"kind = {kind}"
        self.broker.engine.create_queue(name, TOPIC, Routing.MULTICAST, durable=durable, selector=selector, no_local=no_local)
        line = Line(name, durable, kind, no_local, self.record() if durable else 0)
        self.lines.append(line)
        return line

    def send(self) -> None:
        """A message, persistent or not, perhaps in a transaction."""
        pick = self.random
        address, container = pick.choice((*self.queues, *self.queues[1:], TOPIC, TOPIC)), pick.choice(("me", "you"))
        number, transaction = self.numbers, pick.choice([None, *self.transactions])
        container = container if transaction is None else self.client_of(transaction)
        self.numbers += 1
        # When exactly an expired message leaves is open: of a queue with a limit it must be known.
        ttl_ms, delay_ms = (0, 0) if address in LIMITED else (pick.choice((0, 0, 0, 0, 50)), pick.choice((0, 0, 0, 0, 0, 2 * STEP_MS)))
        facts = Facts(
            pick.random() < (0.3 if address == LOSSY else 0.8), pick.choice((4, 4, 4, 9)), pick.randrange(KINDS),
            self.now_ms + ttl_ms if ttl_ms else 0, self.now_ms + delay_ms if delay_ms else 0, pick.choice((None, None, *GROUPS)),
        )  # fmt: skip
        body = message_bytes(
            f"{number:0{DIGITS}d}", durable=facts.persistent, priority=facts.priority, ttl_ms=ttl_ms, delivery_delay_ms=delay_ms,
            message_id=f"id{number}", properties={"kind": facts.kind}, group=facts.group,
        )  # fmt: skip
        takers = self.takers(address, container, facts.kind)
        self.history.append(f"send {number} to {address} by {container} {facts} in {transaction and transaction.id!r}")
        refused = self.full(address)
        self.submit(address, body, container, transaction, refused=refused)
        if refused:
            return
        record = self.record() if facts.persistent and transaction is None else 0
        self.answers_due[self.tokens] = record
        if transaction is not None:
            self.transactions[transaction].append(("send", (address, container, number, facts)))
            return
        self.place(takers, number, facts, record)
        if facts.persistent and container == "me":
            self.sent[number] = Sent(address, body, facts, ttl_ms, delay_ms, record)

    def full(self, address: str) -> bool:
        """Whether a message to the address is refused; what may go for its sake is gone then."""
        if address not in LIMITED:
            return False
        line = self.line(address)
        if address == WAITING:
            room = self.broker.engine.share_of_room(address, Routing.ANYCAST, 10)
            assert room == max(0, DEPTH_MAX - line.depth), f"room for {room} beside {line.depth}"
            return False
        while address == LOSSY and line.depth >= DEPTH_MAX:
            droppable = [copy for copy in line.copies if copy.waits and not copy.facts.persistent]
            if not droppable:
                break
            min(droppable, key=lambda copy: copy.place or 0).gone = 0
        return line.depth >= DEPTH_MAX

    def place(self, takers: list[Line], number: int, facts: Facts, record: int) -> None:
        copies = [self.copy(number, facts, durable=facts.persistent and line.durable) for line in takers]
        self.arrive(list(zip(takers, copies, strict=True)), record)

    def submit(self, address: str, body: bytes, container: str, transaction: LocalTransaction | None, *, refused: bool = False) -> None:
        self.tokens += 1
        if refused:
            self.refusals_due.add(self.tokens)
        routing = Routing.MULTICAST if address == TOPIC else Routing.ANYCAST
        self.broker.send(address, body, self.sender, self.tokens, routing=routing, container=container, transaction=transaction)

    def repeat(self) -> None:
        """A client that got no answer sends again, with the same message id: stored once, whatever became of the first."""
        if not self.sent:
            return
        number = self.random.choice(list(self.sent))
        sent = self.sent[number]
        self.history.append(f"repeat {number}")
        takers = self.takers(sent.address, "me", sent.facts.kind)
        new = sent.record == NEVER
        refused = new and self.full(sent.address)
        if not new and sent.address == LOSSY:
            self.full(sent.address)
        self.submit(sent.address, sent.body, "me", None, refused=refused)
        if refused:
            return
        if new:
            sent.record = self.record()
            facts = sent.facts._replace(
                expiry_ms=self.now_ms + sent.ttl_ms if sent.ttl_ms else 0, due_ms=self.now_ms + sent.delay_ms if sent.delay_ms else 0
            )
            self.place(takers, number, facts, sent.record)
        self.answers_due[self.tokens] = sent.record

    def attach(self) -> None:
        """A consumer, perhaps with a selector, perhaps a new subscriber of the topic."""
        pick = self.random
        live = [line for line in self.live() if line.durable]
        kind = pick.choice((None, None, 1, 2))
        if pick.random() < 0.2:
            line = self.subscribe(f"volatile{self.places}-{len(self.history)}", durable=False, kind=kind)
            kind = None
        else:
            busy = [line for line in live if line.consumers]
            line = pick.choice(busy) if busy and pick.random() < 0.4 else pick.choice([*live, *map(self.line, self.queues[1:])])
        credit = pick.choice((0, 1, 3, 100))
        self.consume(line, credit, kind, settled=pick.random() < 0.15)

    def consume(self, line: Line, credit: int, kind: int | None, *, settled: bool = False) -> Client:
        self.history.append(f"consumer {len(self.clients)} of {line.name}: credit {credit}, kind {kind}, settled {settled}")
        client = Client(self, line, credit, kind, settled=settled)
        engine = self.broker.engine
        book = engine.addresses
        queue = book.subscriptions.get(line.name) or book.anycast[line.name]
        client.consumer = engine.attach(queue, client, None if kind is None else compile_selector(f"kind = {kind}"))
        engine.wake(queue)
        self.clients.append(client)
        line.consumers.append(client)
        return client

    def detach(self) -> None:
        """A consumer goes, in order or not; a subscriber without a durable subscription takes its line along."""
        if not self.clients:
            return
        client = self.random.choice(self.clients)
        self.leave(client, failed=self.random.random() < 0.5)

    def leave(self, client: Client, *, failed: bool) -> None:
        self.history.append(f"consumer of {client.line.name} detaches, failed={failed}")
        self.clients.remove(client)
        client.line.consumers.remove(client)
        client.line.holders = {group: holder for group, holder in client.line.holders.items() if holder is not client}
        self.broker.engine.detach(client.consumer, failed=failed)
        if not failed:
            for copy in client.held:
                copy.count = max(copy.count or 0, 1)
        self.give_back(client.line, list(client.held), failed=failed)
        if not client.line.durable:
            self.delete(client.line)

    def delete_queue(self) -> None:
        """An administrator deletes a queue."""
        lines = [line for line in self.live() if line.name in self.queues]
        if lines and self.random.random() < 0.3:
            self.delete(self.random.choice(lines))

    def delete(self, line: Line) -> None:
        self.history.append(f"delete {line.name}")
        book = self.broker.engine.addresses
        self.broker.engine.delete_queue(book.subscriptions.get(line.name) or book.anycast[line.name])
        line.deleted = self.record() if line.durable else 0
        line.consumers.clear()
        line.holders.clear()
        self.clients = [client for client in self.clients if client.line is not line]

    def credit(self) -> None:
        """A consumer asks for more."""
        if self.clients:
            client = self.random.choice(self.clients)
            self.history.append(f"consumer of {client.line.name} gets credit")
            self.broker.give(client, self.random.choice((1, 2, 10)))

    def settle_one(self) -> None:
        """A consumer settles one message, in one of the ways there are."""
        held = [(client, copy) for client in self.clients for copy in client.held]
        if not held:
            return
        client, copy = self.random.choice(held)
        message, _ = client.held.pop(copy)
        engine = self.broker.engine
        how = self.random.choice(self.SETTLEMENTS)
        if client.line.name == SLOW and self.random.random() < 0.4:
            how = "fail"
        transaction = self.random.choice([None, *self.transactions])
        self.history.append(f"{how} {copy.number} of {client.line.name} in {transaction and transaction.id!r}")
        match how:
            case "transaction" if transaction is not None:
                engine.acknowledge_in(transaction, client.consumer, message)
                copy.holder = transaction
                self.transactions[transaction].append(("ack", (client.line, copy)))
            case "accept" | "transaction":
                engine.acknowledge(client.consumer, message)
                copy.gone = self.record() if copy.durable else 0
            case "reject" if client.line.name != DEAD_LETTERS:
                engine.reject(client.consumer, message)
                self.dead_letter(copy, self.record())
            case _:
                engine.give_back(client.consumer, message, failed=how == "fail")
                self.give_back(client.line, [copy], failed=how == "fail")

    def begin(self) -> None:
        """A transaction."""
        transaction = self.broker.engine.begin(b"%d" % len(self.history))
        self.history.append(f"begin {transaction.id!r}")
        self.transactions[transaction] = []

    def end(self) -> None:
        """Commit or roll back."""
        if not self.transactions:
            return
        transaction = self.random.choice(list(self.transactions))
        actions = self.transactions.pop(transaction)
        commit = self.random.random() < 0.7
        self.history.append(f"{'commit' if commit else 'roll back'} {transaction.id!r}")
        if commit:
            self.commit(transaction, actions)
        else:
            self.broker.engine.rollback(transaction)
            self.roll_back(actions)

    def roll_back(self, actions: list[tuple[str, Any]]) -> None:
        for line, copy in [content for what, content in actions if what == "ack"]:
            self.give_back(line, [copy], failed=True)

    def commit(self, transaction: LocalTransaction, actions: list[tuple[str, Any]]) -> None:
        token = self.token()
        pending = self.record()
        record = self.carry_out(
            actions, lambda: self.broker.engine.commit(transaction, lambda error: self.sender.answers.append((token, error)))
        )
        self.answers_due[token] = record
        assert record or not pending

    def token(self) -> int:
        self.tokens += 1
        self.answers_due[self.tokens] = NEVER
        return self.tokens

    def carry_out(self, actions: list[tuple[str, Any]], commit: Callable[[], None]) -> int:
        """What the actions of a transaction bring; gives the record that they are in."""
        sends = [(self.takers(content[0], content[1], content[3].kind), content) for what, content in actions if what == "send"]
        commit()
        record = self.record()
        for takers, (_, _, number, facts) in sends:
            self.place(takers, number, facts, record)
        for _, copy in [content for what, content in actions if what == "ack"]:
            copy.gone = record if copy.durable else 0
        return record

    @staticmethod
    def client_of(transaction: LocalTransaction) -> str:
        return ("me", "you")[int(transaction.id) % 2]

    def prepare(self) -> None:
        """A transaction becomes a branch, which its connection leaves to others."""
        # One that has received is the most interesting.
        chosen = sorted(self.transactions, key=lambda transaction: sum(what == "ack" for what, _ in self.transactions[transaction]))
        if not chosen or (not self.transactions[chosen[-1]] and self.random.random() < 0.9):
            return
        transaction = chosen[-1]
        actions = self.transactions.pop(transaction)
        xid = Xid(1, transaction.id, b"")
        self.history.append(f"prepare {transaction.id!r}")
        token = self.token()
        branches.prepare(
            self.broker.engine, transaction, xid, self.client_of(transaction), lambda _: self.sender.answers.append((token, None))
        )
        self.answers_due[token] = self.record() if actions else 0
        if actions:
            self.held[xid] = Held(actions, self.record())

    def end_branch(self) -> None:
        """Somebody ends a branch; perhaps one that somebody is ending already, or has ended."""
        xids = [*self.held, *self.ended]
        if xids:
            self.tell(self.random.choice(xids), Ending.COMMITTED if self.random.random() < 0.6 else Ending.ROLLED_BACK)

    def tell(self, xid: Xid, ending: Ending) -> None:
        self.history.append(f"{ending.name} {xid}")
        engine, held = self.broker.engine, self.held.get(xid)
        if held is None:
            with pytest.raises(UnknownBranch) as caught:
                branches.end(engine, xid, ending, lambda: None)
            assert caught.value.ending is self.ended[xid]
            return
        if held.ending not in (None, ending):
            with pytest.raises(BranchBusy):
                branches.end(engine, xid, ending, lambda: None)
            return
        token = self.token()
        if held.ending is ending:
            branches.end(engine, xid, ending, lambda: self.sender.answers.append((token, None)))
            self.answers_due[token] = held.over
            return

        def done() -> None:
            self.sender.answers.append((token, None))
            del self.held[xid]
            self.ended[xid] = ending
            if ending is Ending.ROLLED_BACK:
                self.roll_back(held.actions)

        def end() -> None:
            branches.end(engine, xid, ending, done)

        held.ending = ending
        if ending is Ending.COMMITTED:
            held.over = self.carry_out(held.actions, end)
        else:
            end()
            held.over = self.record()
        self.answers_due[token] = held.over

    def turn(self) -> None:
        """The shell's turn ends."""
        self.history.append("turn")
        self.broker.flush()

    def confirm(self) -> None:
        """Kafka confirms some records."""
        count = self.random.randint(0, len(self.broker.in_flight))
        self.history.append(f"confirm {count}")
        for _ in range(count):
            self.confirm_one()

    def confirm_one(self) -> None:
        sequence = self.broker.engine.journaling.in_flight[0].sequence
        self.store(sequence)
        self.broker.confirm(1)

    def store(self, sequence: int) -> None:
        for line, copy in self.unplaced:
            if copy.stored <= sequence:
                self.appear(line, copy)
        self.unplaced = [(line, copy) for line, copy in self.unplaced if copy.stored > sequence]

    def pass_time(self, step_ms: int = STEP_MS) -> None:
        """Messages expire, and others come into their time."""
        self.history.append("time passes")
        self.now_ms += step_ms
        due = [each for each in self.delayed if each[1].facts.due_ms <= self.now_ms]
        self.delayed = [each for each in self.delayed if each[1].facts.due_ms > self.now_ms]
        for line, copy in sorted(due, key=lambda each: each[1].facts.due_ms):
            self.appear(line, copy)
        self.broker.engine.tick()

    def snapshot(self) -> None:
        """The broker writes a snapshot; never two of one sequence, which would have one name."""
        journaling = self.broker.engine.journaling
        if f"{journaling.epoch}-{journaling.confirmed_sequence}" in self.broker.snapshots:
            return
        self.history.append("snapshot")
        self.broker.take_snapshot()

    def crash(self) -> None:
        """kill -9: of the records in flight some were stored, unanswered; all clients are gone."""
        in_flight = self.broker.engine.journaling.in_flight
        stored = self.random.randint(0, len(in_flight))
        last = in_flight[stored - 1].sequence if stored else self.broker.engine.journaling.confirmed_sequence
        self.history.append(f"crash, {stored} of {len(in_flight)} records stored: up to {last}")
        self.store(last)
        self.unplaced.clear()
        self.delayed.clear()
        self.crashes += 1
        self.lines = [line for line in self.lines if line.durable and line.created <= last < line.deleted]
        kept = self.branches_after_crash(last)
        for line in self.lines:
            self.reload(line, last)
        for held, copy, count in kept:
            if any(copy is other for line in self.lines for other in line.copies):
                copy.holder, copy.count = held, count
        for held in self.held.values():
            held.actions = [each for each in held.actions if each[0] == "send" or each[1][1].holder is held]
        for sent in self.sent.values():
            sent.record = sent.record if sent.record <= last else NEVER
        self.clients.clear()
        self.transactions.clear()
        self.answers_due.clear()
        self.broker.start(stored=stored)

    def branches_after_crash(self, last: int) -> list[tuple[Held, Copy, int | None]]:
        """What branches that are still prepared hold; those that are not, or not any more, are gone."""
        for xid, held in list(self.held.items()):
            if held.ending is not None and held.over <= last:
                self.ended[xid] = held.ending
            acks = [copy for what, (_, *rest) in held.actions if what == "ack" for copy in rest]
            if held.record > last or held.over <= last:
                del self.held[xid]
            if held.record <= last and held.over <= last and held.ending is Ending.ROLLED_BACK:
                for copy in acks:
                    copy.count = (copy.count or 0) + 1
            held.over, held.ending = NEVER, None
        return [
            (held, copy, copy.count) for held in self.held.values() for what, (_, *rest) in held.actions if what == "ack" for copy in rest
        ]

    def reload(self, line: Line, last: int) -> None:
        """What a crash leaves of a line. What was on its way or at consumers is in its place again, and may be marked."""
        line.deleted = NEVER
        line.consumers.clear()
        line.holders.clear()
        line.copies = [copy for copy in line.copies if copy.durable and copy.stored <= last < copy.gone]
        for copy in sorted(line.copies, key=lambda copy: copy.order):
            copy.gone, copy.holder, copy.place, copy.not_before_ms = NEVER, None, None, 0
            waits = copy.facts.due_ms > self.now_ms
            copy.count, copy.count_max = (0, 0) if waits else (None, max(copy.count_max, copy.count or 0, 1))
            self.appear(line, copy)

    def settle(self) -> None:
        """All is stored and dispatched: whoever has credit has what there was for it."""
        self.history.append("settle")
        self.broker.flush()
        while self.broker.in_flight:
            self.confirm_one()
            self.broker.flush()
        for client in self.clients:
            served = client.line.name != ALONE or client.line.consumers[0] is client
            full = client.line.name == SLOW and len(client.held) >= HELD_MAX
            if client.credit > 0 and served and not full:
                left = [copy.number for copy in client.line.copies if self.may_have(client, copy)]
                assert not left, f"{left} of {client.line.name} wait though a consumer has credit"
        self.answered()
        assert {each.xid for each in branches.listed(self.broker.engine)} == set(self.held)
        assert not self.answers_due, f"sends without an answer: {self.answers_due}"

    # -- the run -----------------------------------------------------------------------------------------------------

    COMMANDS = (
        (send, 14), (repeat, 2), (attach, 4), (detach, 3), (delete_queue, 1), (credit, 4), (settle_one, 14), (begin, 2), (end, 3),
        (prepare, 1), (end_branch, 1), (turn, 10), (confirm, 8), (pass_time, 3), (snapshot, 2), (crash, 2), (settle, 2),
    )  # fmt: skip

    def commands(self) -> None:
        commands, weights = zip(*self.COMMANDS, strict=True)
        for command in self.random.choices(commands, weights, k=self.random.randint(5, COMMANDS_MAX)):
            command(self)
            self.answered()

    def drain(self) -> None:
        """All that is left comes out, once; then nothing is left, in memory or after one more crash."""
        for client in list(self.clients):
            self.leave(client, failed=False)
        for transaction in list(self.transactions):
            self.broker.engine.rollback(transaction)
            self.roll_back(self.transactions.pop(transaction))
        self.settle()
        self.compare_loads()
        for xid in list(self.held):
            self.tell(xid, self.random.choice((Ending.COMMITTED, Ending.ROLLED_BACK)))
        self.settle()
        self.consume(self.line(EXPIRED), 10_000, None)
        for _ in range(2):  # what is tried again may have expired meanwhile
            self.pass_time(SWEPT_MS)
            self.empty()
        unseen = [(line.name, copy.number) for line in self.live() for copy in line.copies if copy.there and self.expired(copy)]
        assert not unseen, f"{unseen} have expired, and nobody looked"
        for line in list(self.live()):
            if not line.consumers:
                self.consume(line, 10_000, None)
        self.empty()
        left = [(line.name, copy.number) for line in self.live() for copy in line.copies if copy.there]
        assert not left, f"{left} never came out"
        assert self.broker.engine.bodies.memory_bytes == 0, "bodies of messages that are gone"
        self.compare_loads()
        self.broker.start()
        queues = [queue.name for queue in self.broker.engine.addresses.queues.values() if queue.held_messages]
        assert not queues, f"{queues} hold what was acknowledged"

    def empty(self) -> None:
        """Consumers take what there is, until nothing comes any more."""
        taken = True
        while taken:
            self.settle()
            taken = False
            for client in list(self.clients):
                for copy, (message, _) in client.held.items():
                    self.broker.engine.acknowledge(client.consumer, message)
                    copy.gone = self.record() if copy.durable else 0
                    taken = True
                client.held.clear()

    def compare_loads(self) -> None:
        """From every announced snapshot the same state comes as from the whole journal."""
        whole = self.broker.replay(None)
        for name, data in self.broker.snapshots.items():
            short = self.broker.replay(data)
            if short.announced:
                assert state_of(short) == state_of(whole), f"snapshot {name}"
                # A snapshot knows the ids of non-persistent messages too, the journal does not.
                assert digests_of(whole) <= digests_of(short), f"snapshot {name}"


class BranchRun(Run):
    """A run in which consumers are always there, most is done in transactions, and most of those are prepared."""

    SETTLEMENTS = ("transaction",) * 6 + ("accept", "fail")

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.consumers_come()

    def crash(self) -> None:
        """As any crash; consumers come back."""
        super().crash()
        self.consumers_come()

    def consumers_come(self) -> None:
        for name in self.queues:
            self.consume(self.line(name), 10, None)
        self.begin()

    COMMANDS = (
        (Run.send, 16), (Run.attach, 2), (Run.detach, 1), (Run.delete_queue, 1), (Run.credit, 2), (Run.settle_one, 20), (Run.begin, 4),
        (Run.end, 1), (Run.prepare, 6), (Run.end_branch, 3), (Run.turn, 4), (Run.confirm, 8), (Run.pass_time, 1), (Run.snapshot, 2),
        (crash, 3), (Run.settle, 14),
    )  # fmt: skip


def state_of(loader: Loader) -> dict[str, Any]:
    """What a load has made, without the positions in memory."""
    queues = {
        queue.id: [
            queue.describe(),
            queue.reserved_mid,
            *((message.mid, message.body, queue.delivery_count(message)) for message in queue.ready),
            sorted((message.mid, message.body, due_ms) for message, due_ms in queue.delayed.items()),
        ]
        for queue in loader.engine.addresses.queues.values()
    }
    prepared = {
        xid: [branch.entry, sorted((queue.id, message.mid, queue.delivery_count(message)) for queue, message in branch.acks)]
        for xid, branch in loader.engine.branches.prepared.items()
    }
    return {
        "sequence": loader.fence.sequence, "ingress": loader.engine.ingress_positions, "queues": queues, "prepared": prepared,
        "ended": loader.engine.branches.ended,
    }  # fmt: skip


def digests_of(loader: Loader) -> set[tuple[str, bytes]]:
    """What would be recognised as a repeat."""
    return {(address, digest) for address, window in loader.engine.windows.by_address.items() for digest in window.digests}


def run(seed: int, kind: type[Run] = Run) -> None:
    """One run; a failure names the seed and every command."""
    model = kind(seed)
    try:
        model.commands()
        model.drain()
    except Exception as error:
        history = "\n  ".join(model.history)
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n  {history}") from error


def run_all(seeds: Iterable[int], kind: type[Run] = Run) -> None:
    for seed in seeds:
        run(seed, kind)


@pytest.mark.timeout(TIMEOUT_S)
def test_random_commands_and_crashes_keep_every_promise_of_the_model() -> None:
    run_all(range(FIRST_SEED, FIRST_SEED + RUNS - SHORT_RUNS))


@pytest.mark.timeout(TIMEOUT_S)
def test_promises_hold_when_reservations_are_short_and_records_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "RESERVE_AHEAD", 2)
    monkeypatch.setattr(queue_module, "RESERVE_SEQUENCES", 2)
    monkeypatch.setattr(delivery_module, "RESERVE_SEQUENCES", 2)
    monkeypatch.setattr(ready_module, "SWEEP_MIN", 2)
    run_all(range(FIRST_SEED + RUNS - SHORT_RUNS, FIRST_SEED + RUNS))


@pytest.mark.timeout(TIMEOUT_S)
def test_branches_are_prepared_and_ended_once_over_crashes_and_snapshots() -> None:
    run_all(range(FIRST_SEED, FIRST_SEED + RUNS // 5), BranchRun)


def forget_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journaling, "add_ack", lambda *_: None)


def forget_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deliveries, "_count", lambda *_: None)


def forget_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "decode_reserve", lambda *_: (0, 0))


def answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journaling, "then", lambda _, action, *arguments: action(*arguments))


def append_what_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ready, "put_back", lambda ready, messages: [ready.append(message) for message in messages])


def know_no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DuplicateWindow, "admit", lambda *_: True)


def deliver_delayed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Deliveries, "put_in", lambda engine, message, queues, due_ms=0, put_in=Deliveries.put_in: put_in(engine, message, queues)
    )


def forget_delays_in_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = loading_module.decode_send
    monkeypatch.setattr(loading_module, "decode_send", lambda *place: decode(*place)._replace(delivery_time_ms=0))


def try_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AddressPolicy, "redelivery_pause_ms", lambda *_: 0)


def try_again_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AddressPolicy, "redelivery_pause_ms", lambda settings, _: settings.redelivery_delay_ms * 1_000)


def drop_what_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deliveries, "_expire", Deliveries.gone)


def find_nothing_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deliveries, "watch_expiry", lambda *_: None)


def give_groups_to_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "_holder", lambda *_: None)


def keep_the_groups_of_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "leave", lambda *_: None)


def serve_every_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "POLICY", Policy(POLICY.defaults, tuple(rule for rule in RULES if rule[0] != ALONE)))


def let_consumers_hold_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tuple((name, {key: value for key, value in rule.items() if key != "prefetch_max"}) for name, rule in RULES)
    monkeypatch.setattr(Run, "POLICY", Policy(POLICY.defaults, rules))


def take_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        BrokerQueue, "full", lambda queue: bool(queue.settings.max_messages) and queue.held_messages > queue.settings.max_messages
    )


def drop_persistent_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(sending: Sending, queue: BrokerQueue) -> None:
        while queue.full() and (waiting := queue.waiting()):
            queue.take_out(waiting[0])
            sending._deliveries.gone(queue, waiting[0])

    monkeypatch.setattr(Sending, "drop_oldest", drop)


def drop_the_dearest(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(sending: Sending, queue: BrokerQueue) -> None:
        while queue.full() and (waiting := [message for message in queue.waiting() if message.mid < 0]):
            queue.take_out(waiting[0])
            sending._deliveries.gone(queue, waiting[0])

    monkeypatch.setattr(Sending, "drop_oldest", drop)


def give_branches_nothing_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "_give_to_branches", lambda _: None)


def leave_branches_out_of_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Branches, "entries", lambda *_: b"")


def forget_what_branches_hold_in_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Branches, "held", lambda _: iter(()))


def take_back_what_branches_held_before_that_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def give(engine: Engine, xid: Xid, ending: Ending, done: Callable[[], None], end: Any = branches.end) -> None:
        end(engine, xid, ending, done)
        if ending is Ending.ROLLED_BACK:
            engine.take_back(engine.branches.prepared[xid].acks)
            engine.branches.prepared[xid].acks = []

    monkeypatch.setattr(branches, "end", give)


BRANCH_FAULTS = (
    give_branches_nothing_after_a_crash, leave_branches_out_of_snapshots, forget_what_branches_hold_in_snapshots,
    take_back_what_branches_held_before_that_is_stored,
)  # fmt: skip


@pytest.mark.parametrize("fault", BRANCH_FAULTS)
def test_the_model_notices_branches_of_an_engine_that(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        run_all(range(1, PLANTED_RUNS), BranchRun)


FAULTS = (
    forget_acknowledgements, forget_counts, forget_reservations, answer_at_once, append_what_returns, know_no_repeats,
    deliver_delayed_at_once, forget_delays_in_a_crash, try_again_at_once, try_again_too_late, drop_what_expires, find_nothing_expired,
    give_groups_to_anybody, keep_the_groups_of_who_left, serve_every_consumer, let_consumers_hold_any_number,
    take_more_than_there_is_room_for, drop_persistent_messages, drop_the_dearest,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_notices_an_engine_that(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        run_all(range(1, PLANTED_RUNS))
