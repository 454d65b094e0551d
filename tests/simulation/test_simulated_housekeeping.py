"""Faults planted in what keeps the journal short are found by the simulation."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.broker.snapshot import Snapshot
from bascule.journal.records import Op, json_entry
from bascule.writer.position import Position
from tests.sim import keeping
from tests.sim.kafka import INGRESS
from tests.sim.keeping import Housekeeping
from tests.sim.simulation import Parts
from tests.sim.writer import PositionReader, decoded
from tests.simulation.planting import Plant, not_found

TIMEOUT_S = 120


def one_record_too_many_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> Parts:
    needed_from = keeping.needed_from
    monkeypatch.setattr(keeping, "needed_from", lambda taken, position: needed_from(taken, position) + 1)
    return Parts()


def pipelines_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> Parts:
    needed_from = keeping.needed_from
    monkeypatch.setattr(keeping, "needed_from", lambda taken, _: needed_from(taken, taken.next_offset))
    return Parts()


def waiting_messages_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(keeping, "needed_from", lambda taken, position: min(taken.next_offset, position))
    return Parts()


def snapshots_replace_others_before_they_count(monkeypatch: pytest.MonkeyPatch) -> Parts:
    announce = Housekeeping.announce

    async def delete_and_announce(housekeeping: Housekeeping, taken: Snapshot) -> None:
        await housekeeping.delete_older(taken)
        await announce(housekeeping, taken)

    monkeypatch.setattr(Housekeeping, "announce", delete_and_announce)
    return Parts()


def nobody_waits_for_the_announcement(monkeypatch: pytest.MonkeyPatch) -> Parts:
    async def announce(housekeeping: Housekeeping, taken: Snapshot) -> None:
        housekeeping._engine.journaling.add(json_entry(Op.SNAPSHOT, {"id": taken.id}))

    monkeypatch.setattr(Housekeeping, "announce", announce)
    return Parts()


def the_store_forgets_what_still_waits(monkeypatch: pytest.MonkeyPatch) -> Parts:
    trim = Housekeeping.trim

    async def forget_and_trim(housekeeping: Housekeeping, taken: Snapshot, *more: Any) -> None:
        if taken.stored:
            await housekeeping.store(dict.fromkeys(taken.stored))
        await trim(housekeeping, taken, *more)

    monkeypatch.setattr(Housekeeping, "trim", forget_and_trim)
    return Parts()


def the_store_forgets_before_the_announcement(monkeypatch: pytest.MonkeyPatch) -> Parts:
    announce = Housekeeping.announce

    async def forget_and_announce(housekeeping: Housekeeping, taken: Snapshot) -> None:
        gone = await housekeeping.stored() - set(taken.stored)
        if gone:
            await housekeeping.store(dict.fromkeys(gone))
        await announce(housekeeping, taken)

    monkeypatch.setattr(Housekeeping, "announce", forget_and_announce)
    return Parts()


def positions_count_before_they_are_committed(monkeypatch: pytest.MonkeyPatch) -> Parts:
    class HastyReader(PositionReader):
        async def read(self) -> dict[str, Position]:
            records, _ = await self.kafka.fetch(self.process, self.partition, 0, committed=False)
            return {(record.key or b"").decode(): decoded(record.value) for record in records if record.value}

    monkeypatch.setattr(keeping, "PositionReader", HastyReader)
    return Parts()


def the_ingress_is_trimmed_before_the_journal_has_it(monkeypatch: pytest.MonkeyPatch) -> Parts:
    trim = Housekeeping.trim

    async def trim_more(housekeeping: Housekeeping, *arguments: Any) -> None:
        await trim(housekeeping, *arguments)
        await housekeeping._trim_to(INGRESS, housekeeping._kafka.partition(INGRESS).stable)

    monkeypatch.setattr(Housekeeping, "trim", trim_more)
    return Parts()


#: What is planted, and the anomalies that must show, each of them.
PLANTED: list[tuple[Plant, set[str]]] = [
    (one_record_too_many_is_trimmed, {"stuck", "divert-loss"}),
    (pipelines_keep_nothing, {"divert-loss"}),
    (waiting_messages_keep_nothing, {"stuck"}),
    (snapshots_replace_others_before_they_count, {"stuck"}),
    (nobody_waits_for_the_announcement, {"stuck"}),
    (the_store_forgets_what_still_waits, {"stuck"}),
    (the_store_forgets_before_the_announcement, {"stuck"}),
    (positions_count_before_they_are_committed, {"divert-loss"}),
    (the_ingress_is_trimmed_before_the_journal_has_it, {"ingress-loss"}),
]


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("plant", "names"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_the_simulation_finds(plant: Plant, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_found(plant(monkeypatch), names) == set()
