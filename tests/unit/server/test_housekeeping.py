"""A round of housekeeping while Kafka is slow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bascule.core.errors import Unavailable
from bascule.core.topics import JournalTopics
from bascule.server.housekeeping import Housekeeping
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes


class Snapshots:
    """The snapshots topic, as far as a round asks for it."""

    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}

    def write(self, name: str, data: bytes) -> None:
        self.written[name] = data

    def delete_older(self, name: str) -> None:
        self.written = {name: self.written[name]}


def housekeeping_of(broker: BrokerInMemory, snapshots: Snapshots, append_timeout_s: float = 0.01) -> Housekeeping:
    place: Any = SimpleNamespace(kafka={}, topics=JournalTopics(), append_timeout_s=append_timeout_s, snapshot_records=10)
    store: Any = SimpleNamespace(mids_now=set)
    found: Any = Housekeeping(place, broker.engine, broker.offsets, store, lambda: True)
    found._snapshots = snapshots
    return found


def test_an_announcement_that_is_stored_too_late_disturbs_nobody() -> None:
    async def late() -> None:
        broker, sender, snapshots = BrokerInMemory(), Sender(), Snapshots()
        housekeeping = housekeeping_of(broker, snapshots)
        await housekeeping.rounds()  # its announcement is not stored in time
        assert len(snapshots.written) == 1
        assert [(pin.keeper, pin.reason) for pin in housekeeping.pins] == [
            ("snapshot", "no snapshot this time: its announcement is not stored yet")
        ]
        broker.send("q", message_bytes("x"), sender, "x")
        broker.settle()
        assert sender.accepted_tokens == ["x"]
        assert broker.engine.addresses.anycast["q"].waiting_count == 1

    asyncio.run(late())


def test_records_that_are_in_no_snapshot_count_on_when_one_is_not_stored() -> None:
    async def failing() -> None:
        housekeeping = housekeeping_of(BrokerInMemory(), Snapshots())
        for _ in range(2):
            for _ in range(10):
                housekeeping.appended(3)
            await housekeeping.rounds()  # its announcement is not stored in time
        housekeeping.appended(3)
        assert [(pin.name, pin.records, pin.bytes) for pin in housekeeping.pins] == [("", 21, 63)]

    asyncio.run(failing())


@pytest.mark.parametrize("fault", [Unavailable("Kafka is away"), ValueError("a fault of ours")])
def test_whatever_a_round_fails_of_is_said_and_the_next_one_tries_again(fault: Exception) -> None:
    async def failing() -> None:
        broker, snapshots = BrokerInMemory(), Snapshots()
        housekeeping = housekeeping_of(broker, snapshots, append_timeout_s=60.0)
        unchecked: Any = housekeeping
        faults = [fault]

        def trim(*_: object) -> None:
            if faults:
                raise faults.pop()

        unchecked._trim = trim
        for reason in (f"housekeeping: {fault}", "what came since is in no snapshot yet"):
            rounds = asyncio.create_task(housekeeping.rounds())
            while not rounds.done():
                broker.settle()  # the announcement is stored
                await asyncio.sleep(0)
            await rounds
            assert [pin.reason for pin in housekeeping.pins] == [reason]

    asyncio.run(failing())


def test_what_came_during_a_round_has_one_of_its_own_though_nothing_comes_after_it() -> None:
    async def burst() -> None:
        broker, snapshots = BrokerInMemory(), Snapshots()
        housekeeping = housekeeping_of(broker, snapshots, append_timeout_s=60.0)
        bursts = [10, 9]  # as many records as a round wants, then one less
        trimmed: list[str] = []

        def trim(taken: Any, _: object) -> None:
            trimmed.append(taken.id)
            if bursts:
                for _ in range(bursts.pop(0)):
                    housekeeping.appended(1)

        unchecked: Any = housekeeping
        unchecked._trim = trim
        rounds = asyncio.create_task(housekeeping.rounds())
        while not rounds.done():
            broker.settle()  # the announcements are stored
            await asyncio.sleep(0)
        assert len(trimmed) == 2
        assert list(snapshots.written) == trimmed[-1:]

    asyncio.run(burst())
