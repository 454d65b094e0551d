"""Random commands for the engine and the model in tests/property/broker_model.py, and the final check."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import pytest

from bascule.broker import branches
from bascule.broker.errors import BranchBusy, UnknownBranch
from bascule.broker.transactions import LocalTransaction
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, TransactionRolledBack
from bascule.core.xid import Xid
from bascule.jms.selector import compile_selector
from bascule.journal.branches import Ending
from bascule.testing.broker import message_bytes
from tests.property.broker_model import (
    COMMANDS_MAX,
    DEAD_LETTERS,
    DEPTH_MAX,
    DIGITS,
    EXPIRED,
    GROUPS,
    KINDS,
    LIMITED,
    LOSSY,
    NEVER,
    SLOW,
    STEP_MS,
    SWEPT_MS,
    TOPIC,
    WAITING,
    Client,
    Facts,
    Held,
    Line,
    Model,
    Sent,
)

#: So many runs leave some 20 MB of garbage.
COLLECT_RUNS: Final = 100


class Run(Model):
    """One run of random commands."""

    def send(self) -> None:
        """Send a message, persistent or not, possibly in a transaction."""
        pick = self.random
        address, container = pick.choice((*self.queues, *self.queues[1:], TOPIC, TOPIC)), pick.choice(("me", "you"))
        number, transaction = self.numbers, pick.choice([None, *self.transactions])
        container = container if transaction is None else self.client_of(transaction)
        self.numbers += 1
        # The moment when an expired message is removed is not specified, but a queue with a limit depends on it.
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
            self.refused.update(() if transaction is None else (transaction,))
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
        """Return whether a message to the address is refused. Remove the messages that are dropped in its favour."""
        if address not in LIMITED:
            return False
        line = self.line(address)
        while self.broker.engine.addresses.anycast[address].returning:  # messages on their way to the dead letters still take room
            self.turn()
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
        """Repeat a send without an answer, with the same message id. It must be stored once, whatever happened to the first send."""
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
        """Attach a consumer, possibly with a selector, possibly as a new subscriber of the topic."""
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
        """Detach a consumer, in order or not. A subscriber without a durable subscription takes its queue with it."""
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
        """Delete a queue as an administrator."""
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
        """Grant more credit to a consumer."""
        if self.clients:
            client = self.random.choice(self.clients)
            self.history.append(f"consumer of {client.line.name} gets credit")
            self.broker.give(client, self.random.choice((1, 2, 10)))

    def settle_one(self) -> None:
        """Settle one message of a consumer, in one of the possible ways."""
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
                if self.expired(copy):
                    copy.holder = None  # it goes to the expiry queue: see find_expired
                else:
                    self.dead_letter(copy, self.record())
            case _:
                engine.give_back(client.consumer, message, failed=how == "fail")
                self.give_back(client.line, [copy], failed=how == "fail")

    def begin(self) -> None:
        """Begin a transaction."""
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
        if commit and transaction in self.refused:
            answers: list[BasculeError | None] = []
            self.broker.engine.commit(transaction, answers.append)
            assert answers, f"the rest of {transaction.id!r} is on its way into the journal"
            assert isinstance(answers[0], TransactionRolledBack), f"the rest of {transaction.id!r} is committed"
            self.roll_back(actions)
        elif commit:
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
        """Apply the actions of a transaction to the model. Return the record that contains them."""
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
        """Turn a transaction into a branch, which its connection no longer owns."""
        # A transaction that has received messages is the most interesting one.
        chosen = sorted(self.transactions, key=lambda transaction: sum(what == "ack" for what, _ in self.transactions[transaction]))
        if not chosen or (not self.transactions[chosen[-1]] and self.random.random() < 0.9):
            return
        transaction = chosen[-1]
        self.prepare_one(transaction, self.transactions.pop(transaction))

    def prepare_one(self, transaction: LocalTransaction, actions: list[tuple[str, Any]]) -> None:
        xid = Xid(1, transaction.id, b"")
        self.history.append(f"prepare {transaction.id!r}")
        if transaction in self.refused:
            with suppress(TransactionRolledBack):
                branches.prepare(self.broker.engine, transaction, xid, self.client_of(transaction), lambda _: None)
                raise AssertionError(f"the rest of {transaction.id!r} is prepared")
            self.roll_back(actions)
            return
        token = self.token()
        branches.prepare(
            self.broker.engine, transaction, xid, self.client_of(transaction), lambda _: self.sender.answers.append((token, None))
        )
        self.answers_due[token] = self.record() if actions else 0
        if actions:
            self.held[xid] = Held(actions, self.record())

    def end_branch(self) -> None:
        """End a branch; possibly one that is already being ended, or has ended."""
        xids = [*self.held, *self.ended]
        if xids:
            self.tell(self.random.choice(xids), Ending.COMMITTED if self.random.random() < 0.6 else Ending.ROLLED_BACK)

    def tell(self, xid: Xid, ending: Ending) -> None:
        self.history.append(f"{ending.name} {xid}")
        held = self.held.get(xid)
        if held is None:
            with pytest.raises(UnknownBranch) as caught:
                self.end_of_branch(xid, ending, lambda: None)
            assert caught.value.ending is self.ended[xid]
            return
        if held.ending not in (None, ending):
            with pytest.raises(BranchBusy):
                self.end_of_branch(xid, ending, lambda: None)
            return
        token = self.token()
        if held.ending is ending:
            self.end_of_branch(xid, ending, lambda: self.sender.answers.append((token, None)))
            self.answers_due[token] = held.over
            return

        def done() -> None:
            self.sender.answers.append((token, None))
            del self.held[xid]
            self.ended[xid] = ending
            if ending is Ending.ROLLED_BACK:
                self.roll_back(held.actions)

        def end() -> None:
            self.end_of_branch(xid, ending, done)

        held.ending = ending
        if ending is Ending.COMMITTED:
            held.over = self.carry_out(held.actions, end)
        else:
            end()
            held.over = self.record()
        self.answers_due[token] = held.over

    def end_of_branch(self, xid: Xid, ending: Ending, done: Callable[[], None]) -> None:
        branches.end(self.broker.engine, xid, ending, done)

    COMMANDS = (
        (send, 14), (repeat, 2), (attach, 4), (detach, 3), (delete_queue, 1), (credit, 4), (settle_one, 14), (begin, 2), (end, 3),
        (prepare, 1), (end_branch, 1), (Model.turn, 10), (Model.confirm, 8), (Model.pass_time, 3), (Model.snapshot, 2), (Model.crash, 2),
        (Model.settle, 2),
    )  # fmt: skip

    LONGEST = COMMANDS_MAX

    def commands(self) -> None:
        commands, weights = zip(*self.COMMANDS, strict=True)
        for command in self.random.choices(commands, weights, k=self.random.randint(5, self.LONGEST)):
            command(self)
            self.answered()

    def drain(self) -> None:
        """Check that all messages that are left are delivered once; then nothing is left, in memory or after one more crash."""
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
        for _ in range(2):  # a message that is retried may have expired meanwhile
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
        """Let consumers receive until no more messages come."""
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


class BranchRun(Run):
    """A run that always has consumers, does most work in transactions, and prepares most of them."""

    SETTLEMENTS = ("transaction",) * 6 + ("accept", "fail")

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.consumers_come()

    def crash(self) -> None:
        """Crash as any run does; consumers reattach."""
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


class SlowRun(Run):
    """A run in which searches, sweeps and returns take many turns, and other commands come between them."""

    TURN_STEPS = (15, 40, 100)


class RefusedRun(Run):
    """A run in which many transactional messages are refused, because nobody consumes from the full queue that they are sent to."""

    COMMANDS = ((Run.send, 30), (Run.begin, 4), (Run.end, 4), (Run.prepare, 2), (Model.turn, 4), (Model.confirm, 4), (Model.crash, 1))


class SnapshotRun(SlowRun):
    """A run in which a snapshot is nearly always being collected, piece by piece."""

    TURN_STEPS = (15,)
    COMMANDS = (
        (Run.send, 14), (Run.repeat, 2), (Run.attach, 3), (Run.detach, 2), (Run.delete_queue, 1), (Run.credit, 3), (Run.settle_one, 20),
        (Run.begin, 1), (Run.end, 2), (Run.prepare, 1), (Run.end_branch, 1), (Run.turn, 24), (Run.confirm, 8), (Run.pass_time, 1),
        (Run.snapshot, 8), (Run.crash, 1),
    )  # fmt: skip


def run(seed: int, kind: type[Run] = Run) -> None:
    """Do one run. A failure names the seed and every command."""
    model = kind(seed)
    try:
        model.commands()
        model.drain()
    except Exception as error:
        history = "\n  ".join(model.history)
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n  {history}") from error


def run_all(seeds: Iterable[int], kind: type[Run] = Run) -> None:
    """Do many runs. Their garbage is collected after some of them: the collector would take a fifth of the time."""
    gc.disable()
    try:
        for number, seed in enumerate(seeds, start=1):
            run(seed, kind)
            if number % COLLECT_RUNS == 0:
                gc.collect()
    finally:
        gc.enable()
