"""Diverts and ingresses with a real Kafka, a real Spark and a journal that the test writes; drivers and workers are killed with kill -9."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from confluent_kafka import Message

from bascule.core.destination import Routing
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import Child
from bascule.jms.message import decode_message
from bascule.jms.sections import DATA, PROPERTIES, section_bytes
from bascule.journal.records import Kind, Op, Send, SendFlag, decode_send, entries, send_entry
from bascule.kafka import clients
from bascule.pipelines.audit import audit_diverts
from bascule.pipelines.batches import BAD_AT_ONCE
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from tests.scenarios.bridge import START_TIMEOUT_S, Bridge, await_end, eventually, quick_start
from tests.support.journal import text_message
from tests.support.speed import SLOWNESS
from tests.support.system import descendants

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_job.py"

#: Half of them end the driver, the others daemons and workers.
KILLS = 4

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[Bridge]:
    bridge = Bridge(kafka, topic_prefix, tmp_path)
    yield bridge
    bridge.child.stop(60)


@pytest.mark.slow
def test_messages_arrive_exactly_once_when_driver_and_workers_are_killed(bridge: Bridge) -> None:
    """Kill the driver in half of the cases, and a worker in the other half."""
    bridge.configure(
        """
[[divert]]
name = "all"
from = "flights"
to = "${address}.all"
start = "earliest"
[[divert]]
name = "late"
from = "flights"
selector = "delay > 5"
to = "${address}.late"
key = "property:carrier"
start = "earliest"
""".replace("${address}", f"{bridge.prefix}.${{address}}")
    )
    journal = bridge.journal
    journal.start_epoch()
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for _ in range(count):
            batch = [text_message(str(sent + i), properties={"delay": (sent + i) % 10, "carrier": "AA"}) for i in range(1 + sent % 3)]
            journal.send(*batch)
            sent += len(batch)
            journal.acknowledge()
        journal.flush()

    send(2000)
    bridge.start()
    everything, late = bridge.reader(f"{bridge.prefix}.flights.all"), bridge.reader(f"{bridge.prefix}.flights.late")
    for round_number in range(KILLS):
        send(500)
        everything.wait_for(sent - 400)
        if round_number % 2:
            workers = bridge.workers()
            assert workers
            for pid in (*bridge.daemons(), *workers):
                with suppress(ProcessLookupError):  # ended with its daemon
                    os.kill(pid, signal.SIGKILL)
        else:
            bridge.child.kill()
            assert bridge.child.returncode == -signal.SIGKILL
            bridge.start()
    send(100)
    assert [int(value) for value in everything.wait_for(sent)] == list(range(sent))
    expected_late = [n for n in range(sent) if n % 10 > 5]
    assert [int(value) for value in late.wait_for(len(expected_late))] == expected_late
    everything.poll()
    assert len(everything.seen) == sent
    everything.close()
    late.close()


def test_diverts_carry_exactly_the_records_that_count_in_the_journal(bridge: Bridge) -> None:
    """Repeats, zombies, foreign records, exclusive marks, messages from Kafka, dead letters, a divert that starts in the past and joins."""
    head = f'dead_letter_topic = "{bridge.prefix}.dead"\n'
    taken = f"""
[[divert]]
name = "taken"
from = "#"
selector = "colour = 'red'"
to = "{bridge.prefix}.taken"
exclusive = true
start = "earliest"
[[divert]]
name = "plain"
from = "orders.*"
to = "{bridge.prefix}.plain"
start = "latest"
"""
    past = f"""
