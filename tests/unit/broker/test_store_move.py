"""The choice of old messages that move to the store: those that keep too much of the journal."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.broker import branches, store_move
from bascule.broker.message import Bodies, BodyOwner
from bascule.broker.policy import Policy
from bascule.broker.store_move import StoreMove
from bascule.broker.turns import SLICES, TURN_STEPS
from bascule.journal.branches import Ending
from bascule.testing.broker import snapshot_of
from tests.unit.broker.branch_work import XID, Work, work
from tests.unit.broker.conftest import Bench
from tests.unit.broker.store_moves import done, load, move_of, moved, records_of, traffic

__all__ = ["work"]  # fixtures


class FaultyStore:
    """A store of spilled bodies by handle, some of which are lost."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.lost: set[int] = set()

    def put(self, body: bytes, owner: BodyOwner) -> int:
        self.bodies.append(body)
        return len(self.bodies) - 1

    def get(self, handle: int, size_bytes: int) -> bytes:
        if handle in self.lost:
            raise OSError("the disk has lost it")
        return self.bodies[handle]

    def free(self, handle: int, size_bytes: int) -> None: ...


@pytest.mark.parametrize("options", [{}, {"delivery_delay_ms": 1_000}, {"group": "g"}])
def test_message_alone_in_its_record_moves_to_store_and_record_is_no_longer_needed(bench: Bench, options: dict[str, Any]) -> None:
    records_of(bench, **options)
    taken, stored = moved(bench)
    assert len(stored) == 10
    assert taken.first_offset() == taken.next_offset
    queue = load(bench, taken, stored).engine.queue("q")
    left = [*queue.delayed] if "delivery_delay_ms" in options else [*queue.ready]
    assert [bench.content(message) for message in left] == [f"left {number}" for number in range(10)]


def test_queue_that_needs_most_of_journal_does_not_move_to_store(bench: Bench) -> None:
    bench.fill(*range(50))
    for number in range(230):
        bench.put(number)  # one record
    bench.broker.settle()
    assert moved(bench)[1] == {}
    consumer = bench.consumer(credit=100)
    bench.acknowledge(consumer)
    bench.engine.detach(consumer.consumer)
    bench.broker.settle()
    assert moved(bench)[1] == {}, "a third of the journal has no use"


@pytest.mark.parametrize(("acknowledged", "moves"), [(1, 0), (3, 1)])
def test_large_message_moves_if_more_than_twice_its_size_is_freed(bench: Bench, acknowledged: int, moves: int) -> None:
    consumer = bench.consumer(bench.queue("busy"))
    bench.fill(b"x" * (4 << 20))
    for number in range(acknowledged):
        bench.fill(b"%d" % number * (3 << 20), to="busy")
    bench.acknowledge(consumer)
    bench.engine.detach(consumer.consumer)
    bench.broker.settle()
    assert len(moved(bench)[1]) == moves


def test_deep_queue_behind_old_message_does_not_move_to_store(bench: Bench) -> None:
    bench.fill("old")
    traffic(bench, 20)
    bench.fill(*range(50))
    assert len(moved(bench)[1]) == 1


def test_round_moves_a_limited_number_of_messages_and_later_rounds_the_rest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_move, "ROUND_MESSAGES_MAX", 5)
    bench.fill(*range(12))
    traffic(bench, 100)
    bench.fill("last")
    stored: dict[int, bytes] = {}
    for expected in (5, 10, 12, 12):
        taken, move = move_of(bench, stored=stored)
        while move.more:
            done(move.encode())
            stored.update(move.batch)
        assert len(stored) == expected
        taken.stored = sorted(stored)
        assert bench.waiting(load(bench, taken, stored).engine.queue("q")) == [*range(12), "last"]


def test_batches_of_store_move_are_bounded_in_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_move, "BATCH_BYTES", 1000)
    monkeypatch.setattr(store_move, "ROUND_BYTES_MAX", 10_000)
    for _ in range(20):
        bench.fill("x" * 600)
        traffic(bench, 30)
    _, move = move_of(bench)
    batches = []
    while move.more:
        done(move.encode())
        batches.append(len(move.batch))
    assert batches == [2] * 6 + [1]


def test_move_ends_at_a_message_that_was_removed_meanwhile(bench: Bench) -> None:
    records_of(bench)
    _, move = move_of(bench)
    consumer = bench.consumer(credit=3)
    bench.acknowledge(consumer, 2)
    done(move.encode())
    assert len(move.batch) == 2
    assert not move.more


