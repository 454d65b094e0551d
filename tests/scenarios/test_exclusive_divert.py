"""An exclusive divert is changed and removed under load: each message is in exactly one place, the queue or Kafka."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Message as KafkaMessage

from bascule.client import Message, Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bascule.jms.message import decode_message
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.log import PartitionReader
from tests.scenarios.topics import Reader, create
from tests.support.system import PYTHON_FAILOVER, System, wait_for

ORDERS = Queue("orders")
CONFIG = """
[pipelines]
master = "local[2]"
dead_letter_topic = "PREFIX.dead"

[[divert]]
name = "plain"
from = "plain"
to = "PREFIX.plain"
start = "earliest"

[[ingress]]
name = "back"
topics = ["PREFIX.in"]
to = "orders"
routing = "anycast"
unbound = "keep"
"""
EXCLUSIVE = """
[[divert]]
name = "taken"
from = "orders"
selector = "SELECTOR"
to = "PREFIX.taken"
exclusive = true
"""
SMALL, BIG = "size < 5", "size >= 5"
#: A message from Kafka with a size that matches the divert's selector; it is larger than Kafka's default limit.
LARGE = "x" * 3_000_000
#: Number of messages sent under each configuration, and in between.
SOME = 60
ARRIVAL_S = 240.0

pytestmark = pytest.mark.timeout(900)


class Sender:
    """Send one message after the other until the block ends. ``sent`` has the confirmed ones."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent: list[str] = []

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with connect(PYTHON_FAILOVER.format(self._system.url), timeout_s=ARRIVAL_S) as context:
            producer = context.producer(ORDERS)
            for number in itertools.count():
                if self._over.wait(0.01):
                    break
                producer.send(Message(str(number), properties={"size": number % 10}))
                self.sent.append(str(number))

    def some_more(self) -> None:
        before = len(self.sent)
        wait_for(lambda: len(self.sent) >= before + SOME, "answers")


@pytest.fixture
def system(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[System]:
    create(kafka.bootstrap, *(f"{topic_prefix}.{name}" for name in ("plain", "taken", "dead")))
    Topics({"bootstrap.servers": kafka.bootstrap}).create(f"{topic_prefix}.in", 1, {"max.message.bytes": str(8 << 20)})
    with System(kafka.bootstrap, tmp_path, prefix=topic_prefix, config=config(topic_prefix, SMALL)) as running:
        yield running


def config(prefix: str, selector: str) -> str:
    return (CONFIG + (EXCLUSIVE.replace("SELECTOR", selector) if selector else "")).replace("PREFIX", prefix)


def records(bootstrap: str, topic: str) -> list[KafkaMessage]:
    """Return all committed records of a topic."""
    reader = PartitionReader({"bootstrap.servers": bootstrap}, topic, 0, committed_only=True)
    found: list[KafkaMessage] = []
    try:
        low, _ = reader.range()
        reader.seek(low)
        while not reader.at_end:
            found += reader.read()
    finally:
        reader.close()
    return found


def queued(system: System) -> list[str]:
    """Return the messages in the queue."""
    with connect(system.url) as context:
        return [str(message.body) for message in context.browse(ORDERS)]


def change(system: System, sender: Sender, selector: str) -> int:
    """Restart the broker first, and the pipelines some time later. Return the number of the first message after each restart."""
    (system.broker.log_file.parent / "bascule.toml").write_text(config(system.prefix, selector))
    sender.some_more()
    system.broker.kill()
    changed = len(sender.sent)
    system.broker.start()
    sender.some_more()
    system.pipelines.restart()
    sender.some_more()
    return changed


@pytest.mark.slow
def test_change_and_removal_of_exclusive_divert_under_load_keep_each_message_in_one_place(system: System) -> None:
    from_kafka = clients.producer({"bootstrap.servers": system.bootstrap, "message.max.bytes": 8 << 20})
    from_kafka.produce(f"{system.prefix}.in", LARGE, headers={"jms.int.size": b"1"})
    assert from_kafka.flush(30) == 0
    with Sender(system) as sender:
        sender.some_more()
        system.pipelines.start()  # messages that the broker has assigned to the divert by now still belong to it
        wait_for(lambda: LARGE in queued(system), "the record from Kafka", ARRIVAL_S)
        wait_for(lambda: records(system.bootstrap, f"{system.prefix}.taken"), "the first message that the divert carries", ARRIVAL_S)
        changed = change(system, sender, BIG)
        removed = change(system, sender, "")
    # Messages that were taken and not carried when the divert was removed are dead letters; the end of the plain divert is behind them.
    with connect(system.url) as context:
        context.producer(Queue("plain")).send("the end")
    with closing(Reader(system.bootstrap, f"{system.prefix}.plain")) as plain:
        plain.read_until("the end")
    kept = queued(system)
    kept.remove(LARGE)
    taken, dead = (records(system.bootstrap, f"{system.prefix}.{name}") for name in ("taken", "dead"))
    carried = [(record.value() or b"").decode() for record in taken]
    diverted = [*carried, *(str(decode_message(record.value() or b"").body) for record in dead)]
    assert Counter([*kept, *diverted]) == Counter(sender.sent)

    def wanted(number: int) -> bool:
        return number % 10 < 5 if number < changed else number % 10 >= 5 and number < removed

    told = [number for number in range(len(sender.sent)) if number not in (changed, removed)]
    assert {number for number in told if str(number) in diverted} == set(filter(wanted, told))
    assert carried
