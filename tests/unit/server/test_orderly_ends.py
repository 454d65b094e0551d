"""The return of messages after a client has ended its session or its connection in an orderly way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bascule.amqp.link import ReceiverLink
from bascule.amqp.performatives import ACCEPTED
from bascule.broker.message import BrokerMessage
from bascule.client import Acknowledge, Queue, connect
from bascule.server.interruptions import PRODUCT
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import SOON_S, called, kafka, serving, until  # noqa: F401
from tests.unit.server.served import Client, Served, run_async

COUNT = 4


def prefetching(product: str | None) -> tuple[Served, Client, ReceiverLink]:
    """Return a client that holds four messages."""
    served = Served()
    served.fill("q", COUNT)
    client = Client(served, product=product)
    return served, client, client.consumer("q", credit=COUNT)


def marked(served: Served) -> list[bool]:
    """Return for each waiting message whether it is marked as delivered before."""
    queue = served.engine.addresses.anycast["q"]
    waiting: list[BrokerMessage] = queue.waiting()
    assert not queue.consumers
    return [bool(queue.delivery_count(message)) for message in waiting]


ENDS: dict[str, Callable[[Client], None]] = {
    "session": lambda client: client.session.end(),
    "connection": lambda client: client.amqp.close(),
}


def end(served: Served, client: Client, how: str) -> None:
    ENDS[how](client)
    served.settle(client)


@pytest.mark.parametrize("how", ENDS)
@run_async
async def test_unsettled_messages_of_an_orderly_qpid_jms_end_are_not_marked(how: str) -> None:
    served, client, link = prefetching(PRODUCT)
    first = min(client.session.incoming)
    link.settle(first, ACCEPTED)
    end(served, client, how)
    assert marked(served) == [False] * (COUNT - 1)


@pytest.mark.parametrize("how", ENDS)
@run_async
async def test_unsettled_messages_of_individual_acknowledgement_are_marked(how: str) -> None:
    served, client, link = prefetching(PRODUCT)
    second = sorted(client.session.incoming)[1]
    link.settle(second, ACCEPTED)
    end(served, client, how)
    assert marked(served) == [True] * (COUNT - 1)


@pytest.mark.parametrize("how", ENDS)
@run_async
async def test_unsettled_messages_of_an_unknown_client_are_marked(how: str) -> None:
    served, client, _ = prefetching("another")
    end(served, client, how)
    assert marked(served) == [True] * COUNT


@run_async
async def test_unsettled_messages_of_a_broken_qpid_jms_connection_are_marked() -> None:
    served, client, _ = prefetching(PRODUCT)
    client.connection.connection_lost(None)
    served.settle()
    assert marked(served) == [True] * COUNT


@pytest.mark.parametrize("mode", [Acknowledge.AUTO, Acknowledge.CLIENT])
@run_async
async def test_python_client_marks_only_what_the_application_has_seen(kafka: KafkaInMemory, tmp_path: Path, mode: Acknowledge) -> None:  # noqa: F811
    async with serving(kafka, tmp_path) as broker:
        await broker.send("q", "a", "b", "c", "d")
        queue = broker.node.engine.addresses.anycast["q"]

        def receive_one() -> None:
            with connect(f"amqp://127.0.0.1:{broker.ready[-1]}", acknowledge=mode) as context:
                assert context.consumer(Queue("q")).receive(SOON_S) is not None

        await called(receive_one)
        await until(lambda: not queue.consumers and queue.waiting_count >= 3, "the client is gone")
        seen = [True] if mode is Acknowledge.CLIENT else []
        assert [bool(queue.delivery_count(message)) for message in queue.waiting()] == [*seen, False, False, False]