[[divert]]
name = "past"
from = "orders.#"
selector = "n >= 0"
to = "{bridge.prefix}.past"
key = "property:n"
start = "earliest"
[[divert]]
name = "small"
from = "orders.*"
to = "{bridge.prefix}.small"
start = "earliest"
"""
    journal = bridge.journal

    def message(text: str, colour: str = "blue", size: int = 0) -> bytes:
        return text_message(text + "x" * size, properties={"colour": colour, "n": int(text)}, message_id=f"ID:{text}")

    old = journal.start_epoch()
    journal.send(message("0"), address="orders.eu")
    journal.send(message("1", "red"), message("2"), address="orders.eu")
    repeated = journal.sequence
    bridge.journal.flush()
    bridge.configure(head + taken)
    bridge.start()

    new = journal.start_epoch(exclusive=["taken"])
    # A record of a replaced broker, and a repetition of a valid record.
    zombie = send_of(message("666", "red"), "orders.eu")
    journal.put(Kind.DATA, zombie, epoch=old, sequence=repeated + 1)
    foreign = journal.put(Kind.DATA, zombie, epoch=new, sequence=repeated) + 1
    producer = clients.producer({"bootstrap.servers": bridge.servers})
    producer.produce(f"{bridge.prefix}.journal", b"somebody's own", b"D", 0)
    assert producer.flush(30) == 0
    journal.send(message("3"), address="orders.eu", diverts=["taken"])  # the broker took the message, whatever the selector says
    journal.send(message("4", "red"), address="orders.eu")  # the broker did not take the message
    journal.send(message("5", "red"), address="orders.eu", flags=SendFlag.DURABLE | SendFlag.FROM_KAFKA)
    journal.send(message("6"), address="orders.eu", flags=SendFlag.PIPELINES_ONLY)
    journal.send(message("7"), address="no/topic")
    journal.send(b"\x00garbage", address="orders.eu")
    journal.send(message("8"), address="orders.eu")
    journal.flush()
    target, plain, dead = (bridge.reader(f"{bridge.prefix}.{name}") for name in ("taken", "plain", "dead"))
    assert plain.wait_for(4) == ["3", "4", "6", "8"]
    assert target.wait_for(2) == ["1", "3"]
    dead.wait_for(1)
    headers = dict(dead.seen[0].headers() or [])
    assert headers["__connect.errors.connector.name"] == b"plain"
    assert dead.seen[0].value() == b"\x00garbage"
    # Spark forwards what its workers log.
    skipped = f"foreign record skipped topic={bridge.prefix}.journal offset={foreign}"
    eventually(lambda: skipped in bridge.said(), "the worker's log")
    first = dict(plain.seen[0].headers() or [])
    assert first["bascule.origin"] == bridge.prefix.encode()
    assert first["bascule.id"] == f"{new}-{repeated + 1}-0".encode()
    assert first["jms.long.n"] == b"3"
    bridge.child.stop(60)

    # Two more diverts start in the past and join; one message is too large for its target.
    bridge.topics.create(f"{bridge.prefix}.small", 1, {"max.message.bytes": "2000"})
    bridge.configure(head + taken + past)
    bridge.start()
    journal.send(message("9", size=5000), message("10"), address="orders.eu")
    journal.flush()
    past_reader, small = bridge.reader(f"{bridge.prefix}.past"), bridge.reader(f"{bridge.prefix}.small")
    got = past_reader.wait_for(9)
    assert [text.rstrip("x") for text in got] == ["0", "1", "2", "3", "4", "6", "8", "9", "10"][: len(got)]
    assert small.wait_for(8)[-1] == "10"
    eventually(lambda: bridge.said().count("divert joined") >= 2, "both diverts join")
    journal.send(message("11"), address="orders.eu")
    journal.flush()
    assert [text.rstrip("x") for text in past_reader.wait_for(10)] == ["0", "1", "2", "3", "4", "6", "8", "9", "10", "11"]
    assert small.wait_for(9) == ["0", "1", "2", "3", "4", "6", "8", "10", "11"]
    assert plain.wait_for(7)[4:] == ["9" + "x" * 5000, "10", "11"]
    eventually(lambda: dead.poll() or any(b"9xxx" in (message.value() or b"") for message in dead.seen), "the large one is dead-lettered")
    for reader in (target, plain, dead, past_reader, small):
        reader.close()


def send_of(body: bytes, address: str) -> bytes:
    return send_entry(Send(SendFlag.DURABLE, Routing.ANYCAST, 4, 1, 0, 0, address, (), (), (), None, body))


#: Messages on which a transformation fails, among and behind the valid ones. Each search halves the messages repeatedly, and each half is a
#: job of Spark, so there are few messages.
UNLUCKY, VALID_BEFORE = 5, 16


# Beside the one among the valid messages. Each message that is searched for costs Spark a worker; the slow suite has more than are searched
# at once. With the second master, Spark has no slots for waiting tasks, and all diverts are carried in micro-batches.
@pytest.mark.parametrize(
    ("bad", "master"),
    [
        (1, "local[2]"),
        pytest.param(1, "local[2,1]", marks=pytest.mark.slow),
        pytest.param(BAD_AT_ONCE + 1, "local[2]", marks=pytest.mark.slow),
        pytest.param(BAD_AT_ONCE + 1, "local[2,1]", marks=pytest.mark.slow),
    ],
)
def test_transformations_are_applied_and_messages_they_fail_on_are_dead_lettered(bridge: Bridge, bad: int, master: str) -> None:
    prefix = bridge.prefix
    (bridge.directory / "changes.py").write_text(f"""
from pyspark.sql import functions as F

@F.udf
def checked(text):
    if text == "{UNLUCKY}" or int(text) >= {VALID_BEFORE}:
        raise RuntimeError("unlucky")
    return text + "!"

def words(messages):
    return messages.withColumn("value", checked("text")).withColumn("word", F.explode(F.array(F.lit(1), F.lit(2))))
""")
    bridge.configure(
        f"""
