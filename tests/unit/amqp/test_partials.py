"""Incomplete messages on several connections that share one budget."""

from __future__ import annotations

from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED
from bascule.amqp.events import Detached, Transferred
from bascule.amqp.frames import frame_head
from bascule.amqp.link import SenderLink
from bascule.amqp.partials import PartialBudget
from bascule.amqp.performatives import Transfer
from tests.unit.amqp.pair import Pair, events_of


def pair_with(budget: PartialBudget) -> Pair:
    pair = Pair()
    pair.server.partials = budget
    return pair


def begin_message(pair: Pair, link: SenderLink, size: int) -> None:
    """Send the first frame of a message."""
    pair.client.out.append(frame_head(link.session.channel, Transfer(link.handle, 0, b"0", more=True), size) + b"x" * size)
    pair.run()


def continue_message(pair: Pair, link: SenderLink, size: int, *, more: bool) -> None:
    pair.client.out.append(frame_head(link.session.channel, Transfer(link.handle, more=more), size) + b"x" * size)
    pair.run()


def test_exceeded_partial_budget_detaches_link_that_waited_longest_for_a_frame() -> None:
    budget = PartialBudget(10_000)
    pairs = [pair_with(budget) for _ in range(3)]
    links = [pair.producer()[0] for pair in pairs]
    for pair, link in zip(pairs, links, strict=True):
        begin_message(pair, link, 3_000)
    continue_message(pairs[0], links[0], 1, more=True)
    continue_message(pairs[2], links[2], 3_000, more=True)  # now the second link has waited longest
    assert budget.used_bytes == 9_001
    pairs[1].run()
    (detached,) = events_of(Detached, pairs[1].at_client)
    assert detached.error is not None
    assert detached.error.condition == RESOURCE_LIMIT_EXCEEDED
    for number in (0, 2):
        continue_message(pairs[number], links[number], 1, more=False)
        assert events_of(Transferred, pairs[number].at_server)
    assert budget.used_bytes == 0


def test_single_partial_message_may_exceed_the_budget() -> None:
    budget = PartialBudget(10)
    pair = pair_with(budget)
    link, _ = pair.producer()
    begin_message(pair, link, 1_000)
    continue_message(pair, link, 1_000, more=False)
    assert [len(event.payload) for event in events_of(Transferred, pair.at_server)] == [2_000]
