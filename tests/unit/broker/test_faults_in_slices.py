"""A fault in a later slice of long work concerns the queue, message or request of that slice; only half-done decisions end the epoch."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bascule.broker
from bascule.broker import policy_change, turns
from bascule.broker.branch_requests import Answer, BranchRequest, carry_out
from bascule.broker.containment import ErrorKind
from bascule.broker.delivery import Deliveries
from bascule.broker.errors import BrokerFault
from bascule.broker.expiry import SWEEP_MS, Expiry
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import DROP, AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.schedule import Schedule
from bascule.core.destination import Routing
from bascule.core.xid import Xid
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.support.faults import Faults, InjectedFault

SLICE = turns.TURN_STEPS // turns.SLICES + 1
#: Queues, or messages, for several turns.
MANY = 300
#: Functions of the engine whose work carries out decisions. Each of them calls only code that contains the errors of peers' inputs.
DECIDED = {
    "FanOut.begin", "FanOut.end_delay",
    "Destinations.delete_queue", "LeavingMessages.forget", "LocalTransactions._put_in_and_tell", "LocalTransactions.rollback_all",
    "Returns.begin", "Returns.of_several",
}  # fmt: skip


class Work:
    """Turns, and work whose n-th slice fails."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.turns = turns.Turns(when_stored=self.when_stored, errors=self.faults.errors)
        self.done: list[str] = []

    def when_stored(self, action: Callable[..., None], *arguments: Any) -> None:
        self.waiting.append((action, arguments))

    def failing(self, error: Exception, *costs: int) -> Iterator[int]:
        yield from costs
        raise error

    def lasting(self) -> Iterator[int]:
        for _ in range(3):
            yield SLICE
        self.done.append("lasting")

    def settle(self) -> None:
        while self.turns.pending:
            self.turns.begin_turn()
            self.turns.go_on()


def test_a_fault_in_a_later_slice_ends_its_work_only_and_is_counted() -> None:
    work = Work()
    work.turns.begin(work.failing(ValueError("x"), SLICE))
    work.turns.begin(work.lasting())
    work.settle()
    assert work.done == ["lasting"]
    assert work.faults.errors.counts == {ErrorKind.WORK: 1}


def test_a_fault_in_a_slice_that_has_waited_for_the_journal_ends_its_work_only() -> None:
    work = Work()
    work.turns.begin(work.failing(ValueError("x"), turns.AFTER_STORED))
    ((action, arguments),) = work.waiting
    action(*arguments)
    assert not work.turns.pending
    assert work.faults.errors.counts == {ErrorKind.WORK: 1}


def test_a_fault_in_the_first_slice_reaches_the_caller() -> None:
    work = Work()
    with pytest.raises(ValueError, match="x"):
        work.turns.begin(work.failing(ValueError("x")))
    assert work.faults.errors.counts == {}


def test_a_fault_while_a_decision_is_carried_out_ends_the_epoch() -> None:
    work = Work()
    work.turns.begin_decided(work.failing(ValueError("x"), SLICE))
    with pytest.raises(ValueError, match="x"):
        work.settle()


def test_a_violated_invariant_in_a_later_slice_ends_the_epoch() -> None:
    work = Work()
    work.turns.begin(work.failing(BrokerFault("x"), SLICE))
    with pytest.raises(BrokerFault):
        work.settle()


def test_only_the_listed_functions_begin_work_whose_faults_end_the_epoch() -> None:
    found = set[str]()
    for path in Path(bascule.broker.__path__[0]).parent.rglob("*.py"):
        for owner in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(owner, ast.ClassDef) or owner.name == "Turns":
                continue
            for function in owner.body:
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and node.attr == "begin_decided":
                        found.add(f"{owner.name}.{getattr(function, 'name', '')}")
    assert found == DECIDED


