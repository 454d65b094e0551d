"""A fault in the middle of a command leaves memory and journal unchanged, or with the complete command, and ends nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from bascule.broker import administration, branches
from bascule.broker.branch_requests import Answer, BranchRequest, carry_out
from bascule.broker.containment import ErrorKind
from bascule.broker.delivery import FAILED_RETRY_MS
from bascule.broker.engine import Engine
from bascule.broker.ingress_access import Arrival
from bascule.broker.message import Bodies, BodyOwner, BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.journal.records import KafkaOrigin, Send, SendFlag
from bascule.testing.broker import Receiver
from tests.support.faults import Faults, FaultyReceiver, FaultySender, InjectedFault
from tests.unit.broker.conftest import Bench

STEPS_MAX = 60
XID = Xid(7, b"gtrid", b"bqual")
WORK = ["a", "b", "c"]


class FaultyBench(Bench):
    """A bench with three messages in "work", one in the topic's subscription, and faults in the middle of operations on them."""

    def __init__(self) -> None:
        self.faults = Faults()
        super().__init__(Policy(AddressPolicy(deliveries_max=1)), **self.faults.options())
        self.sender = FaultySender(self.faults)
        self.subscription("sub", "t")
        self.fill(*WORK, to="work", delivery_time_ms=0)
        self.queue("other")
        self.broker.settle()
        self.errors: list[BasculeError | None] = []

    def taker(self, credit: int = 100) -> Receiver:
        receiver = FaultyReceiver(self.faults, credit)
        receiver.consumer = self.engine.attach(self.queue("work"), receiver)
        self.engine.wake(self.queue("work"))
        self.broker.settle()
        return receiver

    def held(self, engine: Engine | None = None) -> Counter[Any]:
        """Return every message that durable queues and branches hold, by queue and content."""
        engine = engine or self.engine
        found: list[tuple[str, BrokerMessage]] = []
        for queue in engine.addresses.queues.values():
            found += ((queue.name, message) for message in queue.holds())
        for transaction in engine.transactions.values():
            found += ((consumer.queue.name, message) for consumer, message in transaction.acks)
        found += ((queue.name, message) for queue, message in engine.branches.held())
        return Counter((name, self.content(message)) for name, message in found)

    def check(self) -> Counter[Any]:
        """Check that memory has what the journal has, and return it."""
        self.broker.settle()
        held = self.held()
        for queue in self.engine.addresses.queues.values():
            assert queue.held_messages == sum(count for (name, _), count in held.items() if name == queue.name), queue.name
            assert (queue.incoming, queue.incoming_bytes) == (0, 0)
            assert not queue.durable or len(list(queue.held)) == queue.held_messages
        loaded = self.broker.replay(None).engine
        assert self.held(loaded) == held
        assert {queue.name for queue in loaded.addresses.queues.values()} == {queue.name for queue in self.engine.addresses.queues.values()}
        assert set(loaded.branches.prepared) == set(self.engine.branches.prepared)
        return held


def transaction(bench: FaultyBench) -> Any:
    taker = bench.taker()
    transaction = bench.engine.begin(b"1")
    for message in taker.messages:
        bench.engine.acknowledge_in(transaction, taker.consumer, message)
    for content in ("x", "y"):
        bench.put(content, to="new queue", transaction=transaction, message_id=content, properties={"_AMQ_DUPL_ID": content})
    bench.put("z", to="t", transaction=transaction)
    bench.broker.settle()
    return transaction


def committing(bench: FaultyBench) -> Callable[[], object]:
    begun = transaction(bench)
    return lambda: bench.engine.commit(begun, bench.errors.append)


def rolling_back(bench: FaultyBench) -> Callable[[], object]:
    begun = transaction(bench)
    return lambda: bench.engine.rollback(begun)


def request(bench: FaultyBench, operation: str, **options: Any) -> None:
    def say(_: Answer) -> None:
        bench.faults.at("say")

    carry_out(bench.engine, BranchRequest(operation, XID, "client", **{"transactions": {}, **options}), say)


def preparing(bench: FaultyBench) -> Callable[[], object]:
    begun = transaction(bench)
    return lambda: request(bench, "prepare", transactions={begun.id: begun}, name=begun.id)


def committing_in_one_phase(bench: FaultyBench) -> Callable[[], object]:
    begun = transaction(bench)
    return lambda: request(bench, "commit", transactions={begun.id: begun}, name=begun.id)


