"""Records of the ingress topic are taken in short turns, however many subscriptions want them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from bascule.broker.ingress_access import Arrival
from bascule.broker.ingress_tail import CHUNK_MESSAGES, IngressTaking
from bascule.broker.turns import TURN_STEPS
from bascule.core.destination import Routing
from bascule.journal.records import Send, SendFlag
from bascule.testing.broker import message_bytes
from tests.unit.broker.conftest import Bench


class Taking:
    """The intake of one chunk of records with a message each. The test decides when the next turn begins."""

    def __init__(self, bench: Bench, count: int) -> None:
        self.engine = bench.engine
        self.engine.turns.steps = TURN_STEPS
        self.turns: list[Callable[[], object]] = []
        self.stored = 0
        taking = IngressTaking(
            self.engine, "bascule.ingress", 0, soon=self.turns.append, taken=self._taken, ending=lambda: False
        )  # fmt: skip
        taking.gather(deque((offset + 1, [Arrival(_send(offset), keep=True)]) for offset in range(count)))
        self.taking = taking

    def _taken(self) -> None:
        self.stored += 1

    def go_on(self) -> int:
        """Run the remaining turns. Return their number."""
        count = 0
        while self.turns:
            self.turns.pop()()
            count += 1
        return count


def _send(number: int, **fields: Any) -> Send:
    body = message_bytes(number)
    return Send(SendFlag.DURABLE, Routing.MULTICAST, 4, 0, 0, 0, "t", (), (), (), None, body)._replace(**fields)


def test_ingress_chunk_for_many_subscriptions_is_taken_in_many_turns_in_order(bench: Bench) -> None:
    subscriptions = [bench.subscription(f"s{number}", subscription=f"s{number}") for number in range(400)]
    taking = Taking(bench, 100)
    assert 0 < subscriptions[0].incoming < 100
    assert taking.engine.memory.ingress_bytes > 0
    assert taking.go_on() > 5
    bench.broker.settle()
    assert taking.stored == 1
    assert taking.engine.memory.ingress_bytes == 0
    assert taking.engine.confirmed_ingress == {0: 100}
    for subscription in subscriptions:
        assert bench.waiting(subscription) == list(range(100))


def test_largest_ingress_chunk_fits_into_journal_records_for_any_number_of_subscriptions(bench: Bench) -> None:
    for number in range(30):
        bench.subscription(f"s{number}", subscription=f"s{number}")
    bench.engine.journaling.record_bytes_max = 400 << 10  # smaller than the ids of the queues for the whole chunk
    taking = Taking(bench, CHUNK_MESSAGES)
    taking.go_on()
    bench.broker.settle()
    assert taking.taking.waits == ""
    assert taking.engine.confirmed_ingress == {0: CHUNK_MESSAGES}


def test_ingress_turn_accounts_for_selectors_of_subscriptions(bench: Bench) -> None:
    slow = " AND ".join(f"p{number} = 1" for number in range(500))
    subscriptions = [bench.subscription(f"s{number}", subscription=f"s{number}", selector=slow) for number in range(3)]
    taking = Taking(bench, 10)
    assert taking.go_on() > 2
    bench.broker.settle()
    assert [subscription.held_messages for subscription in subscriptions] == [0, 0, 0]
    assert taking.engine.confirmed_ingress == {0: 10}
