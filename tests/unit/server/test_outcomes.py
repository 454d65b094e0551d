"""The effect of each outcome on its message, with and without settlement."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.amqp import hot
from bascule.amqp.events import Transferred
from bascule.amqp.performatives import Accepted, Modified, Rejected, Released, TransactionalState
from bascule.jms.sections import head_of
from tests.unit.server.served import Client, Served, run_async


def receiver_of_one(served: Served) -> Client:
    """Return a client that got a message."""
    served.fill("q", 1)
    client = Client(served)
    assert client.received(client.consumer("q", credit=1)) == 1
    return client


def state(client: Client, outcome: Any, *, settled: bool) -> None:
    """Send the client's disposition of its first delivery."""
    octets = b"" if outcome is None else hot.state_bytes(outcome)
    client.amqp.out.append(hot.disposition(client.session.channel, True, 0, 0, settled, octets))
    client.served.settle(client)


def delivery_counts(served: Served, queue: str) -> list[int]:
    """Return the delivery counts of the messages that another consumer gets."""
    other = Client(served, "other")
    other.consumer(queue, credit=10)
    return [head_of(bytes(event.payload))[0][4] for event in other.events_of(Transferred)]


OUTCOMES = [
    (Accepted(), [], False),
    (Rejected(), [], True),
    (Released(), [0], False),
    (Modified(), [0], False),
    (Modified(delivery_failed=True), [1], False),
    (TransactionalState(b"unknown", Accepted()), [1], False),
]


@pytest.mark.parametrize("settled", [True, False], ids=["settled", "unsettled"])
@pytest.mark.parametrize(("outcome", "again", "dead"), OUTCOMES, ids=["accepted", "rejected", "released", "modified", "failed", "unknown"])
@run_async
async def test_message_is_removed_dead_lettered_or_redelivered_by_its_outcome(
    outcome: Any, again: list[int], dead: bool, settled: bool
) -> None:
    served = Served()
    client = receiver_of_one(served)
    state(client, outcome, settled=settled)
    client.amqp.close()
    served.settle(client)
    assert (delivery_counts(served, "q"), len(delivery_counts(served, "DLQ"))) == (again, dead)


@run_async
async def test_settlement_without_an_outcome_counts_as_a_failed_delivery() -> None:
    served = Served()
    state(receiver_of_one(served), None, settled=True)
    assert delivery_counts(served, "q") == [1]


@run_async
async def test_disposition_without_outcome_and_settlement_changes_nothing() -> None:
    served = Served()
    client = receiver_of_one(served)
    state(client, None, settled=False)
    assert delivery_counts(served, "q") == []
    state(client, Accepted(), settled=True)
    assert served.engine.queue("q").held_messages == 0


@run_async
async def test_outcome_is_settled_by_broker_when_record_is_stored() -> None:
    served = Served()
    client = receiver_of_one(served)
    client.amqp.out.append(hot.disposition(client.session.channel, True, 0, 0, False, hot.state_bytes(Accepted())))
    client.run()
    served.broker.flush()
    client.run()
    assert list(client.session.incoming) == [0]
    served.settle(client)
    assert list(client.session.incoming) == []
