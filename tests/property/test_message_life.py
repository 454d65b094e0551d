"""The life of each message, read from the journal, ends where the broker has the message: random commands and crashes."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest

from bascule.broker.engine import Engine
from bascule.jms.sections import message_id_of
from bascule.journal.errors import ForeignRecord
from bascule.journal.fence import Fence
from bascule.timeline.facts import Fate
from bascule.timeline.life import MessageLife
from bascule.timeline.wanted import WantedId
from tests.property.broker_commands import BranchRun, Run

RUNS = int(os.environ.get("BASCULE_LIFE_RUNS", "150"))
#: Queue ids with mids and numbers of failed deliveries: of messages that wait, and of those that a prepared branch has received.
Held = tuple[set[tuple[int, int, int]], set[tuple[int, int, int]]]


def life_of(number: int, records: list[tuple[bytes, bytes]]) -> MessageLife:
    life = MessageLife(WantedId(f"id{number}"), Fence())
    for offset, (_, value) in enumerate(records):
        try:
            life.take(offset, offset, value)
        except ForeignRecord:
            continue
    return life


def held_by_broker(engine: Engine, message_id: str) -> Held:
    everything = {
        (queue.id, message.mid, queue.counts.get(message.position, 0))
        for queue in engine.addresses.queues.values()
        for message in queue.held
        if message_id_of(engine.bodies.read(message)) == message_id
    }
    in_branches = {
        (queue.id, message.mid, queue.counts.get(message.position, 0))
        for branch in engine.branches.prepared.values()
        for queue, message in branch.acks
    }
    return everything - in_branches, everything & in_branches


def held_by_life(life: MessageLife) -> Held:
    stays = [(mid, stay) for mid, message in life.messages.items() for stay in message.stays.values()]
    waiting, branch = (
        {(stay.queue, mid, stay.failed) for mid, stay in stays if stay.fate is fate} for fate in (Fate.WAITING, Fate.IN_BRANCH)
    )
    return waiting, branch


def check(run: Run) -> int:
    """Compare each message of a run. Return the number of stays that have ended."""
    engine = run.broker.replay(None).engine
    ended = 0
    for number in range(run.numbers):
        life = life_of(number, run.broker.log.records)
        expected = held_by_broker(engine, f"ID:AMQP_NO_PREFIX:id{number}")
        assert held_by_life(life) == expected, f"message {number}: {life.events}"
        in_branch = any(branch.prepared for branch in life.branches.values())
        assert life.ended == (bool(life.messages) and not any(expected) and not in_branch), f"message {number}: {life.events}"
        ended += sum(not stay.held for message in life.messages.values() for stay in message.stays.values())
    return ended


@pytest.mark.parametrize("kind", [Run, BranchRun])
@pytest.mark.timeout(300)
def test_life_in_the_journal_ends_where_the_broker_has_the_message(kind: type[Run]) -> None:
    ended = 0
    for seed in range(RUNS):
        run = kind(seed)
        run.commands()
        run.settle()
        ended += check(run)
        run.drain()
        ended += check(run)
    assert ended > RUNS, "hardly any message has left its queue"


def life_with_a_gap(number: int, records: list[tuple[bytes, bytes]], begin: int, end: int) -> MessageLife:
    """Return a life from a search that has not read the records from ``begin`` to ``end``."""
    whole, life = MessageLife(WantedId(f"id{number}"), Fence()), MessageLife(WantedId(f"id{number}"), Fence(), from_start=begin > 0)
    for offset, (_, value) in enumerate(records):
        if offset == end:
            life.fence = replace(whole.fence)
            life.lose_track()
        for each in (whole,) if begin <= offset < end else (whole, life):
            with suppress(ForeignRecord):
                each.take(offset, offset, value)
    return life


@pytest.mark.parametrize("kind", [Run, BranchRun])
@pytest.mark.timeout(300)
def test_life_with_a_gap_in_the_journal_says_nothing_false(kind: type[Run]) -> None:
    known = unknown = 0
    for seed in range(RUNS // 3):
        run = kind(seed)
        run.commands()
        run.settle()
        records, engine = run.broker.log.records, run.broker.replay(None).engine
        begin = Random(seed).randrange(len(records) - 1)
        end = min(begin + 1 + seed % 20, len(records) - 1)
        for number in range(run.numbers):
            life = life_with_a_gap(number, records, begin, end)
            waiting, branch = ({each[:2] for each in held} for held in held_by_broker(engine, f"ID:AMQP_NO_PREFIX:id{number}"))
            whole = life_of(number, records)
            for mid, message in life.messages.items():
                for stay in message.stays.values():
                    at, known_to_be = (stay.queue, mid), whole.messages[mid].stays[stay.queue]
                    assert not stay.held or stay.fate is Fate.UNKNOWN or at in (waiting if stay.fate is Fate.WAITING else branch)
                    assert stay.held or at not in waiting | branch
                    assert stay.deliverable or not stay.reservations_known or not known_to_be.deliverable
                    known, unknown = known + (stay.fate is not Fate.UNKNOWN), unknown + (stay.fate is Fate.UNKNOWN)
            assert not life.ended or not (waiting | branch) & {(queue, mid) for mid, each in life.messages.items() for queue in each.stays}
    assert min(known, unknown) > RUNS // 6, (known, unknown)
