"""The engine against a small model of JMS: random commands, crashes at any record, and a tally at the end.

The model is written from the rules (what a queue, a subscription, a transaction promises), not from the engine. Of the engine it knows
one thing: which journal record a decision went into, and so what a crash may take back.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from bascule.broker import engine as engine_module
from bascule.broker import loading as loading_module
from bascule.broker import queue as queue_module
from bascule.broker import ready as ready_module
from bascule.broker.duplicates import DuplicateWindow
from bascule.broker.engine import Engine
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import Message
from bascule.broker.ports import Policy
from bascule.broker.ready import Ready
from bascule.broker.transactions import Transaction
from bascule.core.destination import Routing
from bascule.jms.selector import compile_selector
from bascule.testing.broker import BrokerInMemory, Receiver, Sender, message_bytes

#: Runs of the ordinary suite; BASCULE_MODEL_RUNS asks for more.
RUNS = int(os.environ.get("BASCULE_MODEL_RUNS", "2000"))
#: From where the seeds count: another value, other runs.
FIRST_SEED = int(os.environ.get("BASCULE_MODEL_SEED", "1"))
TIMEOUT_S = 60 + RUNS // 20
COMMANDS_MAX = 60
DELIVERIES_MAX = 3
QUEUES = ("q1", "q2")
TOPIC = "t"
KINDS = 3  # values of the property that selectors ask for
DEAD_LETTERS = "DLQ"
NEVER = 1 << 60


#: Durable, priority, kind, expiry in ms.
Facts = tuple[bool, int, int, int]


@dataclass(eq=False)
class Copy:
    """A message in one queue. ``stored`` and ``gone`` are the records that say so (0: none needed, NEVER: not yet)."""

    number: int
    persistent: bool
    durable: bool  # survives a crash here: a persistent message in a durable queue
    priority: int
    kind: int
    expiry_ms: int
    stored: int = NEVER
    gone: int = NEVER
    place: int | None = None  # order of arrival, once consumers may have it
    holder: object = None  # a consumer, or a transaction
    delivered: bool = False
    count: int | None = 0  # failed deliveries; None after a crash: between the two below
    count_max: int = 0

    @property
    def waits(self) -> bool:
        return self.place is not None and self.holder is None and self.gone == NEVER


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


@dataclass
class Sent:
    """A persistent send outside transactions. ``record`` is NEVER again when a crash took it."""

    address: str
    body: bytes
    facts: Facts
    ttl_ms: int
    record: int


class Client(Receiver):
    """A consumer under the model's eyes."""

    def __init__(self, run: Run, line: Line, credit: int, kind: int | None, *, settled: bool) -> None:
        super().__init__(credit)
        self.run, self.line, self.kind, self.settled = run, line, kind, settled
        self.held: dict[Copy, tuple[Message, int]] = {}

    def deliver(self, message: Message, delivery_count: int) -> None:
        assert self.credit > 0, "delivered without credit"
        super().deliver(message, delivery_count)
        self.run.delivered(self, message, delivery_count)


