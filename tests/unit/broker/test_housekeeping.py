"""The rounds of housekeeping: their times, their announcements, and the trim of the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from bascule.broker import branches, rounds
from bascule.broker.housekeeping import HousekeepingLimits, HousekeepingProtocol, TrimmedLog
from bascule.broker.policy import Policy
from bascule.broker.retention import Keeper, OwnersRetention, RetentionHold
from bascule.broker.rounds import Rounds
from bascule.broker.snapshot import EncodedSnapshot, Snapshot, decode
from bascule.broker.turns import Work
from bascule.core.effects import Severity
from bascule.core.errors import Unavailable
from bascule.core.xid import Xid
from bascule.server.effects import FutureWaiter
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.unit.broker.conftest import Bench
from tests.unit.broker.store_moves import load, records_of

DUE = 10

T = TypeVar("T")


class Topics:
    """The topics of a journal in memory: see bascule.broker.housekeeping.HousekeepingEffects."""

    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}
        self.kept: dict[int, bytes] = {}
        self.first = {TrimmedLog.JOURNAL: 0, TrimmedLog.INGRESS: 0}
        self.retained = {TrimmedLog.JOURNAL: 1 << 40, TrimmedLog.INGRESS: 1 << 40}
        self.positions: list[RetentionHold] = []
        self.ingress_id: str | None = "ingress"
        self.trimmed: list[tuple[TrimmedLog, int]] = []
        self.faults: list[Exception] = []
        self.over = False
        self.running: list[asyncio.Task[None]] = []
        self.notes: list[str] = []
        self.during: list[Any] = []  # called before a trim
        self.rounds = 0
        self.computed_beside: list[object] = []
        self.requests: list[int] = []  # number of messages of each request to the store
        self.failing: Exception | None = None  # error of the store

    def going_on(self) -> bool:
        return not self.over

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        self.running.append(asyncio.get_running_loop().create_task(protocol))

    def waiter(self) -> FutureWaiter[Any]:
        return FutureWaiter(asyncio.get_running_loop())

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        self.notes.append(detail)

    async def computed(self, calculation: Callable[[], T]) -> T:
        result = calculation()
        self.computed_beside.append(result)
        return result

    async def stored(self) -> set[int]:
        return set(self.kept)

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        if self.failing is not None:
            raise self.failing
        self.requests.append(len(records))
        for mid, value in records.items():
            if value is None:
                self.kept.pop(mid, None)
            else:
                self.kept[mid] = value

    async def write(self, snapshot_id: str, encoded: EncodedSnapshot) -> None:
        self.written[snapshot_id] = encoded.joined()

    async def delete_older(self, snapshot_id: str) -> None:
        self.written = {snapshot_id: self.written[snapshot_id]}

    async def pipelines(self, taken: Snapshot) -> Sequence[RetentionHold]:
        self.rounds += 1
        if self.faults:
            raise self.faults.pop()
        if self.during:
            self.during.pop(0)()
        return self.positions

    async def retained_from(self, log: TrimmedLog, partition: int) -> int:
        return self.retained[log]

    async def first_offset(self, log: TrimmedLog, partition: int) -> int:
        return self.first[log]

    async def trim(self, log: TrimmedLog, partition: int, end: int) -> None:
        self.trimmed.append((log, end))
        self.first[log] = end

    async def ingress_topic_id(self) -> str | None:
        return self.ingress_id


def housekeeping(
    broker: BrokerInMemory, topics: Topics, announce_timeout_s: float = 60.0, size_bytes: int = 1 << 40
) -> HousekeepingProtocol:
    limits = HousekeepingLimits(DUE, announce_timeout_s, retention=OwnersRetention(60.0), snapshot_bytes=size_bytes)
    return HousekeepingProtocol(topics, limits, broker.engine, broker.offsets)


async def finish(broker: BrokerInMemory, protocol: Coroutine[Any, Any, None]) -> None:
    """Store announcements until a protocol ends."""
    task = asyncio.ensure_future(protocol)
    while not task.done():
        broker.settle()
        await asyncio.sleep(0)
    await task


def send(broker: BrokerInMemory, count: int) -> None:
    for number in range(count):
        broker.send("q", message_bytes("x"), Sender(), number)
        broker.settle()


def test_announcement_stored_too_late_has_no_effect() -> None:
    async def late() -> None:
        broker, sender, topics = BrokerInMemory(), Sender(), Topics()
        keeping = housekeeping(broker, topics, announce_timeout_s=0.01)
        await keeping.rounds()  # its announcement is not stored in time
        assert len(topics.written) == 1
        assert [(pin.keeper, pin.reason) for pin in keeping.retention_holds] == [
            ("snapshot", "no snapshot in this round: Kafka has not stored its announcement yet")
        ]
        broker.send("q", message_bytes("x"), sender, "x")
        broker.settle()
        assert sender.accepted_tokens == ["x"]
        assert broker.engine.addresses.anycast["q"].waiting_count == 1

    asyncio.run(late())


def test_records_are_counted_on_if_a_snapshot_is_not_stored() -> None:
    async def failing() -> None:
        topics = Topics()
        keeping = housekeeping(BrokerInMemory(), topics, announce_timeout_s=0.01)
        for _ in range(2):
            for _ in range(DUE):
                keeping.appended(3)
            await asyncio.gather(*topics.running)  # its announcement is not stored in time
        keeping.appended(3)
        assert [(pin.name, pin.records, pin.bytes) for pin in keeping.retention_holds] == [("", 21, 63)]
        assert len(topics.running) == 2

    asyncio.run(failing())


@pytest.mark.parametrize("fault", [Unavailable("Kafka is away"), ValueError("a fault of ours")])
def test_error_in_round_is_reported_and_next_round_succeeds(fault: Exception) -> None:
    async def failing() -> None:
        broker, topics = BrokerInMemory(), Topics()
        keeping = housekeeping(broker, topics)
        topics.faults.append(fault)
        for reason in (f"housekeeping: {fault}", "no snapshot covers these records yet"):
            await finish(broker, keeping.rounds())
            assert [pin.reason for pin in keeping.retention_holds] == [reason]
        assert topics.notes == [f"housekeeping: {fault}"]

    asyncio.run(failing())


def test_round_is_due_by_records_and_by_bytes() -> None:
    async def count() -> None:
        topics = Topics()
        by_records = housekeeping(BrokerInMemory(), topics)
        for _ in range(DUE - 1):
            by_records.appended(1)
        assert topics.running == []
        by_records.appended(1)
        assert len(topics.running) == 1
        by_size = housekeeping(BrokerInMemory(), topics, size_bytes=100)
        by_size.appended(99)
        assert len(topics.running) == 1
        by_size.appended(1)
        assert len(topics.running) == 2

    asyncio.run(count())


def test_records_stored_during_a_round_get_another_round() -> None:
    async def burst() -> None:
        broker, topics = BrokerInMemory(), Topics()
        keeping = housekeeping(broker, topics)
        bursts = [DUE, DUE - 1]

        def append() -> None:
            for _ in range(bursts.pop(0)):
                keeping.appended(1)

        topics.during = [append, append]
        await finish(broker, keeping.rounds())
        assert bursts == []
        assert topics.rounds == 2
        assert topics.running == []  # only one round runs at a time
        assert len(topics.written) == 1

    asyncio.run(burst())


def test_journal_is_trimmed_to_lowest_pin() -> None:
    async def trim() -> None:
        broker, topics = BrokerInMemory(), Topics()
        send(broker, 5)
        topics.positions = [RetentionHold(Keeper.PIPELINE, "p", 3, 0, 0, "")]
        keeping = housekeeping(broker, topics)
        await finish(broker, keeping.rounds())
        oldest = broker.offsets.offset_of(1)
        assert [end for _, end in topics.trimmed] == [oldest]
        queue = broker.engine.addresses.anycast["q"]
        receiver = broker.attach(queue, 5)
        broker.settle()
        for message in list(receiver.messages):
            broker.engine.acknowledge(receiver.consumer, message)
        broker.settle()
        await finish(broker, keeping.rounds())
        assert topics.trimmed[-1] == (TrimmedLog.JOURNAL, 3)
        topics.positions = []
        topics.retained[TrimmedLog.JOURNAL] = 4
        await finish(broker, keeping.rounds())
        assert topics.trimmed[-1] == (TrimmedLog.JOURNAL, 4)
        assert [pin.keeper for pin in keeping.retention_holds] == [Keeper.RETENTION, Keeper.SNAPSHOT]

    asyncio.run(trim())


def test_journal_is_trimmed_behind_old_messages_and_a_restart_loads_them_once() -> None:
    async def trim() -> None:
        bench, topics = Bench(Policy()), Topics()
        broker = bench.broker
        keeping = housekeeping(broker, topics)
        records_of(bench)
        for _ in range(3):
            await finish(broker, keeping.rounds())
            bench.fill("young")
        assert len(topics.kept) == 10
        assert topics.first[TrimmedLog.JOURNAL] > 10
        taken = decode(topics.written.popitem()[1])
        loader = load(bench, taken, topics.kept)
        assert loader.first_offset >= topics.first[TrimmedLog.JOURNAL]
        assert bench.waiting(loader.engine.queue("q")) == [*(f"left {number}" for number in range(10)), *["young"] * 3]
        consumer = bench.consumer()
        bench.acknowledge(consumer)
        bench.broker.settle()
        await finish(broker, keeping.rounds())
        assert topics.kept == {}

    asyncio.run(trim())


def test_store_deletes_many_messages_in_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget() -> None:
        monkeypatch.setattr(rounds, "FORGOTTEN_AT_ONCE", 3)
        bench, topics = Bench(Policy()), Topics()
        keeping = housekeeping(bench.broker, topics)
        records_of(bench)
        for _ in range(3):
            await finish(bench.broker, keeping.rounds())
            bench.fill("young")
        assert len(topics.kept) == 10
        bench.acknowledge(bench.consumer())
        bench.broker.settle()
        topics.requests.clear()
        await finish(bench.broker, keeping.rounds())
        assert topics.kept == {}
        assert topics.requests == [3, 3, 3, 1]

    asyncio.run(forget())


def test_failed_deletion_in_the_store_is_retried_in_the_next_round() -> None:
    async def forget() -> None:
        bench, topics = Bench(Policy()), Topics()
        keeping = housekeeping(bench.broker, topics)
        records_of(bench)
        for _ in range(3):
            await finish(bench.broker, keeping.rounds())
            bench.fill("young")
        bench.acknowledge(bench.consumer())
        bench.broker.settle()
        topics.failing = Unavailable("Kafka is away")
        await finish(bench.broker, keeping.rounds())
        assert len(topics.kept) == 10
        topics.failing = None
        await finish(bench.broker, keeping.rounds())
        assert topics.kept == {}

    asyncio.run(forget())


@pytest.mark.interpreted
def test_error_of_work_in_turns_fails_only_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing() -> None:
        bench, topics = Bench(Policy()), Topics()
        keeping = housekeeping(bench.broker, topics)
        records_of(bench)

        def fault(*_: object) -> bytes:
            raise ValueError("a fault of ours")

        with monkeypatch.context() as patched:
            patched.setattr("bascule.broker.store_move.encode_record", fault)
            for _ in range(3):
                await finish(bench.broker, keeping.rounds())
                bench.fill("young")
        assert topics.notes == ["housekeeping: a fault of ours"]
        await finish(bench.broker, keeping.rounds())
        assert len(topics.kept) == 10

    asyncio.run(failing())


def test_snapshot_is_encoded_and_searched_off_the_loop() -> None:
    async def snapshot() -> None:
        broker, topics = BrokerInMemory(), Topics()
        send(broker, 1)
        await finish(broker, housekeeping(broker, topics).rounds())
        (written,) = topics.written.values()
        _, _, encoded, found = topics.computed_beside
        assert encoded.joined() == written  # type: ignore[attr-defined]
        assert [pin.keeper for pin in found] == [Keeper.QUEUE]  # type: ignore[attr-defined]

    asyncio.run(snapshot())


def test_ingress_is_trimmed_up_to_the_journaled_position() -> None:
    async def trim() -> None:
        broker, topics = BrokerInMemory(), Topics()
        broker.engine.ingress_is("ingress", {0: 7})
        broker.settle()
        keeping = housekeeping(broker, topics)
        await finish(broker, keeping.rounds())
        assert (TrimmedLog.INGRESS, 7) in topics.trimmed
        broker.engine.ingress_is("ingress", {0: 9})
        broker.settle()
        topics.retained[TrimmedLog.INGRESS] = 8
        await finish(broker, keeping.rounds())
        assert (TrimmedLog.INGRESS, 8) in topics.trimmed

    asyncio.run(trim())


def test_recreated_ingress_is_not_trimmed() -> None:
    async def trim() -> None:
        broker, topics = BrokerInMemory(), Topics()
        broker.engine.ingress_is("ingress", {0: 7})
        broker.settle()
        topics.ingress_id = "another"
        await finish(broker, housekeeping(broker, topics).rounds())
        assert [log for log, _ in topics.trimmed if log is TrimmedLog.INGRESS] == []

    asyncio.run(trim())


def test_hand_over_snapshot_trims_and_deletes_nothing() -> None:
    async def hand_over() -> None:
        broker, topics = BrokerInMemory(), Topics()
        topics.written["older"] = b"older"
        await finish(broker, housekeeping(broker, topics).hand_over())
        assert len(topics.written) == 2
        assert topics.trimmed == []

    asyncio.run(hand_over())


def test_round_of_an_epoch_that_has_ended_announces_and_deletes_nothing() -> None:
    async def ended() -> None:
        broker, topics = BrokerInMemory(), Topics()
        topics.written["older"] = b"older"
        topics.over = True
        records = len(broker.log.records)
        await finish(broker, housekeeping(broker, topics).rounds())
        assert len(broker.log.records) == records
        assert len(topics.written) == 2
        assert topics.trimmed == []

    asyncio.run(ended())


def prepared(bench: Bench, xid: Xid, count: int) -> None:
    """Prepare a branch that has received messages of a queue."""
    bench.fill(*range(count), to=str(xid))
    consumer = bench.consumer(bench.queue(str(xid)))
    transaction = bench.engine.begin(xid.bqual)
    for message in consumer.messages:
        bench.engine.acknowledge_in(transaction, consumer.consumer, message)
    branches.prepare(bench.engine, transaction, xid, "client", lambda _: None)
    bench.broker.settle()


def test_branch_that_pins_the_journal_is_found_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Policy())
    bench.fill("younger")
    for bqual in (b"first", b"second"):
        prepared(bench, Xid(7, b"g", bqual), 4)
    compared: list[int] = []
    find = Rounds._find_branch

    def watched(this: Rounds, mid: int, found: list[str]) -> Work:
        for steps in find(this, mid, found):
            compared.append(steps)
            yield steps

    monkeypatch.setattr(Rounds, "_find_branch", watched)
    monkeypatch.setattr(rounds, "COMPARED_AT_ONCE", 1)
    monkeypatch.setattr(rounds, "COMPARED_PER_STEP", 1)
    keeping = housekeeping(bench.broker, Topics())
    assert asyncio.run(found_pin(bench, keeping)) == (Keeper.QUEUE, "q")
    bench.acknowledge(bench.consumer(bench.queue("q")))
    bench.broker.settle()
    assert asyncio.run(found_pin(bench, keeping)) == (Keeper.BRANCH, str(Xid(7, b"g", b"first")))
    first = bench.engine.branches.prepared.pop(Xid(7, b"g", b"first"))
    for queue, message in first.acks:
        bench.engine.gone(queue, message)
    bench.broker.settle()
    assert asyncio.run(found_pin(bench, keeping)) == (Keeper.BRANCH, str(Xid(7, b"g", b"second")))
    assert max(compared) == 1
    assert len(compared) > 8


async def found_pin(bench: Bench, keeping: HousekeepingProtocol) -> tuple[Keeper, str]:
    """Run a round. Return what pins the journal first."""
    await finish(bench.broker, keeping.rounds())
    pin = keeping.retention_holds[0]
    return pin.keeper, pin.name
