"""Poisonous messages in the journal and in the ingress topic of a real broker: it starts, moves them, and serves in one epoch."""

from __future__ import annotations

from contextlib import closing
from operator import attrgetter

import pytest

from bascule.client import connect
from bascule.core.destination import ADDRESS_MAX
from bascule.core.topics import UNBOUND_HEADER
from bascule.jms.sections import PROPERTIES, section_bytes
from bascule.journal.records import Header, Kind, Op, Send, SendFlag, decode_header, encode_record, json_entry, send_entry
from bascule.kafka import clients
from bascule.kafka.log import PartitionReader
from tests.scenarios.changed_topics import ADMIN_TIMEOUT_S, ORDERS, Hand, hand, send, system
from tests.support.client import SOON_S
from tests.support.journal import text_message
from tests.support.poison import BODY, POISON
from tests.support.system import System, wait_for

__all__ = ["hand", "system"]  # fixtures

#: One message with it is below broker.max_message_bytes; two exceed a journal record.
HUGE_ID = "i" * (36 << 20)
QUEUE_ID = 900
RECORD_BYTES_MAX = 70 << 20


def queue_entry(name: str) -> bytes:
    content = {"id": QUEUE_ID, "name": name, "address": name, "routing": 0, "selector": "", "no_local": "", "subscription": ""}
    return json_entry(Op.QUEUE_CREATED, content)


def last_header(hand: Hand) -> Header:
    """Check the last record of a broker that was killed: what it had in flight is stored as well."""
    with closing(PartitionReader(hand.kafka, f"{hand.prefix}.journal", 0)) as reader:
        reader.seek()
        return max((decode_header(message.value() or b"") for message in reader.to_end()), key=attrgetter("epoch", "sequence"))


def errors(system: System) -> dict[str, float]:
    return {name: count for name, count in system.status()["counters"].items() if name.endswith("_errors") and count}


def received(system: System, count: int) -> list[object]:
    with connect(system.url) as context, context.consumer(ORDERS) as consumer:
        return [message.body for _ in range(count) if (message := consumer.receive(SOON_S)) is not None]


@pytest.mark.slow
def test_broker_starts_with_poisonous_stored_messages_and_moves_them(system: System, hand: Hand) -> None:
    send(system, "before")
    system.broker.kill()
    _, epoch, sequence = last_header(hand)
    bodies = [*POISON.values(), section_bytes(PROPERTIES, [HUGE_ID]) + BODY, section_bytes(PROPERTIES, [*[None] * 10, HUGE_ID]) + BODY]
    expired = Send(SendFlag.DURABLE | SendFlag.GROUPED, 0, 4, 1, 1, 0, "poison", (QUEUE_ID,), (), (), None, b"")
    producer = clients.producer({**hand.kafka, "message.max.bytes": RECORD_BYTES_MAX})
    for number, body in enumerate(bodies, 1):
        entries = (queue_entry("poison") if number == 1 else b"") + send_entry(expired._replace(body=body))
        producer.produce(f"{system.prefix}.journal", encode_record(Kind.DATA, epoch, sequence + number, entries), b"D", 0)
    assert producer.flush(ADMIN_TIMEOUT_S) == 0
    system.broker.start()
    system.wait_depth("ExpiryQueue", len(bodies))
    serving = system.status()["gauges"]["epoch"]
    send(system, "behind")
    assert system.act("queues/move", name="ExpiryQueue", to="elsewhere")["moved"] == len(bodies)
    system.broker.restart()
    assert system.depth("elsewhere") == len(bodies)
    assert (system.depth("orders"), errors(system)) == (2, {})
    assert system.ask("dead-letters", queue="elsewhere", count=len(bodies))
    assert received(system, 2) == ["before", "behind"]
    assert serving < system.status()["gauges"]["epoch"]  # of the restart only
    assert "error contained" not in system.broker.said()


def test_hostile_ingress_records_end_no_epoch_and_block_no_other_record(system: System, hand: Hand) -> None:
    send(system, "before")
    epoch = system.status()["gauges"]["epoch"]
    good = Send(SendFlag.GROUPED, 0, 4, 1, 0, 0, "orders", (), (), (), None, text_message("good"))
    hostile = [
        good._replace(routing=9), good._replace(address=""), good._replace(address="a" * (ADDRESS_MAX + 1)),
        *(good._replace(body=body, address="poison") for body in POISON.values()),
    ]  # fmt: skip
    producer = clients.producer({**hand.kafka, "message.max.bytes": RECORD_BYTES_MAX})
    for each in [good, *hostile, good]:
        producer.produce(
            f"{system.prefix}.ingress", encode_record(Kind.DATA, 0, 0, send_entry(each)), b"D", 0,
            headers=[(UNBOUND_HEADER, b"keep"), ("x", None), ("x", b"\xff")],
        )  # fmt: skip
    assert producer.flush(ADMIN_TIMEOUT_S) == 0
    wait_for(lambda: system.status()["gauges"]["ingress_foreign_records"] > 3, "hostile records to be passed over")
    assert received(system, 3) == ["before", "good", "good"]
    send(system, "behind")
    assert system.status()["gauges"]["epoch"] == epoch
    assert system.status()["reason"] == ""
    assert errors(system) == {}
