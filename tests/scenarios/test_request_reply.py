"""Requests and replies over the bridge, in both directions: a real JMS client on one side, a Kafka application on the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from tests.scenarios.conftest import Connect
from tests.scenarios.topics import Reader, create
from tests.support.collector import Collector
from tests.support.system import System, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
ANSWERS = "rates.answers.desk-1"
#: Two passes through Spark, on a loaded machine.
ANSWER_TIMEOUT_S = 240

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def bridge(kafka: EmbeddedKafka, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    create(kafka.bootstrap, "quotes.questions", "quotes.answers", "rates.questions", ANSWERS)
    config = (EXAMPLES / "request-reply.toml").read_text() + '\n[pipelines]\nmaster = "local[2]"\n'
    directory = tmp_path_factory.mktemp("request-reply")
    with System(kafka.bootstrap, directory, prefix="request-reply", config=config, env=collector.environment) as running:
        running.pipelines.start()
        yield running


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def java(bridge: System, *arguments: str, jvm: Sequence[str] = ()) -> AbstractContextManager[subprocess.Popen[str]]:
    path = os.pathsep.join(map(str, classpath("qpid-jms")))
    return running(find_jdk().executable, *jvm, "-cp", path, EXAMPLES / "Quotes.java", *arguments, bridge.url)


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


def test_trace_of_a_jms_client_continues_through_kafka_and_back(connect_to: Connect, bridge: System, collector: Collector) -> None:
    trace, answered = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"
    asked = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "tracestate": "vendor=1", "baggage": "user=a%20b"}
    session = connect_to(bridge.url).session()
    inbox = session.consumer("queue:traced.answers")
    session.producer("queue:quotes").send("a question with a trace", properties=asked)
    with closing(Reader(bridge.bootstrap, "quotes.questions")) as questions:
        questions.read_until("a question with a trace")
    headers = questions.headers[-1]
    assert {name: value.encode() for name, value in asked.items()}.items() <= headers.items()
    assert not [name for name in headers if name.startswith("jms.trace")]
    # The Kafka application continues the trace with a span of its own.
    answer = {**asked, "traceparent": f"00-{trace}-{answered}-01"}
    producer = clients.producer({"bootstrap.servers": bridge.bootstrap})
    producer.produce("quotes.answers", "an answer", headers={"jms.JMSDestination": "queue://traced.answers", **answer})
    producer.flush()
    (received,) = inbox.receive_many(1, ANSWER_TIMEOUT_S)
    assert answer.items() <= received.properties.items()
    expected = {
        ("bascule-broker", "send quotes", "b7ad6b7169203331"),
        ("bascule-pipelines", "send quotes.questions", "b7ad6b7169203331"),
        ("bascule-pipelines", "process quotes.answers", answered),
        ("bascule-broker", "receive traced.answers", answered),
    }

    def spans() -> set[tuple[str, str, str]]:
        return {(span.service, span.name, span.parent_id) for span in collector.spans if span.trace_id == trace}

    wait_for(lambda: spans() == expected, lambda: f"the spans {expected}; there are {spans()}")


def agent(collector: Collector) -> list[str]:
    """Return the options with which OpenTelemetry's agent instruments a Java program, which need not know of it."""
    (jar,) = classpath("opentelemetry-agent")
    settings = {
        "service.name": "desk", "exporter.otlp.endpoint": collector.url, "exporter.otlp.protocol": "http/protobuf",
        "bsp.schedule.delay": "100", "metrics.exporter": "none", "logs.exporter": "none",
        # The agent would take a program that Java compiles from its source for a tool of the JDK.
        "javaagent.enabled": "true",
    }  # fmt: skip
    return [f"-javaagent:{jar}", *(f"-Dotel.{name}={value}" for name, value in settings.items())]


def test_one_trace_has_the_spans_of_both_clients_and_of_all_between_them(bridge: System, collector: Collector) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "pricing"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{collector.url}/v1/traces")))
    tracer, context = provider.get_tracer("pricing"), TraceContextTextMapPropagator()
    client = java(bridge, "ask", "quotes", "TRACED", jvm=agent(collector))
    with client as process, closing(Reader(bridge.bootstrap, "quotes.questions")) as asked:
        asked.read_until("TRACED")
        headers = {name: value.decode() for name, value in asked.headers[-1].items()}
        with tracer.start_as_current_span("process quotes.questions", context.extract(headers), SpanKind.CONSUMER):
            answer = {"jms.JMSDestination": headers["jms.JMSReplyTo"], "jms.JMSCorrelationID": headers["jms.JMSMessageID"]}
            context.inject(answer)
            producer = clients.producer({"bootstrap.servers": bridge.bootstrap})
            producer.produce("quotes.answers", "traced", headers=answer)
            producer.flush()
        assert said(process) == "traced"
    provider.shutdown()
    trace = headers["traceparent"].split("-")[1]
    answers = headers["jms.JMSReplyTo"].partition("://")[2]
    asking, answering = ("desk", "quotes publish"), ("pricing", "process quotes.questions")
    expected = {
        (*asking, None), ("bascule-broker", "send quotes", asking), ("bascule-pipelines", "send quotes.questions", asking),
        (*answering, asking), ("bascule-pipelines", "process quotes.answers", answering),
        ("bascule-broker", f"receive {answers}", answering), ("desk", "(temporary) receive", answering),
    }  # fmt: skip

    def spans() -> set[tuple[str, str, tuple[str, str] | None]]:
        found = [span for span in collector.spans if span.trace_id == trace]
        places = {span.span_id: (span.service, span.name) for span in found}
        return {(span.service, span.name, places.get(span.parent_id)) for span in found}

    wait_for(lambda: spans() == expected, lambda: f"the spans {expected}; there are {spans()}")
