"""Damaged and foreign records in the journal, and recreated topics: the broker names, refuses or reports them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bascule.client import Queue, connect
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.topics import UNBOUND_HEADER
from bascule.embedded.kafka import EmbeddedKafka
from bascule.journal.records import HEADER, MAGIC, VERSION, Kind, Op, Send, SendFlag, encode_record, json_entry
from bascule.kafka import clients
from bascule.kafka.history import TopicHistory
from bascule.pipelines.ingress import ingress_record
from tests.scenarios.changed_topics import ADMIN_TIMEOUT_S, ORDERS, Hand, hand, refused, send, system
from tests.support.journal import text_message
from tests.support.system import WAIT_S, System, wait_for

__all__ = ["hand", "system"]  # fixtures

#: Time of a transaction: longer than any machine needs to check it twice.
OPEN_MS = 600_000


@pytest.fixture
def tidying(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path, prefix=topic_prefix, config="[journal]\nsnapshot_records = 100\nretention_s = 0") as running:
        yield running


def ended_at_work(system: System) -> str:
    """Return the error of a broker that ends instead of answering a send."""
    with pytest.raises(BasculeError), connect(system.url, timeout_s=10.0) as context:
        context.send(ORDERS, "nobody may answer this")
    wait_for(lambda: not system.broker.running, "the broker to end")
    return system.broker.said()


def test_foreign_journal_record_is_skipped_logged_and_counted(system: System, hand: Hand) -> None:
    send(system, "one")
    offset = hand.put(b"somebody's own")
    send(system, "two")
    assert system.status()["gauges"]["journal_foreign_records"] == 1
    told = f"journal {system.prefix}.journal, offset {offset}: foreign record skipped"
    assert told in system.broker.said()
    system.broker.restart()
    assert told in system.broker.said()
    assert system.status()["gauges"]["journal_foreign_records"] == 1
    assert system.depth("orders") == 2


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["snapshots", "store"])
def test_foreign_record_in_snapshots_or_store_is_skipped_and_logged(system: System, hand: Hand, topic: str) -> None:
    send(system, "one")
    offset = hand.put(b"somebody's own", b"somebody's key", topic)
    system.broker.stop()
    system.broker.start()
    assert f"foreign record skipped topic={system.prefix}.{topic} offset={offset}" in system.broker.said()
    assert system.depth("orders") == 1


@pytest.mark.parametrize("at_work", [False, True], ids=["at the start", "at work"])
@pytest.mark.parametrize("what", ["damaged", "newer"])
def test_damaged_or_newer_journal_record_stops_the_broker_and_error_names_its_offset(
    system: System, hand: Hand, what: str, at_work: bool
) -> None:
    send(system, "one")
    if not at_work:
        system.broker.kill()
    record = bytearray(encode_record(Kind.STATE, 0, 1, json_entry(Op.SNAPSHOT, {"id": "none"})))
    if what == "damaged":
        record[HEADER.size + 8] ^= 1
    else:
        record[len(MAGIC)] = VERSION + 1
    offset = hand.put(bytes(record), b"S")
    said = ended_at_work(system) if at_work else refused(system)
    assert f"error: journal {system.prefix}.journal, offset {offset}: " in said
    reason = {"damaged": "checksum mismatch", "newer": f"journal format {VERSION + 1}; this version of Bascule reads up to {VERSION}"}
    assert reason[what] in said


@pytest.mark.parametrize(("at_work", "grown"), [(False, True), (True, False), (True, True)], ids=["at the start", "at work", "grown"])
def test_recreated_journal_stops_the_broker(system: System, hand: Hand, at_work: bool, grown: bool) -> None:
    for _ in range(3):
        send(system, "one")
    if not at_work:
        system.broker.kill()  # there is no snapshot
    hand.create_anew("journal")
    for _ in range(20 if grown else 0):  # beyond the end of the old topic
        hand.put(b"somebody's own")
    said = ended_at_work(system) if at_work else refused(system)
    assert f"error: journal {system.prefix}.journal was recreated" in said


@pytest.mark.slow
def test_open_transaction_that_blocks_the_ingress_is_reported_until_its_end(system: System, hand: Hand) -> None:
    topic = f"{system.prefix}.ingress"
    producer = clients.producer({**hand.kafka, "transactional.id": topic, "transaction.timeout.ms": OPEN_MS})
    producer.init_transactions(ADMIN_TIMEOUT_S)
    producer.begin_transaction()
    for text in ("one", "two"):
        send_of = Send(SendFlag.DURABLE, Routing.ANYCAST, 4, 0, 0, 0, "orders", (), (), (), None, text_message(text))
        producer.produce(topic, ingress_record(send_of), headers=[(UNBOUND_HEADER, b"keep")])
    assert producer.flush(ADMIN_TIMEOUT_S) == 0
    waits = f"ingress {topic}-0 waits: a transaction that begins at offset 0 has not ended"
    wait_for(lambda: system.status()["reason"] == waits, "the status to say so")
    producer.commit_transaction(ADMIN_TIMEOUT_S)
    wait_for(lambda: (system.depth("orders"), system.status()["reason"]) == (2, ""), "what waited")


@pytest.mark.parametrize(
    ("at_work", "grown"),
    [
        pytest.param(True, True, id="at work-grown"),
        pytest.param(True, False, id="at work-shorter", marks=pytest.mark.slow),
        pytest.param(False, True, id="at the start-grown", marks=pytest.mark.slow),
        pytest.param(False, False, id="at the start-shorter", marks=pytest.mark.slow),
    ],
)
def test_recreated_ingress_topic_is_read_only_after_the_operator_commands_a_restart(tidying: System, at_work: bool, grown: bool) -> None:
    system, hand = tidying, Hand(tidying.bootstrap, tidying.prefix)
    topic = f"{hand.prefix}.ingress"
    journal = TopicHistory(hand.kafka, f"{hand.prefix}.journal", 0)
    producer = clients.producer(hand.kafka)

    def bring(*texts: str) -> None:
        for text in texts:
            send_of = Send(SendFlag.DURABLE, Routing.ANYCAST, 4, 0, 0, 0, "orders", (), (), (), None, text_message(text))
            producer.produce(topic, ingress_record(send_of), headers=[(UNBOUND_HEADER, b"keep")])
        assert producer.flush(ADMIN_TIMEOUT_S) == 0

    def trimmed_behind(offset: int) -> bool:
        with connect(system.url) as context, context.consumer(Queue("other")) as consumer:
            for _ in range(60):
                context.send(Queue("other"), "JMS goes on")
                assert consumer.receive(WAIT_S) is not None
        return journal.earliest() > offset

    def status() -> str:
        return str(system.status()["reason"])

    bring("a", "b", "c")
    wait_for(lambda: system.depth("orders") == 3, "what came from Kafka")
    with pytest.raises(InvalidInput, match=f"topic {topic} was not recreated"):
        system.act("ingress/reset")
    if not at_work:
        system.broker.kill()  # there is no snapshot
    hand.create_anew("ingress")
    anew = ["A", "B", "C", "D"] if grown else ["A"]
    bring(*anew)
    if not at_work:
        system.broker.start()
    wait_for(lambda: "has stopped" in status(), "the intake to stop")
    for said in (status(), system.broker.said()):
        assert f"ingress {topic} has stopped: the topic was recreated" in said
    wait_for(lambda: trimmed_behind(0), "the journal to be trimmed")
    end = journal.latest()
    wait_for(lambda: trimmed_behind(end), "the journal to be trimmed once more")
    assert TopicHistory(hand.kafka, topic, 0).earliest() == 0
    system.broker.restart()  # from a snapshot
    wait_for(lambda: "has stopped" in status(), "the intake to stop")
    assert system.act("ingress/reset") == {"reset": topic}
    bring("E")
    wait_for(lambda: (system.depth("orders"), status()) == (4 + len(anew), ""), "all that the new topic has")
    system.broker.kill()
    system.broker.start()
    bring("F")
    wait_for(lambda: system.depth("orders") == 5 + len(anew), "the later messages")
    with connect(system.url) as context:
        consumer = context.consumer(ORDERS)
        found = [consumer.receive(WAIT_S) for _ in range(5 + len(anew))]
    assert [message and message.body for message in found] == ["a", "b", "c", *anew, "E", "F"]
