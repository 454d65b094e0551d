"""Requests and replies over the bridge, in both directions: a real JMS client on one side, a Kafka application on the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from tests.scenarios.conftest import Connect
from tests.scenarios.topics import Reader, create
from tests.support.system import System

EXAMPLES = Path(__file__).parents[2] / "examples"
ANSWERS = "rates.answers.desk-1"
#: Two passes through Spark, on a loaded machine.
ANSWER_TIMEOUT_S = 240

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def bridge(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    create(kafka.bootstrap, "quotes.questions", "quotes.answers", "rates.questions", ANSWERS)
    config = (EXAMPLES / "request-reply.toml").read_text() + '\n[pipelines]\nmaster = "local[2]"\n'
    with System(kafka.bootstrap, tmp_path_factory.mktemp("request-reply"), prefix="request-reply", config=config) as running:
        running.pipelines.start()
        yield running


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def java(bridge: System, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    path = os.pathsep.join(map(str, classpath("qpid-jms")))
    return running(find_jdk().executable, "-cp", path, EXAMPLES / "Quotes.java", *arguments, bridge.url)


def kafka_application(bridge: System, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return running(sys.executable, EXAMPLES / "kafka_quotes.py", *arguments, bridge.bootstrap)


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=ANSWER_TIMEOUT_S)[0].strip()


def test_kafka_application_answers_a_request_of_a_jms_client(bridge: System) -> None:
    with kafka_application(bridge, "answer", "1"), java(bridge, "ask", "quotes", "AAPL") as client:
        assert said(client) == "AAPL is 187.20"
    assert bridge.depth("quotes") == 0


def test_jms_client_answers_a_request_of_a_kafka_application(bridge: System) -> None:
    with java(bridge, "answer", "rates", "1"), kafka_application(bridge, "ask", "EUR/USD") as application:
        assert said(application) == "EUR/USD is 1.08"
    queue = bridge.queue(f"kafka.answers.{ANSWERS}")
    assert queue is None or not queue["messages"], "the answer lies in a queue as well"


def test_reply_reaches_only_its_requester_and_reply_without_destination_is_dead_lettered(connect_to: Connect, bridge: System) -> None:
    connection = connect_to(bridge.url)
    session = connection.session()
    gone, mine, others = session.temporary_queue(), session.temporary_queue(), connect_to(bridge.url).session().temporary_queue()
    inbox = session.consumer(mine.address)
    addresses = [place.address.partition(":")[2] for place in (gone, mine, others)]
    gone.delete()
    producer = clients.producer({"bootstrap.servers": bridge.bootstrap})
    for number, address in enumerate([addresses[0], addresses[2], addresses[1]]):
        headers = {"jms.JMSDestination": f"temporary-queue://{address}", "jms.JMSCorrelationID": f"question {number}"}
        producer.produce("quotes.answers", str(number), headers=headers)
    producer.produce("quotes.answers", "to nobody")
    producer.flush()
    (answer,) = inbox.receive_many(1, ANSWER_TIMEOUT_S)
    assert (answer.body, answer.correlation_id) == ("2", "question 2")
    assert bridge.queue(addresses[0]) is None, "the answer to one that is gone has made a queue"
    with closing(Reader(bridge.bootstrap, "request-reply.dead-letter")) as dead:
        assert dead.read_until("to nobody") == ["to nobody"]
        assert b"no header 'jms.JMSDestination'" in dead.headers[0]["__connect.errors.exception.message"]
