"""The tail of the ingress topic, on a topic in memory and an engine whose journal is in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bascule.broker.policy import BLOCK, DROP, REJECT, AddressSettings, Policy
from bascule.core.destination import Routing
from bascule.journal.records import Kind, Send, SendFlag, Source, encode_record, send_entry
from bascule.server import ingress
from bascule.server.ingress import CHUNKS_MAX, IngressTail
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes

SENDS = 3 * CHUNKS_MAX
PATIENCE_S = 30.0


class Record:
    """One of ``bascule.ingress``, for a queue."""

    def __init__(self, offset: int, address: str) -> None:
        send = Send(
            SendFlag.SOURCE, Routing.ANYCAST, 4, 0, 0, 0, address, (), (), (), Source("topic", 0, offset), message_bytes(offset)
        )  # fmt: skip
        self._offset = offset
        self._value = encode_record(Kind.DATA, 0, 0, send_entry(send))

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return self._value

    def headers(self) -> list[tuple[str, bytes]]:
        return [("unbound", b"keep")]


class Reader:
    """Gives a record at a time: each is a step."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._position = 0

    def seek(self, offset: int) -> None:
        self._position = offset

    def read(self, count: int, timeout_s: float) -> list[Record]:
        if self._position == SENDS:
            time.sleep(0.01)
            return []
        self._position += 1
        return [Record(self._position - 1, "bounded" if self._position % 2 else "other")]

    def close(self) -> None:
        pass


async def until(broker: BrokerInMemory, true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s
        broker.settle()
        await asyncio.sleep(0.001)


def run(policy: Policy, check: Callable[[BrokerInMemory, IngressTail], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "PartitionReader", Reader)

    async def tailed() -> None:
        broker = BrokerInMemory(policy=policy)
        tail = IngressTail({}, "bascule.ingress", 0, broker.engine, asyncio.get_running_loop())
        try:
            await check(broker, tail)
        finally:
            tail.close()

    asyncio.run(tailed())


@pytest.mark.parametrize("when_full", [BLOCK, REJECT, DROP])
def test_what_comes_from_kafka_waits_while_its_queue_is_full_and_comes_in_order(when_full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        await until(broker, lambda: tail.failure != "")
        assert tail.failure == "ingress bascule.ingress waits: queue 'bounded' is full"
        queue, other = broker.engine.queue("bounded"), broker.engine.queue("other")
        broker.settle()
        await asyncio.sleep(0.05)
        assert (queue.held_messages, other.held_messages) == (2, 2)
        receiver = broker.attach(queue, 1)
        await until(broker, lambda: bool(receiver.messages))
        broker.engine.acknowledge(receiver.consumer, receiver.messages[0])
        await until(broker, lambda: other.held_messages == 3)
        assert queue.held_messages == 2
        broker.give(receiver, SENDS)

        def all_taken() -> bool:
            for message in receiver.messages:
                broker.engine.acknowledge(receiver.consumer, message)
            return len(receiver.messages) + other.held_messages == SENDS

        await until(broker, all_taken)
        assert [message.body for message in receiver.messages] == [message_bytes(offset) for offset in range(0, SENDS, 2)]
        assert [message.body for message in other.ready] == [message_bytes(offset) for offset in range(1, SENDS, 2)]
        await until(broker, lambda: tail.failure == "")

    bounded = ("bounded", {"max_messages": 2, "when_full": when_full})
    run(Policy(AddressSettings(), (bounded,)), check, monkeypatch)


def test_it_goes_on_within_a_record_that_must_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        await until(broker, lambda: tail.failure != "")
        engine, queue = broker.engine, broker.engine.queue("bounded")
        receiver = broker.attach(queue, 2)
        await until(broker, lambda: len(receiver.messages) == 2)
        transaction = engine.begin(b"1")
        for message in receiver.messages:
            engine.acknowledge_in(transaction, receiver.consumer, message)
        records, sender = len(broker.log.records), Sender()
        broker.send("third", message_bytes("sent"), sender, 1, transaction=transaction)
        engine.commit(transaction, lambda error: None)
        broker.flush()
        assert len(broker.in_flight) == 1  # the transaction's: nothing of the ingress is in it, nor was it cut in two
        assert engine.ingress_positions == {0: 4}
        await until(broker, lambda: engine.ingress_positions == {0: 8})
        assert len(broker.log.records) > records

    run(Policy(AddressSettings(), (("bounded", {"max_messages": 2}),)), check, monkeypatch)


def test_it_goes_on_when_the_full_queue_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        await until(broker, lambda: tail.failure != "")
        broker.engine.delete_queue(broker.engine.queue("bounded"))
        await until(broker, lambda: broker.engine.ingress_positions == {0: 8})

    run(Policy(AddressSettings(), (("bounded", {"max_messages": 2}),)), check, monkeypatch)