def test_a_fault_of_one_message_does_not_keep_the_others_from_expiring_in_the_same_sweep() -> None:
    faults, expired, now_ms = Faults(), list[int](), 1_000

    def expire(_: BrokerQueue, message: BrokerMessage) -> None:
        if message.position in (0, MANY // 2):
            raise InjectedFault("expire")
        expired.append(message.position)

    schedule = Schedule(faults.errors)
    run = turns.Turns(when_stored=lambda action, *arguments: action(*arguments), errors=faults.errors)
    expiry = Expiry(run, schedule, lambda: now_ms, expire, faults.errors)
    queue = BrokerQueue(1, "q", "q", Routing.ANYCAST, AddressPolicy(), durable=False)
    for position in range(MANY):
        message = BrokerMessage(b"", 4, 2_000, None)
        message.position = position
        queue.add(message)
    expiry.watch(queue, 2_000)
    now_ms = 2_000 + SWEEP_MS
    schedule.run(now_ms, 10, run)
    assert 0 < len(expired) < MANY // 2
    while run.pending:
        run.begin_turn()
        run.go_on()
    assert len(expired) == MANY - 2
    assert faults.errors.counts == {ErrorKind.MOVE: 2}
    assert not queue.sweeping


@pytest.mark.interpreted
def test_a_fault_while_a_full_queue_drops_messages_concerns_one_message_and_the_queue_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults()
    broker = BrokerInMemory(policy=Policy(AddressPolicy(when_full=DROP, max_messages=MANY)), errors=faults.errors)
    queue, sender, gone = broker.engine.queue("q"), Sender(), Deliveries.gone

    def faulty(deliveries: Deliveries, queue: BrokerQueue, message: BrokerMessage) -> None:
        gone(deliveries, queue, message)
        faults.at("gone")

    def send(number: int) -> None:
        broker.send("q", message_bytes(number, durable=False), sender, number)

    for number in range(MANY):
        send(number)
    broker.settle()
    queue.settings = dataclasses.replace(queue.settings, max_messages=5)
    broker.engine.turns.steps = 100
    broker.engine.turns.begin_turn()
    monkeypatch.setattr(Deliveries, "gone", faulty)
    faults.arm(MANY - 50)
    send(MANY)
    assert queue.dropping
    broker.settle()
    assert faults.disarm()
    assert faults.errors.counts == {ErrorKind.WORK: 1}
    assert not queue.dropping
    send(MANY + 1)
    broker.settle()
    assert queue.held_messages == 5
    assert MANY + 1 in sender.accepted_tokens


@pytest.mark.interpreted
def test_a_fault_of_one_queue_does_not_keep_the_others_from_following_new_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults()
    broker = BrokerInMemory(errors=faults.errors)
    queues = [broker.engine.queue(f"q{number}") for number in range(MANY)]
    faulty = queues[MANY // 2].address
    of = Policy.of

    def settings(policy: Policy, address: str) -> AddressPolicy:
        if address in (faulty, "n1"):
            raise InjectedFault(address)
        return of(policy, address)

    monkeypatch.setattr(Policy, "of", settings)
    broker.settle()
    policy = Policy(AddressPolicy(max_messages=7), queues=("n0", "n1", "n2"))
    policy_change.change_policy(broker.engine, policy)
    broker.settle()
    assert [queue.address for queue in queues if queue.settings.max_messages != 7] == [faulty]
    assert {"n0", "n2"} <= broker.engine.addresses.anycast.keys()
    assert faults.errors.counts == {ErrorKind.WORK: 2}


@pytest.mark.interpreted
def test_a_list_of_branches_that_fails_in_a_later_slice_is_answered_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, answers = Faults(), list[Answer]()
    broker = BrokerInMemory(errors=faults.errors)

    def listed(_: object) -> Iterator[object]:
        raise InjectedFault("listed")
        yield

    monkeypatch.setattr("bascule.broker.branches.listed", listed)
    carry_out(broker.engine, BranchRequest("recover", Xid(0, b"", b""), "client", transactions={}), answers.append)
    broker.settle()
    assert [answer.status for answer in answers] == [500]
    assert faults.errors.counts == {ErrorKind.REQUEST: 1}
