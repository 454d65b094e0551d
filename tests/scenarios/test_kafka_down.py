"""Kafka is suspended, or dies: no send is confirmed that is not stored, and the broker continues when Kafka is back."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka
from tests.scenarios.changed_topics import set_topic
from tests.scenarios.conftest import Connect
from tests.support.alerts import Watch
from tests.support.console import Console
from tests.support.qpid import JmsError
from tests.support.system import System, paused, wait_for

#: Time for a Kafka that was suspended for a moment to resume and to store waiting records, on a machine that may pause for ten seconds.
APPEND_TIMEOUT_S = 15
#: A premature confirmation would arrive within this time.
EARLY_S = 0.7
#: Due after the broker has noticed that Kafka does not answer.
DUE_MS = 30_000
#: Without Kafka, a broker abandons its last snapshot and its place in the election; each took more than 30 s before.
END_TIMEOUT_S = 35


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    """A Kafka that a test may suspend."""
    with EmbeddedKafka(tmp_path_factory.mktemp("own-kafka"), jvm_options=SHORT_LIVED) as running:
        yield running


@pytest.fixture(scope="module")
def system(own_kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    # A longer session: the append fails first.
    config = f"[journal]\nappend_timeout_s = {APPEND_TIMEOUT_S}\n[broker]\nsession_timeout_s = 60\n"
    with System(own_kafka.bootstrap, tmp_path_factory.mktemp("kafka-down"), prefix="down", config=config) as running:
        yield running


def readiness(system: System) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{system.admin_port}/readyz", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def pid(kafka: EmbeddedKafka) -> int:
    assert kafka.pid is not None
    return kafka.pid


@pytest.mark.slow
def test_send_waits_for_paused_kafka_and_is_answered_after_resume(
    connect_to: Connect, system: System, own_kafka: EmbeddedKafka, name: str, queue: str
) -> None:
    producer = connect_to(system.url).session().producer(queue)
    producer.send("before")
    with paused(pid(own_kafka)):
        waiting = producer.submit_send("meanwhile")
        assert not wait([waiting], EARLY_S).done
    waiting.result(60)
    system.wait_depth(name, 2)


def test_send_fails_with_clear_error_while_kafka_stays_paused_and_broker_recovers_later(
    connect_to: Connect, system: System, own_kafka: EmbeddedKafka, name: str, queue: str
) -> None:
    connection, other = connect_to(system.url), connect_to(system.failover_url)
    producer, patient = connection.session().producer(queue), other.session().producer(queue)
    producer.send("before")
    patient.send("before, too")
    with paused(pid(own_kafka)):
        waiting, repeated = producer.submit_send("in doubt"), patient.submit_send("repeated until it is stored")
        with pytest.raises(JmsError, match=r"Kafka has not stored \d+ bytes within \d+ s") as failed:
            waiting.result(60)
        assert "amqp:connection:forced" in " ".join([failed.value.message, *failed.value.linked])
        code, reason = readiness(system)
        assert code == 503
        assert "journal stalled" in system.broker.said()
        watch = Watch()
        watch.read(broker=system.metrics())
        assert watch.fires("BasculeNoActiveBroker")
        Console.of(system).shows("Broker", "persistent messages are refused until Kafka stores them")
        assert "persistent messages are refused until Kafka stores them" in reason
        assert not repeated.done()
        assert system.depth(name) == 2
    repeated.result(60)
    wait_for(lambda: readiness(system)[0] == 200, "a broker that is ready")
    bodies = [message.body for message in connect_to(system.url).session().consumer(queue).receive_all(3)]
    assert bodies in (
        ["before", "before, too", "in doubt", "repeated until it is stored"],
        ["before", "before, too", "repeated until it is stored", "in doubt"],
        ["before", "before, too", "repeated until it is stored"],
    )


@pytest.mark.slow
def test_delayed_message_due_while_kafka_is_paused_does_not_make_the_broker_ready(
    connect_to: Connect, system: System, own_kafka: EmbeddedKafka, name: str, queue: str
) -> None:
    producer = connect_to(system.url).session().producer(queue)
    producer.send("later", delay_ms=DUE_MS)
    with paused(pid(own_kafka)):
        producer.submit_send("in doubt")
        wait_for(lambda: readiness(system)[0] == 503, "a broker that has noticed")
        assert system.queue(name)["delayed"] == 1
        wait_for(lambda: system.queue(name)["delayed"] == 0, "the message to come due")
        assert readiness(system)[0] == 503
        with pytest.raises(JmsError, match=r"Kafka has not (stored|answered)"):
            connect_to(system.url)
    wait_for(lambda: readiness(system)[0] == 200, "a broker that is ready")


def test_transaction_commit_waits_for_paused_kafka(
    connect_to: Connect, system: System, own_kafka: EmbeddedKafka, name: str, queue: str
) -> None:
    connection = connect_to(system.url)
    session = connection.session("TRANSACTED")
    session.producer(queue).send("{n}", count=3)
    with paused(pid(own_kafka)):
        commit = session.submit("commit")
        assert not wait([commit], EARLY_S).done
        assert system.depth(name) == 0
    commit.result(60)
    assert system.depth(name) == 3


def test_broker_ends_on_sigterm_while_kafka_is_paused(system: System, own_kafka: EmbeddedKafka) -> None:
    with paused(pid(own_kafka)):
        os.kill(system.broker.pid, signal.SIGTERM)
        wait_for(lambda: not system.broker.running, "the broker to end", END_TIMEOUT_S)
    system.broker.start()


def test_clients_continue_after_kafka_kill_and_restart(connect_to: Connect, system: System, own_kafka: EmbeddedKafka, queue: str) -> None:
    producer = connect_to(system.failover_url).session().producer(queue)
    producer.send("before")
    own_kafka.kill()
    waiting = producer.submit_send("meanwhile")
    assert not wait([waiting], EARLY_S).done
    own_kafka.start()
    waiting.result(60)
    messages = connect_to(system.failover_url).session().consumer(queue).receive_all(2)
    assert [message.body for message in messages] == ["before", "meanwhile"]


@pytest.mark.slow
def test_unsafe_topic_setting_is_reported_also_after_kafka_restart(system: System, own_kafka: EmbeddedKafka) -> None:
    own_kafka.kill()
    own_kafka.start()
    for value, said in (("604800000", "has retention.ms=604800000"), ("-1", "")):
        set_topic(own_kafka.bootstrap, f"{system.prefix}.journal", "retention.ms", value)
        wait_for(lambda said=said: said in system.status()["reason"] and system.serves(), "the status to say so")  # type: ignore[misc]
    wait_for(lambda: system.status()["reason"] == "", "the status to be well")
