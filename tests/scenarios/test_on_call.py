"""Failures of the on-call guide: the alert that the guide names fires, the log has the line, and the console shows the text.

``tests/tidy/test_on_call.py`` checks that the tests of a section assert what its table says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bascule.client import Acknowledge, Queue, Topic, connect
from bascule.core.errors import BasculeError
from bascule.core.xid import Xid
from bascule.embedded.kafka import EmbeddedKafka
from bascule.xa import FileLog, TransactionManager
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid
from tests.scenarios.changed_topics import Hand
from tests.scenarios.test_early_takeover import SESSION_S, watches
from tests.scenarios.test_takeover import Pair
from tests.support.alerts import Watch
from tests.support.certificates import Certificate
from tests.support.client import SOON_S
from tests.support.console import Console
from tests.support.proxy import Proxy
from tests.support.signer import DAY, Signer
from tests.support.system import System, wait_for

#: Above a quarter of the memory, bodies go to spill files: some tens of half a MiB fill both.
MEMORY = '[broker]\nmemory_bytes = "8 MiB"\nspill_bytes = "8 MiB"\n'
LIMITED = '[[address]]\nmatch = "unlucky"\nmax_delivery_attempts = 2\n'
BODY = "x" * 500_000
#: More messages than a queue without a consumer may have before the alert fires.
MANY = 1_001
#: The broker grants no credit within this time if producers are blocked.
BLOCKED_S = 2.0


@pytest.fixture(scope="module")
def night(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("night"), prefix="night", config=MEMORY + LIMITED) as running:
        yield running


@pytest.fixture
def console(night: System) -> Console:
    return Console.of(night)


def fires(system: System, *alerts: str) -> None:
    """Assert that the conditions of alerts hold."""
    watch = Watch()
    watch.read(broker=system.metrics())
    assert all(map(watch.fires, alerts)), alerts


def metric(system: System, name: str, **labels: str) -> float:
    """Return the sum of the series of a metric that have these labels."""
    samples = [each for family in text_string_to_metric_families(system.metrics()) for each in family.samples if each.name == name]
    assert samples, f"the broker exports no {name}"
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def test_message_that_its_consumer_fails_to_process_becomes_a_dead_letter(night: System, console: Console) -> None:
    before, watch = metric(night, "bascule_messages_dead_lettered_total"), Watch()
    watch.read(broker=night.metrics())
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
    watch.read(broker=night.metrics())
    assert watch.fires("BasculeDeadLetters")
    console.shows("Dead letters", "delivery-attempts unlucky 1 2")
    assert night.act("dead-letters/return")["returned"] == 1
    wait_for(lambda: night.depth("unlucky") == 1, "the returned message")


def test_queue_without_consumer_grows(night: System, console: Console) -> None:
    with connect(night.url) as context:
        context.shared_durable_consumer(Topic("prices"), "old-desk").close()
        producer = context.producer(Queue("forgotten"), persistent=False)
        for number in range(MANY):
            producer.send(str(number))
    assert metric(night, "bascule_queue_messages", queue="forgotten") == MANY
    assert metric(night, "bascule_queue_consumers", queue="forgotten") == 0
    fires(night, "BasculeQueueWithoutConsumer")
    (row,) = night.ask("list/queues", search="forgotten")["entries"]
    assert (row["messages"], row["consumers"]) == (MANY, 0)
    console.shows("Queues", "Waiting", "forgotten forgotten anycast 1,001 0 0")
    console.shows("Subscriptions", "old-desk", "Unused since")


def test_full_memory_blocks_producers_until_a_consumer_makes_room(night: System, console: Console) -> None:
    with connect(night.url) as context:
        producer = context.producer(Queue("full"), persistent=False)
        sent = 0
        while not metric(night, "bascule_producers_blocked"):
            with suppress(BasculeError):
                producer.send(BODY, timeout_s=BLOCKED_S)
                sent += 1
        assert "producers blocked" in night.broker.said()
        assert night.ask("overview")["memory"]["blocked"]
        fires(night, "BasculeProducersBlocked")
        console.shows("Overview", "producers wait:")
        with connect(night.url) as other, other.consumer(Queue("full")) as consumer:
            for _ in range(sent):
                assert consumer.receive(SOON_S) is not None
    wait_for(lambda: not metric(night, "bascule_producers_blocked"), "producers to continue")
    wait_for(lambda: "producers unblocked" in night.broker.said(), "the line in the log")


def test_branch_without_its_manager_waits_until_an_administrator_ends_it(night: System, console: Console) -> None:
    xid = branch(new_gtrid("shop", 0), "jms")
    with closing(JmsResource("jms", night.url, timeout_s=SOON_S)) as resource:
        resource.start(xid, timeout_s=600).send(Queue("bills"), "bill")
        resource.end(xid, success=True)
        resource.prepare(xid)
    assert metric(night, "bascule_branches_prepared") == 1
    (row,) = night.ask("list/branches")["entries"]
    assert row["xid"] == str(xid)
    fires(night, "BasculeBranchesInDoubt")
    console.shows("Transactions", str(xid), "1 messages become visible, 0 received messages are removed", "1 messages are discarded")
    night.act("branches/rollback", xid=str(xid))
    assert metric(night, "bascule_branches_prepared") == 0


class Stranded(JmsResource):
    """A broker that its transaction manager can no longer reach once a branch is prepared."""

    relay: Proxy

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        self.relay.__exit__()
        super().commit(xid, one_phase=one_phase)


def test_manager_that_cannot_send_the_outcome_logs_it_and_ends_the_branch_later(
    night: System, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = FileLog(tmp_path / "decisions")
    with Proxy(night.port) as relay, closing(Stranded("jms", relay.url, timeout_s=SOON_S)) as stranded:
        stranded.relay = relay
        other = JmsResource("other", night.url, timeout_s=SOON_S)
        manager = TransactionManager("shop", log, [stranded, other])
        with closing(other), suppress(BasculeError), manager, manager.begin() as transaction:
            transaction.enlist(stranded).send(Queue("bills"), "bill")
            transaction.enlist(other).send(Queue("bills"), "copy")
    assert "could not send outcome to branch" in caplog.text
    fires(night, "BasculeBranchesInDoubt")
    with closing(JmsResource("jms", night.url, timeout_s=SOON_S)) as again, closing(JmsResource("other", night.url)) as other:
        TransactionManager("shop", log, [again, other]).recoverer().run()
    assert metric(night, "bascule_branches_prepared") == 0


def test_record_of_another_program_in_a_topic_of_bascule_is_skipped(night: System, console: Console) -> None:
    before = metric(night, "bascule_journal_foreign_records")
    offset = Hand(night.bootstrap, night.prefix).put(b"somebody's own")
    with connect(night.url) as context:
        context.send(Queue("bills"), "a record behind it")
    wait_for(lambda: metric(night, "bascule_journal_foreign_records") == before + 1, "the count of foreign records")
    assert f"offset {offset}: foreign record skipped" in night.broker.said()
    fires(night, "BasculeForeignRecords")
    console.shows("Broker", f"Foreign records {before + 1:.0f}")


def test_killed_broker_is_missing_until_it_stands_by_again(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = Pair(kafka, tmp_path, topic_prefix, stack, f"[broker]\nsession_timeout_s = {SESSION_S}\n")
        killed = pair.serving()
        standby, watch = pair.other(killed), Watch()
        wait_for(partial(watches, standby), "the standby to watch the elected broker")
        watch.read(one=killed.metrics(), two=standby.metrics())
        assert not watch.fires("BasculeBrokerDown") + watch.fires("BasculeNoStandby")
        killed.broker.kill()
        wait_for(standby.serves, "the standby to take over", SESSION_S / 2)
        watch.read(one=None, two=standby.metrics())
        assert [each["instance"] for each in watch.fires("BasculeBrokerDown")] == ["one"]
        assert watch.fires("BasculeNoStandby")
        assert "replacing the elected broker" in standby.broker.said()
        Console.of(standby).shows("Broker", "active this page", "Role active")
        killed.broker.launch()
        wait_for(killed.stands_by, "the killed broker to stand by")
        watch.read(one=killed.metrics(), two=standby.metrics())
        assert not watch.fires("BasculeBrokerDown") + watch.fires("BasculeNoStandby")
        Console.of(standby).shows("Broker", "standby")


def test_end_of_a_certificate_is_announced_and_files_that_do_not_fit_are_not_loaded(
    kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path
) -> None:
    signer = Signer(tmp_path, "authority", lasts=100 * DAY)
    own, expired = signer.issue("soon", lasts=6 * DAY), signer.issue("gone", begins=-9 * DAY, lasts=-DAY)
    renewed = signer.issue("renewed", lasts=90 * DAY)
    config = f'[broker.tls]\ncertificate = "{own.certificate}"\nkey = "{own.key}"\n'
    with System(kafka.bootstrap, tmp_path / "broker", prefix=topic_prefix, config=config) as system:

        def said(text: str) -> None:
            wait_for(lambda: text in system.broker.said(), f"the line {text!r}")

        def put(made: Certificate) -> None:
            own.certificate.write_bytes(made.certificate.read_bytes())
            own.key.write_bytes(made.key.read_bytes())

        said("certificate expires soon")
        fires(system, "BasculeCertificateExpires")
        own.key.write_bytes(b"")
        said("certificates not loaded again, the certificates before stay")
        put(expired)
        said("certificate has expired")
        fires(system, "BasculeCertificateExpires")
        loaded = system.broker.said().count("certificates loaded again")
        put(renewed)
        wait_for(lambda: system.broker.said().count("certificates loaded again") > loaded, "the renewed certificate")
        watch = Watch()
        watch.read(broker=system.metrics())
        assert not watch.fires("BasculeCertificateExpires")
