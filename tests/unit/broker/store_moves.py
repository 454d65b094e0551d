"""Moves of old messages to the store, for tests of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bascule.broker import snapshot as snapshots
from bascule.broker.engine import Engine
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import Bodies
from bascule.broker.policy import Policy
from bascule.broker.snapshot import Snapshot
from bascule.broker.store_move import StoreMove
from bascule.broker.turns import Work
from bascule.testing.broker import snapshot_of
from tests.unit.broker.conftest import Bench


def traffic(bench: Bench, count: int) -> None:
    """Send and acknowledge messages, each in its own record."""
    consumer = bench.consumer(bench.queue("busy"))
    for number in range(count):
        bench.fill(number, to="busy")
        bench.acknowledge(consumer, -1)
        bench.broker.settle()
    bench.engine.detach(consumer.consumer)


def records_of(bench: Bench, size: int = 230, count: int = 10, **options: Any) -> None:
    """Store records of messages, one of which is left and the others are acknowledged; the last record has acknowledgements."""
    consumer = bench.consumer(bench.queue("busy"), credit=1_000_000)

    def acknowledge() -> None:
        for message in list(consumer.consumer.unacked.values()):
            bench.engine.acknowledge(consumer.consumer, message)

    for number in range(count):
        bench.put(f"left {number}", **options)
        for _ in range(size - 1):
            bench.put(number, to="busy")
        acknowledge()  # of the last record
        bench.broker.settle()
    acknowledge()
    bench.engine.detach(consumer.consumer)
    bench.broker.settle()


def done(work: Work) -> int:
    """Do all of the work. Return the steps of its longest piece."""
    return max(work, default=0)


def move_of(bench: Bench, stored: Iterable[int] = ()) -> tuple[Snapshot, StoreMove]:
    """Return the move for a snapshot, with its choice made; some messages are in the store already."""
    engine = bench.engine
    taken = snapshot_of(engine, bench.broker.offsets)
    taken.stored = sorted(stored)
    move = StoreMove(engine, taken, engine.journaling.sequence + 1)
    done(move.choose())
    return taken, move


def moved(bench: Bench) -> tuple[Snapshot, dict[int, bytes]]:
    """Return a snapshot for which messages have moved to the store."""
    taken, move = move_of(bench)
    stored: dict[int, bytes] = {}
    while move.more:
        done(move.encode())
        stored.update(move.batch)
    taken.stored = sorted(stored)
    return taken, stored


def load(bench: Bench, taken: Snapshot, stored: dict[int, bytes]) -> Loader:
    engine = Engine(Journaling(lambda *_: None), Bodies(None, 1 << 40), lambda: bench.now_ms, Policy())
    loader = Loader(engine, snapshots.decode(snapshots.encode(taken).joined()), stored)
    for offset in range(loader.first_offset, len(bench.broker.log.records)):
        loader.apply(offset, bench.broker.log.records[offset][1])
    loader.finish()
    return loader