def ending(operation: str) -> Callable[[FaultyBench], Callable[[], object]]:
    def prepared(bench: FaultyBench) -> Callable[[], object]:
        branches.prepare(bench.engine, transaction(bench), XID, "client", lambda _: None)
        bench.broker.settle()
        return lambda: request(bench, operation)

    return prepared


def acknowledging(bench: FaultyBench) -> Callable[[], object]:
    taker = bench.taker()
    return lambda: [bench.engine.acknowledge(taker.consumer, message) for message in taker.messages]


def rejecting(bench: FaultyBench) -> Callable[[], object]:
    taker = bench.taker()
    return lambda: [bench.engine.reject(taker.consumer, message) for message in taker.messages]


def leaving(bench: FaultyBench) -> Callable[[], object]:
    taker = bench.taker()
    return lambda: bench.engine.detach(taker.consumer)


def delivering(bench: FaultyBench) -> Callable[[], object]:
    taker = bench.taker(0)
    return lambda: bench.broker.give(taker, 100)


def expiring(bench: FaultyBench) -> Callable[[], object]:
    bench.fill("old", "older", to="work", ttl_ms=1)
    bench.now_ms += 10_000
    return bench.engine.tick


def sending(bench: FaultyBench) -> Callable[[], object]:
    return lambda: bench.put("new", to="new queue", message_id="new")


def all_of(generator: Any) -> None:
    for _ in generator:
        pass


def moving(bench: FaultyBench) -> Callable[[], object]:
    return lambda: all_of(administration.move(bench.engine, bench.queue("work"), "new queue"))


def purging(bench: FaultyBench) -> Callable[[], object]:
    return lambda: all_of(administration.purge(bench.engine, bench.queue("work")))


def returning(bench: FaultyBench) -> Callable[[], object]:
    rejecting(bench)()
    bench.broker.settle()
    return lambda: all_of(administration.return_dead_letters(bench.engine, bench.queue("DLQ")))


def deleting(bench: FaultyBench) -> Callable[[], object]:
    bench.taker(1)
    return lambda: bench.engine.delete_queue(bench.queue("work"))


def taking_in(bench: FaultyBench) -> Callable[[], object]:
    def send(content: str, to: str, routing: Routing) -> Arrival:
        send = Send(SendFlag.SOURCE, routing, 4, 0, 0, 0, to, (), (), (), KafkaOrigin("topic", 0, 7), bench.encode(content))
        return Arrival(send, keep=True)

    step = [send("k1", "work", Routing.ANYCAST), send("k2", "new queue", Routing.ANYCAST), send("k3", "t", Routing.MULTICAST)]
    return lambda: bench.engine.take_in(0, 10, step)


COMMANDS = [
    committing, rolling_back, preparing, committing_in_one_phase, ending("commit"), ending("rollback"), acknowledging, rejecting, leaving,
    delivering, expiring, sending, moving, purging, returning, deleting, taking_in,
]  # fmt: skip
NAMES = [
    "commit", "rollback", "prepare", "one phase", "branch commit", "branch rollback", "acknowledge", "reject", "leave", "deliver", "expire",
    "send", "move", "purge", "return", "delete", "ingress",
]  # fmt: skip
#: Operations on single messages, each by itself; all other operations happen completely or not at all.
ONE_BY_ONE = frozenset({"acknowledge", "reject", "leave", "deliver", "expire", "move", "purge", "return"})


def contents(held: Counter[Any]) -> Counter[Any]:
    return Counter(content for (_, content), count in held.items() for _ in range(count))


@pytest.mark.parametrize(("begin", "name"), list(zip(COMMANDS, NAMES, strict=True)), ids=NAMES)
def test_fault_in_any_step_of_a_command_neither_loses_nor_duplicates_a_message(
    begin: Callable[[FaultyBench], Callable[[], object]], name: str
) -> None:
    clean = FaultyBench()
    command = begin(clean)
    before = clean.check()
    command()
    after = clean.check()
    for number in range(1, STEPS_MAX):
        bench = FaultyBench()
        command = begin(bench)
        bench.faults.arm(number)
        try:
            command()
            bench.broker.settle()
        except InjectedFault:
            bench.broker.settle()
        if not bench.faults.disarm():
            assert number > 1, "no step of the command was counted"
            break
        held = bench.check()
        if name in ONE_BY_ONE:
            assert contents(before) | contents(after) >= contents(held) >= contents(before) & contents(after), f"step {number}"
        else:
            assert contents(held) in (contents(before), contents(after)), f"step {number}"
        check_serves(bench)
    else:
        pytest.fail(f"more than {STEPS_MAX} steps")


