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
    """Messages that come and go, each in records of its own."""
    consumer = bench.consumer(bench.queue("busy"))
    for number in range(count):
        bench.fill(number, to="busy")
        bench.acknowledge(consumer, -1)
        bench.broker.settle()
    bench.engine.detach(consumer.consumer)


def records_of(bench: Bench, size: int = 230, count: int = 10, **options: Any) -> None:
    """Records of messages, of which one is left and all others are acknowledged; the last record is of acknowledgements."""
    consumer = bench.consumer(bench.queue("busy"), credit=1_000_000)

    def acknowledge() -> None:
        for message in list(consumer.consumer.unacked.values()):
            bench.engine.acknowledge(consumer.consumer, message)

    for number in range(count):
        bench.put(f"left {number}", **options)
        for _ in range(size - 1):
            bench.put(number, to="busy")
        acknowledge()  # those of the last record
        bench.broker.settle()
    acknowledge()
    bench.engine.detach(consumer.consumer)
    bench.broker.settle()


def done(work: Work) -> int:
    """Do all of the work; returns the steps of its longest piece."""
    return max(work, default=0)


def move_of(bench: Bench, stored: Iterable[int] = ()) -> tuple[Snapshot, StoreMove]:
    """The move that goes with a snapshot, chosen; some messages are in the store already."""
    engine = bench.engine
    taken = snapshot_of(engine, bench.broker.offsets)
    taken.stored = sorted(stored)
    move = StoreMove(engine, taken, engine.journaling.sequence + 1)
    done(move.choose())
    return taken, move


def moved(bench: Bench) -> tuple[Snapshot, dict[int, bytes]]:
    """A snapshot for which messages have moved to the store."""
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
