"""A bad network between client and broker, broker and Kafka, pipelines and Kafka: nothing is lost or duplicated."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from bascule.client import Context, Message, Queue, connect
from bascule.core.kafka_records import Output
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.jms.message import decode_message
from bascule.kafka.incarnation import COORDINATOR_TIMEOUT_S
from bascule.kafka.transactional import TransactionalWriter
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import PipelinesSpec
from bascule.writer.position import Position
from tests.scenarios.bridge import Bridge
from tests.scenarios.test_pipelines import sent as sent_in
from tests.scenarios.topics import Reader, create, produce
from tests.support.journal import text_message
from tests.support.kafka_proxy import KafkaProxy
from tests.support.link_faults import FAULTS, BadLink, Break, Fault
from tests.support.side_by_side import side_by_side
from tests.support.system import PYTHON_FAILOVER, System, wait_for

REQUEST_TIMEOUT_MS = 1500
SOON_S = 60.0
#: Duration of faults that break connections: longer than clients wait for an answer of Kafka.
BROKEN_S = 2.0
#: Longer than a writer waits for the outcome of its commit, so that another writer has to find it out.
LONG_S = COORDINATOR_TIMEOUT_S + 5.0
MESSAGES = 60
BATCH = 5
#: Records for the pipelines, in several batches: one of them is in progress when a fault begins.
MANY = 10 * MESSAGES
EACH_FAULT = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
#: Faults of links of their own, side by side. The slowest of the slow links is the one with jitter: the default suite has it between broker
#: and Kafka.
SIDE_BY_SIDE = pytest.mark.parametrize(
    "faults",
    [
        pytest.param([name for name in FAULTS if name != "jitter"], id="short"),
        pytest.param(["jitter"], id="jitter", marks=pytest.mark.slow),
    ],
)


@contextmanager
def link_to_kafka(kafka: EmbeddedKafka) -> Iterator[BadLink]:
    """Keep clients of Kafka that come over the link on the link."""
    with KafkaProxy(kafka.port) as proxy, BadLink(proxy.port) as link:
        proxy.advertise(link.port)
        yield link


class Bad:
    """A broker, and its link to Kafka."""

    def __init__(self, system: System, to_kafka: BadLink) -> None:
        self.system, self.to_kafka = system, to_kafka


@pytest.fixture(scope="module")
def bad(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bad]:
    env = {"BASCULE_KAFKA__CLIENT__SOCKET_TIMEOUT_MS": str(REQUEST_TIMEOUT_MS), "BASCULE_JOURNAL__APPEND_TIMEOUT_S": "5"}
    with ExitStack() as stack:
        to_kafka = stack.enter_context(link_to_kafka(kafka))
        system = stack.enter_context(System(to_kafka.bootstrap, tmp_path_factory.mktemp("links"), prefix="link-faults", env=env))
        yield Bad(system, to_kafka)


@contextmanager
def under(fault: Fault, link: BadLink, broken_s: float = BROKEN_S) -> Iterator[None]:
    """Run work during the fault: all of it on a slow link, else the part that falls into ``broken_s``."""
    met = link.met
    link.fault(fault)
    healer = threading.Thread(target=_heal_later, args=(link, met, broken_s))
    if fault.end is not Break.NONE:
        healer.start()
    try:
        yield
    finally:
        if fault.end is not Break.NONE:
            healer.join()
        link.heal()
    assert link.met > met


def _heal_later(link: BadLink, met: int, broken_s: float) -> None:
    wait_for(lambda: link.met > met, "a fault to be met")
    time.sleep(broken_s)
    link.heal()


def client(url: str) -> Context:
    return connect(PYTHON_FAILOVER.format(url), timeout_s=90.0)


def take(context: Context, queue: Queue, count: int) -> list[Message]:
    found = []
    with context.consumer(queue) as consumer:
        while len({message.body for message in found}) < count:
            message = consumer.receive(SOON_S)
            assert message is not None, f"{len(found)} of {count}"
            found.append(message)
    return found


@SIDE_BY_SIDE
def test_faulty_link_between_client_and_broker_loses_nothing_and_redeliveries_are_marked(bad: Bad, name: str, faults: list[str]) -> None:
    def run(fault: str) -> None:
        with BadLink(bad.system.port) as to_broker:
            send_and_take(bad, to_broker, f"{name}.{fault.replace(' ', '-')}", FAULTS[fault])

    side_by_side(run, faults)


def send_and_take(bad: Bad, to_broker: BadLink, name: str, fault: Fault) -> None:
    sent, taken = Queue(f"{name}.sent"), Queue(f"{name}.taken")
    bodies = [str(n) for n in range(MESSAGES)]
    with client(bad.system.url) as near, client(to_broker.url) as far:
        near.producer(taken).send_many(bodies)
        with under(fault, to_broker):
            producer = far.producer(sent)
            for body in bodies:
                producer.send(body)
            messages = take(far, taken, MESSAGES)
        assert [message.body for message in take(near, sent, MESSAGES)] == bodies
        again = [message for message, seen in _with_earlier(messages) if message.body in seen]
        assert all(message.redelivered for message in again)
        assert {message.body for message in messages} == set(bodies)
    for queue in (sent, taken):
        wait_for(lambda queue=queue: not bad.system.depth(queue.name) or drained(bad, queue, messages), "an empty queue")


def _with_earlier(messages: list[Message]) -> Iterator[tuple[Message, set[object]]]:
    seen: set[object] = set()
    for message in messages:
        yield message, set(seen)
        seen.add(message.body)


def drained(bad: Bad, queue: Queue, messages: list[Message]) -> bool:
    """A message that is left was consumed, and its acknowledgement was lost."""
    with client(bad.system.url) as context, context.consumer(queue) as consumer:
        while (message := consumer.receive_no_wait()) is not None:
            assert message.redelivered
            assert message.body in {each.body for each in messages}
    return True


@EACH_FAULT
def test_faulty_link_between_broker_and_kafka_loses_and_doubles_no_message(bad: Bad, name: str, fault: Fault) -> None:
    queue, bodies = Queue(name), [str(n) for n in range(MESSAGES)]
    with client(bad.system.url) as context:
        producer = context.producer(queue)
        with under(fault, bad.to_kafka):
            for start in range(0, MESSAGES, BATCH):
                producer.send_many(bodies[start : start + BATCH])
        messages = take(context, queue, MESSAGES)
        assert [message.body for message in messages] == bodies
    wait_for(lambda: not bad.system.depth(name), "the acknowledgements")


@SIDE_BY_SIDE
def test_writer_with_faulty_link_to_kafka_writes_each_record_once(kafka: EmbeddedKafka, topic_prefix: str, faults: list[str]) -> None:
    pipelines = PipelinesSpec(topic_prefix, {"bootstrap.servers": kafka.bootstrap}, topics=JournalTopics("link-faults-out"))
    Positions(pipelines, "").prepare_topics()

    def run(fault: str) -> None:
        write_in_batches(kafka, pipelines.topics.positions, f"{topic_prefix}-{fault.replace(' ', '-')}", FAULTS[fault])

    side_by_side(run, faults)


def write_in_batches(kafka: EmbeddedKafka, positions: str, prefix: str, fault: Fault) -> None:
    topic = f"{prefix}.out"
    create(kafka.bootstrap, topic)
    batches = [[f"{batch}-{n}" for n in range(10)] for batch in range(4)]
    with link_to_kafka(kafka) as link:
        settings = {"bootstrap.servers": link.bootstrap, "socket.timeout.ms": REQUEST_TIMEOUT_MS, "log_level": 0}
        with closing(TransactionalWriter(settings, prefix, positions, prefix)) as writer:
            position: Position | None = None
            with under(fault, link):
                for number, values in enumerate(batches):
                    after = Position("journal", "id", 0, number)
                    writer.write([Output(topic, None, value.encode(), []) for value in values], position, after)
                    position = after
            assert writer.current() == position
            writer.write([Output(topic, None, b"end", [])], position, Position("journal", "id", 0, len(batches)))
    with closing(Reader(kafka.bootstrap, topic)) as reader:
        values = reader.read_until("end")
    assert Counter(values) == Counter([*(value for batch in batches for value in batch), "end"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pipelines_write_each_record_once_under_successive_link_faults(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    with link_to_kafka(kafka) as link:
        bridge = Bridge(kafka, topic_prefix, tmp_path, servers=link.bootstrap)
        create(kafka.bootstrap, f"{topic_prefix}-in")
        bridge.configure(
            f"transaction_records = {MESSAGES}\n"
            f'[[divert]]\nname = "out"\nfrom = "orders"\nto = "{topic_prefix}.out"\nstart = "earliest"\n'
            f'[[ingress]]\nname = "in"\ntopics = ["{topic_prefix}-in"]\nto = "in"\n'
        )
        bridge.journal.start_epoch()
        written, taken = (bridge.reader(f"{topic_prefix}.{name}") for name in ("out", "ingress"))
        sent = 0

        def put(count: int) -> None:
            nonlocal sent
            for _ in range(count):
                bridge.journal.send(text_message(str(sent)), address="orders")
                sent += 1
            bridge.journal.flush()
            produce(kafka.bootstrap, f"{topic_prefix}-in", map(str, range(sent - count, sent)))

        def arrived(count: int) -> None:
            for reader in (written, taken):
                reader.wait_for(count)

        bridge.start()
        try:
            for fault, broken_s in [*((fault, BROKEN_S) for fault in FAULTS.values()), (FAULTS["black hole"], LONG_S)]:
                put(MANY)
                arrived(sent - MANY + 1)  # the other batches are in progress
                with under(fault, link, broken_s):
                    arrived(sent)
            put(1)  # a duplicate would come before this record
            arrived(sent)
        finally:
            bridge.child.stop(SOON_S)
        expected = list(range(sent))
        assert [int(value) for value in written.values()] == expected
        assert [int(str(decode_message(sent_in(message).body).body)) for message in taken.seen] == expected
        for reader in (written, taken):
            reader.close()
