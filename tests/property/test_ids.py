"""A used id is never used again: across crashes, snapshots, trims of the journal and deleted queues."""

from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from bascule.broker.queue import BrokerQueue
from bascule.broker.snapshot import decode
from bascule.core.destination import Routing
from bascule.journal.records import Kind, Op, decode_header, decode_json, encode_record, entries, mid_of
from bascule.testing.broker import BrokerInMemory, MemoryLog, Sender, message_bytes

QUEUES = st.sampled_from(["a", "b"])
#: Stands for trimmed records: a load that reads it fails.
TRIMMED = encode_record(Kind.STATE, 0, 1, b"trimmed")[:-1]


class Ledger(MemoryLog):
    """A log that knows the newest id of each kind that it has ever contained: the next one must be higher."""

    newest_mid = newest_queue = -1

    def append(self, key: bytes, value: bytes) -> int:
        sequence, index = decode_header(value).sequence, count()
        for op, start, end in entries(value):
            if op == Op.SEND:
                mid = mid_of(sequence, next(index))
                assert mid > self.newest_mid, "the id of a message is used again"
                self.newest_mid = mid
            elif op == Op.QUEUE_CREATED:
                queue = decode_json(value, start, end)["id"]
                assert queue > self.newest_queue, "the id of a queue is used again"
                self.newest_queue = queue
        return super().append(key, value)


class Ids(RuleBasedStateMachine):
    """A broker that is used, killed, and started from what is left of its journal."""

    def __init__(self) -> None:
        super().__init__()
        self.log = Ledger()
        self.broker = BrokerInMemory(self.log)
        self.bodies: dict[int, bytes] = {}  # of each delivered message, by mid
        self._numbers = count()

    def _queue(self, name: str) -> BrokerQueue:
        return self.broker.engine.queue(name)

    @rule(to=QUEUES, messages=st.integers(1, 3), durable=st.booleans())
    def send(self, to: str, messages: int, durable: bool) -> None:
        for _ in range(messages):
            self.broker.send(to, message_bytes(next(self._numbers), durable=durable), Sender(), None)

    @rule(to=QUEUES)
    def commit(self, to: str) -> None:
        transaction = self.broker.engine.begin(b"transaction")
        for name in (to, "a"):
            self.broker.send(name, message_bytes(next(self._numbers)), Sender(), None, transaction=transaction)
        self.broker.engine.commit(transaction, lambda _: None)

    @rule(stored=st.integers(1, 4))
    def store(self, stored: int) -> None:
        self.broker.flush()
        self.broker.confirm(min(stored, len(self.broker.in_flight)))

    @rule(name=QUEUES, credit=st.integers(1, 4), acknowledged=st.integers(0, 4))
    def take(self, name: str, credit: int, acknowledged: int) -> None:
        receiver = self.broker.attach(self._queue(name), credit)
        self.broker.settle()
        for number, message in enumerate(receiver.messages):
            if message.mid >= 0:  # it is in the journal
                body = self.broker.engine.bodies.read(message)
                assert self.bodies.setdefault(message.mid, body) == body
            if number < acknowledged:
                self.broker.engine.acknowledge(receiver.consumer, message)
        self.broker.engine.detach(receiver.consumer, failed=False)

    @rule(name=QUEUES)
    def delete(self, name: str) -> None:
        self.broker.engine.delete_queue(self._queue(name))

    @rule(name=QUEUES)
    def subscribe(self, name: str) -> None:
        if name not in self.broker.engine.addresses.subscriptions:
            self.broker.engine.create_queue(name, "t", Routing.MULTICAST, subscription=name)

    @rule()
    def trim(self) -> None:
        """Trim as housekeeping does: what the newest snapshot does not need is deleted, once it is announced."""
        self.broker.take_snapshot()
        self.broker.settle()
        name, data = self.broker.snapshots.popitem()
        self.broker.snapshots = {name: data}
        end = decode(data).first_offset()
        self.log.records[:end] = [(b"", TRIMMED)] * end

    @rule(stored=st.integers(0, 4))
    def crash(self, stored: int) -> None:
        self.broker.flush()
        self.broker.start(stored=stored)


def test_no_id_is_reused_over_crashes_snapshots_and_trims() -> None:
    run_state_machine_as_test(Ids, settings=settings(max_examples=80, stateful_step_count=40, report_multiple_bugs=False))