dead_letter_topic = "{prefix}.dead"
[[divert]]
name = "plain"
from = "flights"
to = "{prefix}.plain"
start = "earliest"
[[divert]]
name = "upper"
from = "flights"
selector = "n < 10"
to = "{prefix}.upper"
select = ["concat(upper(text), '-', properties['n']) as value", "'k' as key", "map('more', address) as headers"]
start = "earliest"
[[divert]]
name = "twice"
from = "flights"
to = "{prefix}.twice"
python = "changes:words"
start = "earliest"
""",
        master,
    )
    journal = bridge.journal
    journal.start_epoch()
    # Messages of several senders in one record.
    sent = VALID_BEFORE + bad
    for first in range(0, sent, 3):
        journal.send(*(text_message(str(number), properties={"n": number}) for number in range(first, min(first + 3, sent))))
    journal.flush()
    bridge.start()
    plain, upper, twice, dead = (bridge.reader(f"{prefix}.{name}") for name in ("plain", "upper", "twice", "dead"))
    assert upper.wait_for(10) == [f"{n}-{n}" for n in range(10)]
    assert twice.wait_for(2 * VALID_BEFORE - 2) == [f"{n}!" for n in range(VALID_BEFORE) if n != UNLUCKY for _ in range(2)]
    assert plain.wait_for(sent) == [str(n) for n in range(sent)]
    dead.wait_for(1 + bad)
    failed = [str(UNLUCKY), *map(str, range(VALID_BEFORE, sent))]
    assert [decode_message(message.value() or b"").body for message in dead.seen] == failed  # type: ignore[arg-type]
    assert b"unlucky" in dict(dead.seen[0].headers() or [])["__connect.errors.exception.message"]
    assert upper.seen[0].key() == b"k"
    headers = dict(upper.seen[0].headers() or [])
    assert (headers["more"], headers["jms.long.n"]) == (b"flights", b"0")
    bridge.child.stop(60)

    pipelines = PipelinesSpec(
        prefix, {"bootstrap.servers": bridge.servers}, topics=JournalTopics(prefix, f"{prefix}.dead"),
        diverts=(
            DivertSpec("plain", "flights", f"{prefix}.plain"),
            DivertSpec("twice", "flights", f"{prefix}.twice", function="changes:words"),
        ),
    )  # fmt: skip
    for result in audit_diverts(pipelines):
        assert result.exact, result
        assert (result.expected, result.dead_lettered) == (sent, 1 + bad if result.divert == "twice" else 0)
    producer = clients.producer({"bootstrap.servers": bridge.servers})
    copied = plain.seen[7]
    producer.produce(f"{prefix}.plain", copied.value(), copied.key(), headers=copied.headers())
    producer.flush()
    (result,) = audit_diverts(pipelines, names=["plain"])
    assert not result.exact
    assert (result.duplicated, result.lost, result.first_difference.endswith("duplicated")) == (1, 0, True)
    for reader in (plain, upper, twice, dead):
        reader.close()


def test_ingress_carries_each_kafka_record_once_and_skips_records_of_its_own_bridge(bridge: Bridge) -> None:
    first, second = f"{bridge.prefix}-in.a", f"{bridge.prefix}-in.b"
    bridge.topics.create(first, 2, {})
    bridge.configure(f"""
