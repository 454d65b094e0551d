"""What breaks in the night: the metrics of the alert, the line of the log and the data of the console that the guide for it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bascule.client import Acknowledge, Queue, connect
from bascule.core.errors import BasculeError
from bascule.embedded.kafka import EmbeddedKafka
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid
from tests.scenarios.changed_topics import Hand
from tests.support.client import SOON_S
from tests.support.system import System, wait_for

#: Above a quarter of the memory, bodies go to spill files: some tens of half a MiB fill both.
MEMORY = '[broker]\nmemory_bytes = "8 MiB"\nspill_bytes = "8 MiB"\n'
LIMITED = '[[address]]\nmatch = "unlucky"\nmax_delivery_attempts = 2\n'
BODY = "x" * 500_000
#: The broker grants no credit within this time if producers are blocked.
BLOCKED_S = 2.0


@pytest.fixture(scope="module")
def night(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("night"), prefix="night", config=MEMORY + LIMITED) as running:
        yield running


def metric(system: System, name: str, **labels: str) -> float:
    """Return the sum of the series of a metric that have these labels."""
    samples = [each for family in text_string_to_metric_families(system.metrics()) for each in family.samples if each.name == name]
    assert samples, f"the broker exports no {name}"
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def test_message_that_its_consumer_fails_to_process_becomes_a_dead_letter(night: System) -> None:
    before = metric(night, "bascule_messages_dead_lettered_total")
    with connect(night.url, acknowledge=Acknowledge.TRANSACTED) as context:
        context.send(Queue("unlucky"), "fails")
        context.commit()
        consumer = context.consumer(Queue("unlucky"))
        for _ in range(2):
            assert consumer.receive(SOON_S) is not None
            context.rollback()
        wait_for(lambda: metric(night, "bascule_messages_dead_lettered_total") == before + 1, "the dead letter in the metrics")
    (letter,) = night.ask("dead-letters")
    assert (letter["queue"], letter["deliveries"]) == ("unlucky", 2)
    assert night.act("dead-letters/return")["returned"] == 1
    wait_for(lambda: night.depth("unlucky") == 1, "the returned message")


def test_queue_without_consumer_grows(night: System) -> None:
    with connect(night.url) as context:
        for number in range(3):
            context.send(Queue("forgotten"), str(number))
    assert metric(night, "bascule_queue_messages", queue="forgotten") == 3
    assert metric(night, "bascule_queue_consumers", queue="forgotten") == 0
    (row,) = night.ask("list/queues", search="forgotten")["entries"]
    assert (row["messages"], row["consumers"]) == (3, 0)


def test_full_memory_blocks_producers_until_a_consumer_makes_room(night: System) -> None:
    with connect(night.url) as context:
        producer = context.producer(Queue("full"), persistent=False)
        sent = 0
        while not metric(night, "bascule_producers_blocked"):
            with suppress(BasculeError):
                producer.send(BODY, timeout_s=BLOCKED_S)
                sent += 1
        assert "producers blocked" in night.broker.said()
        assert night.ask("overview")["memory"]["blocked"]
        with connect(night.url) as other, other.consumer(Queue("full")) as consumer:
            for _ in range(sent):
                assert consumer.receive(SOON_S) is not None
    wait_for(lambda: not metric(night, "bascule_producers_blocked"), "producers to continue")
    wait_for(lambda: "producers unblocked" in night.broker.said(), "the line in the log")


def test_branch_without_its_manager_waits_until_an_administrator_ends_it(night: System) -> None:
    xid = branch(new_gtrid("shop", 0), "jms")
    with closing(JmsResource("jms", night.url, timeout_s=SOON_S)) as resource:
        resource.start(xid, timeout_s=600).send(Queue("bills"), "bill")
        resource.end(xid, success=True)
        resource.prepare(xid)
    assert metric(night, "bascule_branches_prepared") == 1
    (row,) = night.ask("list/branches")["entries"]
    assert row["xid"] == str(xid)
    night.act("branches/rollback", xid=str(xid))
    assert metric(night, "bascule_branches_prepared") == 0


def test_record_of_another_program_in_a_topic_of_bascule_is_skipped(night: System) -> None:
    before = metric(night, "bascule_journal_foreign_records")
    offset = Hand(night.bootstrap, night.prefix).put(b"somebody's own")
    with connect(night.url) as context:
        context.send(Queue("bills"), "a record behind it")
    wait_for(lambda: metric(night, "bascule_journal_foreign_records") == before + 1, "the count of foreign records")
    assert f"offset {offset}: foreign record skipped" in night.broker.said()
