"""Random commands with faults inside them, and crashes: no message is lost or duplicated, and memory agrees with the journal."""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from bascule.broker import administration, branches
from bascule.broker.delivery import FAILED_RETRY_MS
from bascule.core.errors import TransactionRolledBack
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.testing.broker import Receiver
from tests.support.faults import FaultyReceiver, InjectedFault
from tests.unit.broker.test_containment import FaultyBench, all_of, contents

#: Runs of the default suite; BASCULE_FAULT_RUNS sets another number.
RUNS = int(os.environ.get("BASCULE_FAULT_RUNS", "100"))
COMMANDS = 25
#: Steps of a command, one of which raises.
STEPS = 8
XID = Xid(1, b"a", b"b")


class Run:
    """One run. ``expected`` counts the copies of each message in the broker."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = FaultyBench()
        self.expected = contents(self.bench.check())
        self.numbers = 0
        self.receivers: list[Receiver] = []
        self.transaction: Any = None
        self.sends: list[str] = []  # of the transaction
        self.acks: list[str] = []

    def command(self) -> None:
        """Run one command, possibly with a fault inside; then everything is stored."""
        bench, pick = self.bench, self.random
        name = pick.choice(
            (self.send, self.send, self.publish, self.attach, self.acknowledge, self.acknowledge, self.reject, self.leave, self.gather,
             self.take, self.commit, self.roll_back, self.prepare, self.move, self.return_dead, self.pass_time, self.crash)
        )  # fmt: skip
        if pick.random() < 0.4:
            bench.faults.arm(pick.randint(1, STEPS))
        with suppress(InjectedFault):
            name()
        try:
            bench.broker.settle()
        finally:
            bench.faults.disarm()
        held = contents(bench.check())
        assert held == self.expected, f"{name.__name__}: {held - self.expected} too many, {self.expected - held} missing"

    def publish_to(self, address: str, copies: int, transaction: Any = None) -> None:
        self.numbers += 1
        content = f"m{self.numbers}"
        self.bench.put(content, to=address, message_id=content, transaction=transaction)
        if transaction is None:
            self.expected[content] += copies
        else:
            self.sends += copies * [content]

    def send(self) -> None:
        self.publish_to(self.random.choice(("work", "other", "new")), 1)

    def publish(self) -> None:
        self.publish_to("t", 1)

    def attach(self) -> None:
        queue = self.random.choice(list(self.bench.engine.addresses.queues.values()))
        receiver = FaultyReceiver(self.bench.faults, self.random.randint(1, 5))
        receiver.consumer = self.bench.engine.attach(queue, receiver)
        self.receivers.append(receiver)
        self.bench.engine.wake(queue)

    def one(self) -> tuple[Receiver, Any, str] | None:
        """Return a message that a consumer holds."""
        held = [(each, message) for each in self.receivers for message in each.consumer.unacked.values()]
        if not held:
            return None
        receiver, message = self.random.choice(held)
        return receiver, message, self.bench.content(message)

    def acknowledge(self) -> None:
        if one := self.one():
            receiver, message, content = one
            self.bench.engine.acknowledge(receiver.consumer, message)
            self.expected -= Counter([content])

    def reject(self) -> None:
        if one := self.one():
            self.bench.engine.reject(one[0].consumer, one[1])

    def leave(self) -> None:
        if self.receivers:
            receiver = self.receivers.pop(self.random.randrange(len(self.receivers)))
            self.bench.engine.detach(receiver.consumer, failed=self.random.random() < 0.5)

    def begun(self) -> Any:
        if self.transaction is None or self.transaction.id not in self.bench.engine.transactions:
            self.transaction, self.sends, self.acks = self.bench.engine.begin(b"%d" % self.random.randrange(1 << 30)), [], []
        return self.transaction

    def gather(self) -> None:
        begun = self.begun()
        try:
            self.publish_to(self.random.choice(("work", "new")), 1, begun)
        except InjectedFault:  # in the answer, so its connection ends
            self.bench.engine.rollback(begun)

    def take(self) -> None:
        if one := self.one():
            receiver, message, content = one
            self.bench.engine.acknowledge_in(self.begun(), receiver.consumer, message)
            self.acks.append(content)

    def carried_out(self) -> None:
        self.expected += Counter(self.sends)
        self.expected -= Counter(self.acks)

    def commit(self) -> None:
        if self.bench.engine.commit(self.begun(), self.bench.errors.append):
            self.carried_out()

    def roll_back(self) -> None:
        self.bench.engine.rollback(self.begun())

    def prepare(self) -> None:
        """Prepare a branch, and end it."""
        engine, xid = self.bench.engine, Xid(1, b"a", b"%d" % self.random.randrange(1 << 30))
        begun = self.begun()
        try:
            branches.prepare(engine, begun, xid, "client", lambda _: None)
        except TransactionRolledBack:
            assert xid not in engine.branches.prepared
            return
        if xid not in engine.branches.prepared:
            return
        self.bench.broker.settle()
        ending = self.random.choice((Ending.COMMITTED, Ending.ROLLED_BACK))
        for _ in range(2):  # a manager repeats the request until it is answered
            try:
                branches.end(engine, xid, ending, lambda: None)
            except InjectedFault:
                assert engine.branches.prepared[xid].ending is None
                continue
            break
        if ending is Ending.COMMITTED:
            self.carried_out()

    def move(self) -> None:
        source, target = self.random.sample(("work", "other", "new"), 2)
        all_of(administration.move(self.bench.engine, self.bench.queue(source), target))

    def return_dead(self) -> None:
        all_of(administration.return_dead_letters(self.bench.engine, self.bench.queue("DLQ")))

    def pass_time(self) -> None:
        self.bench.now_ms += FAILED_RETRY_MS
        self.bench.engine.tick()

    def crash(self) -> None:
        """Check that no stored message is lost after clients and transactions are gone."""
        self.bench.faults.disarm()
        self.bench.broker.settle()
        self.bench.crash()
        self.receivers.clear()
        self.transaction = None


@pytest.mark.timeout(120 + RUNS)
def test_faults_within_random_commands_lose_and_double_no_message() -> None:
    for seed in range(RUNS):
        run = Run(seed)
        for number in range(COMMANDS):
            try:
                run.command()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, command {number}: {error}") from error