dead_letter_topic = "{bridge.prefix}.dead"
[[ingress]]
name = "in"
pattern = "{bridge.prefix}-in\\\\..*"
to = "from.${{topic}}"
routing = "anycast"
body = "map"
unbound = "keep"
""")
    producer = clients.producer({"bootstrap.servers": bridge.servers})

    def put(topic: str, partition: int, number: int, value: bytes | None = None, headers: list[tuple[str, bytes]] | None = None) -> None:
        body = value if value is not None else b'{"n": %d}' % number
        producer.produce(topic, body, f"k{number}", partition, headers=headers or [("jms.int.size", b"7"), ("plain", b"p")])

    for number in range(200):
        put(first, number % 2, number)
    put(first, 0, 900, headers=[("bascule.origin", bridge.prefix.encode())])
    put(first, 0, 901, value=b"no json")
    producer.flush()
    bridge.start()
    reader = bridge.reader(f"{bridge.prefix}.ingress")
    reader.wait_for(200)
    bridge.topics.create(second, 1, {})
    for number in range(200, 300):
        put(second, 0, number)
    producer.flush()
    reader.wait_for(210)
    bridge.child.kill()
    for number in range(300, 400):
        put(first, number % 2, number)
    producer.flush()
    bridge.start()
    reader.wait_for(400)
    dead = bridge.reader(f"{bridge.prefix}.dead")
    assert dead.wait_for(1) == ["no json"]
    bridge.child.stop(60)
    reader.poll()
    sends = [sent(message) for message in reader.seen]
    numbers = [decode_message(send.body).body["n"] for send in sends]
    assert Counter(numbers) == Counter(range(400))
    assert numbers.index(300) < numbers.index(302) < numbers.index(398)
    one = sends[numbers.index(3)]
    assert one.address == f"from.{first}"
    assert one.flags & SendFlag.FROM_KAFKA
    assert one.source is not None
    assert (one.source.topic, one.source.partition) == (first, 1)
    message = decode_message(one.body)
    assert message.destination_kind == "queue"
    assert {name: message.properties[name] for name in ("kafka_topic", "kafka_partition", "kafka_key", "size", "plain")} == {
        "kafka_topic": first, "kafka_partition": 1, "kafka_key": "k3", "size": 7, "plain": "p"}  # fmt: skip
    assert reader.seen[0].headers() == [("unbound", b"keep")]
    reader.close()
    dead.close()


def sent(message: Message) -> Send:
    value = message.value()
    assert isinstance(value, bytes)
    ((op, start, end),) = entries(value)
    assert op == Op.SEND
    return decode_send(value, start, end)


class UsersJob:
    """Run the job of the guide on a journal that the test writes."""

    def __init__(self, bridge: Bridge) -> None:
        self._journal = bridge.journal
        self._journal.start_epoch()
        topic = f"{bridge.prefix}.ingress"
        bridge.topics.create(topic, 1, {"retention.ms": "-1", "retention.bytes": "-1", "max.message.bytes": str(70 << 20)})
        self.child = Child(
            [sys.executable, EXAMPLE, bridge.servers, bridge.directory / "checkpoint"],
            log_file=bridge.directory / "job.log",
            env={"BASCULE_JOURNAL__PREFIX": bridge.prefix, "BASCULE_BRIDGE__ID": bridge.prefix, **quick_start()},
            name="job",
        )
        self.reader = bridge.reader(topic)

    def send(self, start: int, end: int) -> None:
        for number in range(start, end):
            properties = {"carrier": "AA", "dep_delay": 30 + 60 * (number % 2)}
            body = text_message("{}", message_id=f"ID:{number}", properties=properties)
            self._journal.send(body, address="flights" if number % 3 else "else")
        self._journal.flush()

    def expected(self, end: int) -> list[int]:
        """Return the messages before ``end`` that the job answers."""
        return [number for number in range(end) if number % 2 and number % 3]

    def check(self, end: int) -> None:
        """Check that each of them is answered once, in order, as the job does."""
        self.reader.poll()
        sends = [sent(message) for message in self.reader.seen]
        assert [int((decode_message(send.body).message_id or "").removeprefix("ID:")) for send in sends] == self.expected(end)
        message = decode_message(sends[0].body)
        assert (message.body, message.destination, message.destination_kind) == ("AA is late by 90", "late", "queue")
        assert message.properties == {"carrier": "AA", "dep_delay": "90"}


@contextmanager
def users_job(bridge: Bridge) -> Iterator[UsersJob]:
    """Stop the job at the end of the block, and Spark with it."""
    job = UsersJob(bridge)
    spark: list[int] = []
    try:
        yield job
        spark += descendants(job.child.pid or 0)
    finally:
        job.child.stop(60)
    await_end(spark)


def test_user_spark_job_reads_and_writes_jms(bridge: Bridge) -> None:
    """Run the job of the guide without a disturbance."""
    with users_job(bridge) as job:
        job.send(0, 300)
        job.child.start()
        job.reader.wait_for(len(job.expected(300)))
    job.check(300)
    job.reader.close()


@pytest.mark.slow
def test_user_spark_job_writes_exactly_once_after_kill_and_refuses_a_lost_checkpoint(bridge: Bridge) -> None:
    with users_job(bridge) as job:
        # No JMS message: it has a row without properties, which the job ignores.
        bridge.journal.send(section_bytes(PROPERTIES, [*[None] * 6, "text/plain"]) + section_bytes(DATA, b"\xff"), address="flights")
        job.send(0, 300)
        job.child.start()
        job.reader.wait_for(len(job.expected(300)))
        job.send(300, 600)
        job.reader.wait_for(len(job.expected(300)) + 1)
        job.child.kill()
        job.send(600, 900)
        job.child.start()
        job.reader.wait_for(len(job.expected(900)))
    job.check(900)

    # Without its checkpoint the job would start again, and write everything twice.
    shutil.rmtree(bridge.directory / "checkpoint")
    job.child.start()
    assert job.child.wait(START_TIMEOUT_S * SLOWNESS)
    assert "PositionLost: writer 'late' belongs to query" in (bridge.directory / "job.log").read_text()
    seen = len(job.reader.seen)
    job.reader.poll()
    assert len(job.reader.seen) == seen
    job.reader.close()
