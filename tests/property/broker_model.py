"""A small model of JMS beside the engine: the promises of queues, subscriptions, transactions and branches, also across crashes.

The model is written from the rules, not from the engine. It knows one fact of the engine: the journal record of each decision, and
therefore what a crash may undo.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bascule.broker import branches
from bascule.broker.errors import QueueFull
from bascule.broker.groups import BUCKETS
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.transactions import LocalTransaction
from bascule.core.destination import Routing
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.testing.broker import Receiver, Sender
from tests.property.loaded_state import digests_of, state_of
from tests.property.snapshot_at_once import ComparingBroker

COMMANDS_MAX = 60
DELIVERIES_MAX = 3
TOPIC = "t"
KINDS = 3  # values of the property that selectors use
DEAD_LETTERS, EXPIRED = "DLQ", "ExpiryQueue"
NEVER = 1 << 60
DIGITS = 6  # of a message's number, which ends its body
STEP_MS = 30
#: Time after which every expired message has been found.
SWEPT_MS = 5_000

#: Queues with settings of their own. Each run has two of them beside the plain queue.
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
#: Message groups that a queue can distinguish: by chance, two names may share a bucket.
GROUPS = tuple({hash(name) % BUCKETS: name for name in "abcd"}.values())[:2]


POLICY = Policy(AddressPolicy(deliveries_max=DELIVERIES_MAX, auto_delete=False), RULES)


class Facts(NamedTuple):
    """The facts of a message; times in ms, 0 for none."""

    persistent: bool
    priority: int
    kind: int
    expiry_ms: int
    due_ms: int
    group: str | None


@dataclass(eq=False)
class Copy:
    """A message in one queue. ``stored`` and ``gone`` are the records that contain this (0: none needed, NEVER: not yet)."""

    number: int
    facts: Facts
    durable: bool  # survives a crash: a persistent message in a durable queue
    order: int  # record of the decision
    stored: int = NEVER
    gone: int = NEVER
    place: int | None = None  # order of arrival, once consumers may have it
    holder: object = None  # a consumer, or a transaction
    delivered: bool = False
    count: int | None = 0  # failed deliveries; None after a crash: between the next two
    count_max: int = 0
    not_before_ms: int = 0  # time of the next attempt after a failed delivery

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
    kind: int | None = None  # what its selector matches
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
    """A prepared branch: what its commit does, and the records that contain it."""

    actions: list[tuple[str, Any]]
    record: int
    over: int = NEVER
    ending: Ending | None = None


@dataclass
class Sent:
    """A persistent send outside transactions. ``record`` is NEVER again if a crash has undone it."""

    address: str
    body: bytes
    facts: Facts
    ttl_ms: int
    delay_ms: int
    record: int


class Client(Receiver):
    """A consumer that the model watches."""

    def __init__(self, run: Model, line: Line, credit: int, kind: int | None, *, settled: bool) -> None:
        super().__init__(credit)
        self.run, self.line, self.kind, self.settled = run, line, kind, settled
        self.held: dict[Copy, tuple[BrokerMessage, int]] = {}

    def wants(self, copy: Copy) -> bool:
        return self.kind in (None, copy.facts.kind)

    def deliver(self, message: BrokerMessage, delivery_count: int) -> int:
        assert self.credit > 0, "delivered without credit"
        super().deliver(message, delivery_count)
        self.run.delivered(self, message, delivery_count)
        return self.credit


class Model:
    """The engine and the model side by side: the expected state, and the possible results of crashes."""

    POLICY = POLICY
    TURN_STEPS = (1 << 60,)  # limit of the engine in one turn; the rest continues between later commands
    SETTLEMENTS = ("accept", "accept", "accept", "transaction", "transaction", "release", "fail", "reject")

    #: Whether messages of different delivery modes, and delayed messages and others, keep their order. Jakarta Messaging promises the order
    #: within a mode only.
    modes_in_order = True

    @staticmethod
    def mode_of(copy: Copy) -> tuple[bool, bool]:
        """Return whether a message is persistent, and whether it was delayed."""
        return copy.facts.persistent, copy.facts.due_ms > 0

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
        self.refused: set[LocalTransaction] = set()  # transactions with a refused message, which cannot commit
        self.sent: dict[int, Sent] = {}  # by number: sends that a client may repeat
        self.unplaced: list[tuple[Line, Copy]] = []  # not confirmed yet, in the order of their sends
        self.numbers = 0
        self.tokens = 0
        self.places = 0
        self.orders = 0
        self.delayed: list[tuple[Line, Copy]] = []  # stored, and not yet due
        self.crashes = 0
        self.lost_expired: list[Copy] = []  # expired in a queue that does not survive a crash; possibly moved before
        special = self.random.sample([name for name, _ in RULES], 2)
        self.queues = (PLAIN, *special)
        self.broker = ComparingBroker(clock=lambda: self.now_ms, policy=self.POLICY, turn_steps=self.random.choice(self.TURN_STEPS))
        for name, kind, no_local in (("all", None, ""), ("some", 1, ""), ("others", None, "me")):
            self.subscribe(name, durable=True, kind=kind, no_local=no_local)
        self.broker.settle()

    # -- what the model knows ----------------------------------------------------------------------------------------

    def record(self) -> int:
        """Return the journal record that all decisions so far wait for; 0 for none."""
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
        """Add a message to its queue: consumers may have it at once, or at its delivery time."""
        if copy.facts.due_ms > self.now_ms:
            self.delayed.append((line, copy))
        else:
            self.places += 1
            copy.place = self.places

    def expired(self, copy: Copy) -> bool:
        return 0 < copy.facts.expiry_ms <= self.now_ms

    def may_have(self, client: Client, copy: Copy) -> bool:
        """Return whether a consumer may get a message of its queue."""
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
                if self.may_have(client, other) and (self.modes_in_order or self.mode_of(other) == self.mode_of(copy)):
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
        """Check that each expired copy was moved once. The engine moves it some time after it has expired."""
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
        lost = next((copy for copy in self.lost_expired if copy.number == number), None)
        if lost is not None:
            self.lost_expired.remove(lost)
            moved = self.copy(number, lost.facts._replace(expiry_ms=0, due_ms=0), durable=True)
            moved.count, moved.count_max = None, 1
            self.arrive([(line, moved)], 0)

    def give_back(self, line: Line, copies: list[Copy], *, failed: bool) -> None:
        """Return copies to their queues; copies that failed too often have moved to the dead letters."""
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

    def turn(self) -> None:
        """End the turn of the shell."""
        self.history.append("turn")
        self.broker.flush()

    def confirm(self, count: int | None = None) -> None:
        """Confirm some records as Kafka does."""
        count = self.random.randint(0, len(self.broker.in_flight)) if count is None else count
        self.history.append(f"confirm {count}")
        for _ in range(count):
            self.store(self.broker.engine.journaling.in_flight[0].sequence)
            self.broker.confirm(1)
            self.arrived()

    def arrived(self) -> None:
        """Do what the engine did after the journal was stored or a time had come: only then is the order of messages known."""
        engine = self.broker.engine
        while engine.journaling.pending or (engine.schedule.next_ms or NEVER) <= self.now_ms:
            engine.turns.begin_turn()
            engine.journaling.carry_out()
            engine.tick()

    def store(self, sequence: int) -> None:
        for line, copy in self.unplaced:
            if copy.stored <= sequence:
                self.appear(line, copy)
        self.unplaced = [(line, copy) for line, copy in self.unplaced if copy.stored > sequence]

    def pass_time(self, step_ms: int = STEP_MS) -> None:
        """Advance the time: messages expire, and others become due."""
        self.history.append("time passes")
        self.now_ms += step_ms
        due = [each for each in self.delayed if each[1].facts.due_ms <= self.now_ms]
        self.delayed = [each for each in self.delayed if each[1].facts.due_ms > self.now_ms]
        for line, copy in sorted(due, key=lambda each: each[1].facts.due_ms):
            self.appear(line, copy)
        self.broker.engine.tick()
        self.arrived()

    def snapshot(self) -> None:
        """Write a snapshot. Two snapshots of one sequence would have the same name, so there is only one."""
        journaling = self.broker.engine.journaling
        if f"{journaling.epoch}-{journaling.confirmed_sequence}" in self.broker.snapshots:
            return
        self.history.append("snapshot")
        self.broker.take_snapshot()

    def crash(self) -> None:
        """Crash as by kill -9: some of the records in flight were stored, unconfirmed; all clients are disconnected."""
        in_flight = self.broker.engine.journaling.in_flight
        stored = self.random.randint(0, len(in_flight))
        last = in_flight[stored - 1].sequence if stored else self.broker.engine.journaling.confirmed_sequence
        self.history.append(f"crash, {stored} of {len(in_flight)} records stored: up to {last}")
        self.store(last)
        self.unplaced.clear()
        self.delayed.clear()
        self.crashes += 1
        self.lost_expired += [
            copy
            for line in self.lines
            if not line.durable or line.deleted <= last
            for copy in line.copies
            if copy.there and copy.holder is None and copy.facts.persistent and self.expired(copy)
        ]
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
        self.refused.clear()
        self.answers_due.clear()
        self.broker.start(stored=stored)

    def branches_after_crash(self, last: int) -> list[tuple[Held, Copy, int | None]]:
        """Update the messages that prepared branches hold: the others are back in their queues or gone."""
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
        """Return what a crash leaves of a queue. Messages that consumers had are in their place again, and may be marked."""
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
        """Check after everything is stored and dispatched: each consumer with credit has got the messages for it."""
        self.history.append("settle")
        self.broker.flush()
        while self.broker.in_flight or self.broker.engine.pending:
            self.confirm(len(self.broker.in_flight))
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

    def compare_loads(self) -> None:
        """Check that each announced snapshot leads to the same state as the whole journal."""
        whole = self.broker.replay(None)
        state, digests = state_of(whole), digests_of(whole)
        for name, data in self.broker.snapshots.items():
            short = self.broker.replay(data)
            if short.announced:
                assert state_of(short) == state, f"snapshot {name}"
                # A snapshot also has the ids of non-persistent messages, the journal does not.
                assert digests <= digests_of(short), f"snapshot {name}"