def check_serves(bench: FaultyBench) -> None:
    """Check that the broker serves: a new message is stored, delivered and acknowledged, and the other messages are delivered."""
    bench.put("next", to="other", message_id="next")
    bench.broker.settle()
    receiver = bench.consumer(bench.queue("other"))
    assert bench.got(receiver) == ["next"]
    bench.acknowledge(receiver)
    for transaction in list(bench.engine.transactions.values()):
        bench.engine.rollback(transaction)
    for xid, branch in list(bench.engine.branches.prepared.items()):
        assert branch.ending is None
        branches.end(bench.engine, xid, Ending.ROLLED_BACK, lambda: None)
    for _ in range(3):  # the next try, and a sweep for expired messages
        bench.now_ms += FAILED_RETRY_MS
        bench.engine.tick()
        bench.broker.settle()
    held = bench.check()
    for queue in list(bench.engine.addresses.queues.values()):
        for consumer in list(queue.consumers):
            bench.engine.detach(consumer, failed=False)
        bench.broker.settle()
        got = bench.consumer(queue)
        bench.acknowledge(got)
        assert len(got.messages) == sum(count for (name, _), count in held.items() if name == queue.name), queue.name
    assert bench.check() == Counter()


def test_failed_delivery_ends_only_its_consumer_and_the_message_goes_to_another_one() -> None:
    faults = Faults()
    bench = Bench(Policy(AddressPolicy(deliveries_max=3)), **faults.options())
    bench.fill("a", "b")
    bad = FaultyReceiver(faults, 10)
    bad.consumer = bench.engine.attach(bench.queue(), bad)
    faults.arm(1, "deliver")
    bench.engine.wake(bench.queue())
    bench.broker.settle()
    assert bad.end is not None
    assert "failed to deliver" in str(bad.end)
    good = bench.consumer()
    assert (bench.got(good), bench.counts(good)) == (["a", "b"], [1, 0])
    assert [kind for kind, _ in faults.contained] == [ErrorKind.DELIVERY]


def test_message_that_cannot_be_delivered_goes_to_the_dead_letters() -> None:
    class Broken(Receiver):
        def deliver(self, message: BrokerMessage, delivery_count: int) -> int:
            raise InjectedFault("deliver")

    faults = Faults()
    bench = Bench(Policy(AddressPolicy(deliveries_max=3)), **faults.options())
    bench.fill("poison")
    for _ in range(3):
        broken = Broken(1)
        broken.consumer = bench.engine.attach(bench.queue(), broken)
        bench.engine.wake(bench.queue())
        bench.broker.settle()
    assert bench.waiting(bench.queue("DLQ")) == ["poison"]
    assert faults.errors.counts == {ErrorKind.DELIVERY: 3}


def test_unreadable_spilled_body_delays_only_its_own_message() -> None:
    class Store:
        def __init__(self) -> None:
            self.kept: list[bytes] = []
            self.broken = False

        def put(self, body: bytes, owner: BodyOwner) -> int:
            self.kept.append(body)
            return len(self.kept) - 1

        def get(self, handle: int, size_bytes: int) -> bytes:
            if self.broken and handle == 0:
                raise OSError("bad sector")
            return self.kept[handle]

        def free(self, handle: int, size_bytes: int) -> None:
            if self.broken:
                raise OSError("bad sector")

    class Reading(Receiver):
        def deliver(self, message: BrokerMessage, delivery_count: int) -> int:
            bench.engine.bodies.read(message)
            return super().deliver(message, delivery_count)

    store, faults = Store(), Faults()
    bench = Bench(Policy(AddressPolicy(deliveries_max=3)), **{**faults.options(), "bodies": lambda _: Bodies(store, 0)})
    bench.fill("a", "b")
    store.broken = True
    receiver = Reading(10)
    receiver.consumer = bench.engine.attach(bench.queue(), receiver)
    bench.engine.wake(bench.queue())
    bench.broker.settle()
    assert [bench.content(message) for message in receiver.messages] == ["b"]
    bench.acknowledge(receiver)
    bench.broker.settle()
    assert faults.errors.counts == {ErrorKind.BODY: 2}  # a's body, and the room of b's
    store.broken = False
    bench.now_ms += FAILED_RETRY_MS
    bench.engine.tick()
    bench.broker.settle()
    assert bench.content(receiver.messages[1]) == "a"
