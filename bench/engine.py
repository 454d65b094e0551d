"""Cost of one persistent message in the broker engine alone: send, journal entry, confirmation, dispatch, acknowledgement.

.venv/bin/python -m bench.engine            # microseconds per message: to check it, and for the rest by messages in a turn
.venv/bin/python -m bench.engine --profile  # a profile
"""

from __future__ import annotations

import cProfile
import gc
import platform
import pstats
import sys
import time

from bascule.amqp.types import Byte, Int, Symbol, Timestamp
from bascule.broker.message import BrokerMessage
from bascule.core.build import build
from bascule.core.destination import Routing
from bascule.jms.sections import APPLICATION_PROPERTIES, MESSAGE_ANNOTATIONS, PROPERTIES, VALUE, header_bytes, scan, section_bytes
from bascule.testing.broker import BrokerInMemory, Receiver, Sender, message_bytes

MESSAGES = 20_000
BODY = b"x" * 1024
TURNS = (1, 4, 20, 100)  # messages that share a turn of the event loop, and therefore a record
REPEATS = 5


class Consumer(Receiver):
    """Accepts everything, and keeps it until it is acknowledged."""

    def __init__(self) -> None:
        super().__init__(credit=1 << 60)
        self.unacknowledged: list[BrokerMessage] = []

    def deliver(self, message: BrokerMessage, delivery_count: int) -> int:  # noqa: ARG002
        self.unacknowledged.append(message)
        return self.credit


def run(turn: int) -> float:
    """Return microseconds of processor time per message."""
    broker = BrokerInMemory()
    engine, queue, sender, consumer = broker.engine, broker.engine.queue("queue"), Sender(), Consumer()
    consumer.consumer = engine.attach(queue, consumer)
    broker.settle()
    bodies = [message_bytes(BODY, message_id=f"ID:3f1c-{number}:1:1-{number}") for number in range(MESSAGES)]
    facts = [scan(body) for body in bodies]
    gc.collect()
    gc.freeze()
    start_s = time.process_time()
    for first in range(0, MESSAGES, turn):
        for number in range(first, min(first + turn, MESSAGES)):
            engine.send("queue", Routing.ANYCAST, bodies[number], facts[number], "client", sender, number)
        engine.dispatch()
        engine.journaling.flush()
        while broker.in_flight:
            broker.confirm(len(broker.in_flight))
            for message in consumer.unacknowledged:
                engine.acknowledge(consumer.consumer, message)
            consumer.unacknowledged.clear()
    cost_s = time.process_time() - start_s
    gc.unfreeze()
    assert len(sender.answers) == MESSAGES
    assert not queue.ready.count
    return cost_s / MESSAGES * 1e6


def run_scan() -> float:
    """Return microseconds of processor time to check a message as Qpid JMS sends it, with three properties."""
    messages = [_message_of_qpid_jms(number) for number in range(MESSAGES)]
    start_s = time.process_time()
    for message in messages:
        scan(message)
    return (time.process_time() - start_s) / MESSAGES * 1e6


def _message_of_qpid_jms(number: int) -> bytes:
    properties = [f"ID:3f1c-{number}:1:1-{number}", None, "orders", *[None] * 6, Timestamp(1_764_000_000_000 + number)]
    return b"".join((
        header_bytes(durable=True),
        section_bytes(MESSAGE_ANNOTATIONS, {Symbol("x-opt-jms-msg-type"): Byte(5), Symbol("x-opt-jms-dest"): Byte(0)}),
        section_bytes(PROPERTIES, properties),
        section_bytes(APPLICATION_PROPERTIES, {"region": "eu", "amount": Int(number), "customer": f"c-{number}"}),
        section_bytes(VALUE, BODY.decode()),
    ))  # fmt: skip


def main() -> None:
    if "--profile" in sys.argv:
        profile = cProfile.Profile()
        profile.runcall(run, 20)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    print(f"{build()} build, Python {platform.python_version()}")
    print(f"        scan: {min(run_scan() for _ in range(REPEATS)):5.1f} us")
    for turn in TURNS:
        print(f"{turn:4} in a turn: {min(run(turn) for _ in range(REPEATS)):5.1f} us")


if __name__ == "__main__":
    main()