def test_message_whose_removal_is_not_stored_yet_stops_the_move_for_one_round(bench: Bench) -> None:
    records_of(bench)
    consumer = bench.consumer(credit=1)
    bench.acknowledge(consumer)
    bench.broker.flush()
    assert moved(bench)[1] == {}
    bench.broker.settle()
    assert len(moved(bench)[1]) == 9


def test_store_move_ends_at_message_with_unreadable_body() -> None:
    spilled = FaultyStore()
    bench = Bench(Policy(), bodies=lambda _: Bodies(spilled, 0))
    records_of(bench)
    spilled.lost.add(bench.queue("q").ready.peek().handle + 1)
    _, move = move_of(bench)
    done(move.encode())
    assert len(move.batch) == 1
    assert not move.more


def test_store_move_takes_short_steps(bench: Bench) -> None:
    records_of(bench, size=3, count=400)
    engine = bench.engine
    move = StoreMove(engine, snapshot_of(engine, bench.broker.offsets), engine.journaling.sequence)
    assert 0 < done(move.choose()) <= TURN_STEPS // SLICES
    assert 0 < done(move.encode()) <= TURN_STEPS // SLICES


def test_messages_in_the_store_are_skipped_in_short_pieces(bench: Bench) -> None:
    records_of(bench, size=3, count=400)
    engine = bench.engine
    taken = snapshot_of(engine, bench.broker.offsets)
    (mids,) = (mids for mids in taken.mids if mids)
    taken.stored = list(mids[1:])  # a branch held the first one when the others moved
    move = StoreMove(engine, taken, engine.journaling.sequence)
    move.skip_stored()
    pieces = list(move.choose())
    assert max(pieces) <= TURN_STEPS // SLICES
    assert len(pieces) >= len(taken.stored)
    done(move.encode())
    assert [*move.batch] == list(mids[:1])


def test_store_move_search_starts_behind_stored_messages(bench: Bench) -> None:
    records_of(bench)
    engine = bench.engine
    taken = snapshot_of(engine, bench.broker.offsets)
    (mids,) = (mids for mids in taken.mids if mids)
    taken.stored = list(mids[:6])
    move = StoreMove(engine, taken, engine.journaling.sequence)
    move.skip_stored()
    assert sum(move.choose()) == 0
    done(move.encode())
    assert [*move.batch] == list(mids[6:])


@pytest.mark.parametrize("ending", [Ending.COMMITTED, Ending.ROLLED_BACK])
def test_message_received_by_a_prepared_branch_moves_and_exists_once_when_the_branch_ends(work: Work, ending: Ending) -> None:
    bench = work.bench
    work.prepared()
    traffic(bench, 20)
    taken, stored = moved(bench)
    assert len(stored) == 1
    assert taken.first_offset() == taken.next_offset
    engine = load(bench, taken, stored).engine
    assert [bench.content(message) for _, message in engine.branches.held()] == ["order"]
    assert engine.queue("in").held_messages == 1
    branches.end(bench.engine, XID, ending, lambda: None)
    bench.broker.settle()
    engine = load(bench, taken, stored).engine
    assert bench.waiting(engine.queue("in")) == (["order"] if ending is Ending.ROLLED_BACK else [])
    assert bench.waiting(engine.queue("out")) == ([] if ending is Ending.ROLLED_BACK else ["bill"])


def test_message_sharing_record_with_branch_moves_to_store_and_branch_stays_listed(work: Work) -> None:
    bench = work.bench
    consumer = bench.consumer(bench.queue("busy"))
    work.prepare()
    bench.put("left")
    for number in range(50):
        bench.put(number, to="busy")
    bench.broker.settle()
    bench.acknowledge(consumer)
    bench.engine.detach(consumer.consumer)
    bench.broker.settle()
    taken, stored = moved(bench)
    assert len(stored) == 2
    assert taken.first_offset() == taken.next_offset
    engine = load(bench, taken, stored).engine
    assert bench.waiting(engine.queue("q")) == ["left"]
    assert [each.xid for each in branches.listed(engine)] == [XID]
    assert engine.queue("busy").held_messages == 0


def test_message_held_by_an_open_transaction_moves_and_waits_after_a_crash(work: Work) -> None:
    bench = work.bench
    traffic(bench, 20)
    taken, stored = moved(bench)
    assert len(stored) == 1
    assert bench.waiting(load(bench, taken, stored).engine.queue("in")) == ["order"]
