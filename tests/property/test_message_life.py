"""The life of each message, read from the journal, ends where the broker has the message: random commands and crashes."""

from __future__ import annotations

import os

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