class Run:
    """One run of the engine and the model side by side."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ms = 1_000
        self.history: list[str] = []
        self.lines: list[Line] = []
        self.clients: list[Client] = []
        self.transactions: dict[Transaction, list[tuple[str, Any]]] = {}
        self.sender = Sender()
        self.answers_due: dict[int, int] = {}  # token -> record it waits for
        self.answers_seen = 0
        self.sent: dict[int, Sent] = {}  # by number: what a client may repeat
        self.unplaced: list[Copy] = []  # not confirmed yet, in the order of their sends
        self.numbers: dict[bytes, int] = {}
        self.tokens = 0
        self.places = 0
        self.broker = BrokerInMemory(clock=lambda: self.now_ms, policy=Policy(deliveries_max=DELIVERIES_MAX))
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
        subscriptions = [line for line in self.live() if line.name not in (*QUEUES, DEAD_LETTERS)]
        return [line for line in subscriptions if line.kind in (None, kind) and line.no_local != container]

    def arrive(self, copies: list[tuple[Line, Copy]], record: int) -> None:
        for line, copy in copies:
            copy.stored = record
            line.copies.append(copy)
            if record:
                self.unplaced.append(copy)
            else:
                self.appear(copy)

    def appear(self, copy: Copy) -> None:
        self.places += 1
        copy.place = self.places

    def expired(self, copy: Copy) -> bool:
        return 0 < copy.expiry_ms <= self.now_ms

    def delivered(self, client: Client, message: Message, count: int) -> None:
        assert message.body is not None
        number = self.numbers[message.body]
        found = [copy for copy in client.line.copies if copy.number == number and copy.waits]
        assert found, f"message {number} of {client.line.name} delivered, which does not wait there"
        copy = min(found, key=lambda copy: copy.place or 0)
        assert client.kind in (None, copy.kind), f"message {number} does not fit the consumer's selector"
        assert not self.expired(copy), f"message {number} was expired"
        if client.line.name != DEAD_LETTERS:
            for other in client.line.copies:
                if other.waits and client.kind in (None, other.kind) and not self.expired(other):
                    assert (-other.priority, other.place) >= (-copy.priority, copy.place), f"message {number} overtook {other.number}"
        if copy.count is not None:
            assert count == copy.count, f"message {number}: delivery count {count}, not {copy.count}"
        else:
            assert int(copy.delivered) <= count <= copy.count_max, f"message {number}: delivery count {count} after a crash"
        copy.delivered, copy.count = True, count
        if client.settled:
            self.broker.engine.acknowledge(client.consumer, message)
            copy.gone = self.record() if copy.durable else 0
        else:
            copy.holder = client
            client.held[copy] = (message, count)

    def give_back(self, line: Line, copies: list[Copy], *, failed: bool) -> None:
        """Copies wait again; too often failed ones have moved to the dead letters."""
        record = self.record()
        for copy in copies:
            copy.holder = None
            if line.deleted != NEVER or not failed:
                continue
            assert copy.count is not None
            copy.count += 1
            if copy.count >= DELIVERIES_MAX and line.name != DEAD_LETTERS:
                self.dead_letter(copy, record)

    def dead_letter(self, copy: Copy, record: int) -> None:
        copy.gone = record if copy.durable else 0
        dead = Copy(copy.number, copy.persistent, copy.persistent, copy.priority, copy.kind, 0)
        self.arrive([(self.line(DEAD_LETTERS), dead)], record if copy.persistent else 0)

    def answered(self) -> None:
        stored = self.broker.engine.journaling.confirmed_sequence
        for token, error in self.sender.answers[self.answers_seen :]:
            assert error is None, error
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
        address, container = pick.choice((*QUEUES, TOPIC)), pick.choice(("me", "you"))
        number, durable, priority, kind = len(self.numbers), pick.random() < 0.8, pick.choice((4, 4, 4, 9)), pick.randrange(KINDS)
        ttl_ms = pick.choice((0, 0, 0, 0, 50))
        body = message_bytes(number, durable=durable, priority=priority, ttl_ms=ttl_ms, message_id=f"id{number}", properties={"kind": kind})
        self.numbers[body] = number
        transaction = pick.choice([None, *self.transactions])
        takers = self.takers(address, container, kind)
        facts = (durable, priority, kind, self.now_ms + ttl_ms if ttl_ms else 0)
        self.history.append(f"send {number} to {address} by {container} {facts} in {transaction and transaction.id!r}")
        self.submit(address, body, container, transaction)
        record = self.record() if durable and transaction is None else 0
        self.answers_due[self.tokens] = record
        if transaction is not None:
            self.transactions[transaction].append(("send", (address, container, number, facts)))
            return
        self.place(takers, number, facts, record)
        if durable and container == "me":
            self.sent[number] = Sent(address, body, facts, ttl_ms, record)

    def place(self, takers: list[Line], number: int, facts: Facts, record: int) -> None:
        persistent, priority, kind, expiry_ms = facts
        copies = [Copy(number, persistent, persistent and line.durable, priority, kind, expiry_ms) for line in takers]
        self.arrive(list(zip(takers, copies, strict=True)), record)

    def submit(self, address: str, body: bytes, container: str, transaction: Transaction | None) -> None:
        self.tokens += 1
        routing = Routing.MULTICAST if address == TOPIC else Routing.ANYCAST
        self.broker.send(address, body, self.sender, self.tokens, routing=routing, container=container, transaction=transaction)

    def repeat(self) -> None:
        """A client that got no answer sends again, with the same message id: stored once, whatever became of the first."""
        if not self.sent:
            return
        number = self.random.choice(list(self.sent))
        sent = self.sent[number]
        self.history.append(f"repeat {number}")
        takers = self.takers(sent.address, "me", sent.facts[2])
        self.submit(sent.address, sent.body, "me", None)
        if sent.record == NEVER:
            sent.record = self.record()
            facts = (*sent.facts[:3], self.now_ms + sent.ttl_ms if sent.ttl_ms else 0)
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
            line = pick.choice([*live, self.line("q1")])
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
        return client

    def detach(self) -> None:
        """A consumer goes, in order or not; a subscriber without a durable subscription takes its line along."""
        if not self.clients:
            return
        client = self.random.choice(self.clients)
        failed = self.random.random() < 0.5
        self.history.append(f"consumer of {client.line.name} detaches, failed={failed}")
        self.clients.remove(client)
        self.broker.engine.detach(client.consumer, failed=failed)
        if not failed:
            for copy in client.held:
                copy.count = max(copy.count or 0, 1)
        self.give_back(client.line, list(client.held), failed=failed)
        if not client.line.durable:
            self.delete(client.line)

    def delete_queue(self) -> None:
        """An administrator deletes a queue."""
        lines = [line for line in self.live() if line.name in QUEUES]
        if lines and self.random.random() < 0.3:
            self.delete(self.random.choice(lines))

    def delete(self, line: Line) -> None:
        self.history.append(f"delete {line.name}")
        book = self.broker.engine.addresses
        self.broker.engine.delete_queue(book.subscriptions.get(line.name) or book.anycast[line.name])
        line.deleted = self.record() if line.durable else 0
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
        how = self.random.choice(("accept", "accept", "accept", "transaction", "transaction", "release", "fail", "reject"))
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
            for line, copy in [content for what, content in actions if what == "ack"]:
                self.give_back(line, [copy], failed=True)

    def commit(self, transaction: Transaction, actions: list[tuple[str, Any]]) -> None:
        self.tokens += 1
        token = self.tokens
        self.answers_due[token] = NEVER
        sends = [(self.takers(content[0], content[1], content[3][2]), content) for what, content in actions if what == "send"]
        pending = self.record()
        self.broker.engine.commit(transaction, lambda error: self.sender.answers.append((token, error)))
        record = self.answers_due[token] = self.record()
        assert record or not pending
        for takers, (_, _, number, facts) in sends:
            self.place(takers, number, facts, record)
        for _, copy in [content for what, content in actions if what == "ack"]:
            copy.gone = record if copy.durable else 0

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
        for copy in self.unplaced:
            if copy.stored <= sequence:
                self.appear(copy)
        self.unplaced = [copy for copy in self.unplaced if copy.place is None]

    def pass_time(self) -> None:
        """Messages expire."""
        self.history.append("time passes")
        self.now_ms += 30

    def snapshot(self) -> None:
        """The broker writes a snapshot."""
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
        self.lines = [line for line in self.lines if line.durable and line.created <= last < line.deleted]
        for line in self.lines:
            line.deleted = NEVER
            line.copies = [copy for copy in line.copies if copy.durable and copy.stored <= last < copy.gone]
            for copy in line.copies:
                copy.gone, copy.holder = NEVER, None
                copy.count, copy.count_max = None, max(copy.count_max, copy.count or 0, 1)
        for sent in self.sent.values():
            sent.record = sent.record if sent.record <= last else NEVER
        self.clients.clear()
        self.transactions.clear()
        self.answers_due.clear()
        self.broker.start(stored=stored)

    def settle(self) -> None:
        """All is stored and dispatched: whoever has credit has what there was for it."""
        self.history.append("settle")
        self.broker.flush()
        while self.broker.in_flight:
            self.confirm_one()
            self.broker.flush()
        for client in self.clients:
            if client.credit > 0:
                wanted = (copy for copy in client.line.copies if copy.waits and client.kind in (None, copy.kind))
                left = [copy.number for copy in wanted if not self.expired(copy)]
                assert not left, f"{left} of {client.line.name} wait though a consumer has credit"
        self.answered()
        assert not self.answers_due, f"sends without an answer: {self.answers_due}"

    # -- the run -----------------------------------------------------------------------------------------------------

    COMMANDS = (
        (send, 14), (repeat, 2), (attach, 4), (detach, 3), (delete_queue, 1), (credit, 4), (settle_one, 14), (begin, 2), (end, 3),
        (turn, 10), (confirm, 8), (pass_time, 1), (snapshot, 2), (crash, 2), (settle, 1),
    )  # fmt: skip

    def commands(self) -> None:
        commands, weights = zip(*self.COMMANDS, strict=True)
        for command in self.random.choices(commands, weights, k=self.random.randint(5, COMMANDS_MAX)):
            command(self)
            self.answered()

    def drain(self) -> None:
        """All that is left comes out, once; then nothing is left, in memory or after one more crash."""
        for transaction in list(self.transactions):
            self.broker.engine.rollback(transaction)
            for line, copy in [content for what, content in self.transactions.pop(transaction) if what == "ack"]:
                self.give_back(line, [copy], failed=True)
        self.settle()
        self.compare_loads()
        for line in list(self.live()):
            self.consume(line, 10_000, None)
        self.settle()
        for client in list(self.clients):
            for copy, (message, _) in client.held.items():
                self.broker.engine.acknowledge(client.consumer, message)
                copy.gone = self.record() if copy.durable else 0
            client.held.clear()
        self.settle()
        assert self.broker.engine.bodies.memory_bytes == 0, "bodies of messages that are gone"
        self.compare_loads()
        self.broker.start()
        left = [queue.name for queue in self.broker.engine.addresses.queues.values() if queue.ready.count]
        assert not left, f"{left} hold what was acknowledged"

    def compare_loads(self) -> None:
        """From every announced snapshot the same state comes as from the whole journal."""
        whole = self.broker.replay(None)
        for name, data in self.broker.snapshots.items():
            if name in whole.announced:
                short = self.broker.replay(data)
                assert state_of(short) == state_of(whole), f"snapshot {name}"
                # A snapshot knows the ids of non-persistent messages too, the journal does not.
                assert digests_of(whole) <= digests_of(short), f"snapshot {name}"


def state_of(loader: Loader) -> dict[str, Any]:
    """What a load has made, without the positions in memory."""
    queues = {
        queue.id: [
            queue.describe(),
            queue.reserved_mid,
            *((message.mid, message.body, queue.delivery_count(message)) for message in queue.ready),
        ]
        for queue in loader.engine.addresses.queues.values()
    }
    return {"sequence": loader.fence.sequence, "ingress": loader.engine.ingress_positions, "queues": queues}


def digests_of(loader: Loader) -> set[tuple[str, bytes]]:
    """What would be recognised as a repeat."""
    return {(address, digest) for address, window in loader.engine.windows.by_address.items() for digest in window.digests}


def run(seed: int) -> None:
    """One run; a failure names the seed and every command."""
    model = Run(seed)
    try:
        model.commands()
        model.drain()
    except Exception as error:
        history = "\n  ".join(model.history)
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n  {history}") from error


def run_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run(seed)


@pytest.mark.timeout(TIMEOUT_S)
def test_random_commands_and_crashes_keep_every_promise_of_the_model() -> None:
    run_all(range(FIRST_SEED, FIRST_SEED + RUNS))


@pytest.mark.timeout(TIMEOUT_S)
def test_promises_hold_when_reservations_are_short_and_records_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "RESERVE_AHEAD", 2)
    monkeypatch.setattr(queue_module, "RESERVE_SEQUENCES", 2)
    monkeypatch.setattr(engine_module, "RESERVE_SEQUENCES", 2)
    monkeypatch.setattr(ready_module, "SWEEP_MIN", 2)
    run_all(range(FIRST_SEED, FIRST_SEED + RUNS // 2))


def forget_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journaling, "add_ack", lambda *_: None)


def forget_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_count", lambda *_: None)


def forget_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "decode_reserve", lambda *_: (0, 0))


def answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journaling, "then", lambda _, action, *arguments: action(*arguments))


def append_what_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ready, "put_back", lambda ready, messages: [ready.append(message) for message in messages])


def know_no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DuplicateWindow, "admit", lambda *_: True)


FAULTS = (forget_acknowledgements, forget_counts, forget_reservations, answer_at_once, append_what_returns, know_no_repeats)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_notices_an_engine_that(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        run_all(range(1, 200))
