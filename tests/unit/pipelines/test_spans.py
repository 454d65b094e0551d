"""Spans of the records that diverts and ingresses carry."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from bascule.core.destination import Routing
from bascule.core.kafka_records import KafkaRecord
from bascule.journal.records import Kind, Send, SendFlag, encode_record, send_entry
from bascule.pipelines.divert import DivertEngine, JournalReader
from bascule.pipelines.ingress import IngressEngine
from bascule.pipelines.spans import CarriedSpans
from bascule.pipelines.spec import DivertSpec, IngressSpec
from bascule.pipelines.tasks import DATA_KEY
from bascule.tracing.spans import Tracing
from bascule.writer.position import Position
from tests.support.journal import text_message

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DIVERT = DivertSpec("upper", "orders", "out", key="message-id")
INGRESS = IngressSpec("in", target="to", topics=("t",), body="map")


def carried() -> tuple[CarriedSpans, Callable[[], list[ReadableSpan]]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return CarriedSpans(Tracing(provider)), lambda: list(exporter.get_finished_spans())


def divert(spans: CarriedSpans, body: bytes, spec: DivertSpec = DIVERT) -> None:
    send = Send(SendFlag.DURABLE, Routing.ANYCAST, 4, 1, 0, 0, "orders", (), (), (), None, body)
    value = encode_record(Kind.DATA, 0, 1, send_entry(send))
    (taken,) = JournalReader(Position("journal", "id", 0, 0, epoch=-1, sequence=0), [spec]).take(1, DATA_KEY, value)
    for found, output in DivertEngine("bridge", ("journal", 0), "dead").outputs(taken):
        spans.sent(found, taken, output)


def ingress(spans: CarriedSpans, value: bytes | None, headers: list[tuple[str, bytes | None]]) -> None:
    record = KafkaRecord("t", 3, 42, b"key", value, headers, 1)
    output = IngressEngine(INGRESS, "bridge", "ingress", "dead").output(record)
    assert output is not None
    spans.received(INGRESS, record, output)


def test_divert_has_a_span_when_its_transaction_is_committed() -> None:
    spans, finished = carried()
    divert(spans, text_message("m", message_id="ID:1", properties={"traceparent": PARENT}))
    assert not finished()
    spans.committed()
    (span,) = finished()
    assert (span.name, span.kind) == ("send out", SpanKind.PRODUCER)
    assert span.parent is not None
    assert f"{span.parent.span_id:x}" == "b7ad6b7169203331"
    assert span.attributes is not None
    expected = {
        "messaging.system": "kafka", "messaging.destination.name": "out", "messaging.kafka.message.key": "ID:1", "bascule.divert": "upper",
        "bascule.address": "orders", "bascule.id": "0-1-0", "messaging.message.id": "ID:1", "messaging.message.body.size": 1,
    }  # fmt: skip
    assert expected.items() <= span.attributes.items()
    spans.committed()
    assert len(finished()) == 1


def test_failed_transaction_has_no_spans() -> None:
    spans, finished = carried()
    divert(spans, text_message("m", properties={"traceparent": PARENT}))
    spans.dropped()
    spans.committed()
    assert not finished()


def test_ingress_has_a_span_with_the_place_of_the_record() -> None:
    spans, finished = carried()
    ingress(spans, None, [("traceparent", PARENT.encode())])
    spans.committed()
    (span,) = finished()
    assert (span.name, span.kind) == ("process t", SpanKind.CONSUMER)
    assert span.attributes is not None
    expected = {
        "messaging.destination.partition.id": "3", "messaging.kafka.offset": 42, "messaging.kafka.message.key": "key",
        "messaging.kafka.message.tombstone": True, "bascule.ingress": "in",
    }  # fmt: skip
    assert expected.items() <= span.attributes.items()
    assert span.status.is_ok or span.status.is_unset


def test_dead_letters_have_spans_with_the_class_of_the_error() -> None:
    spans, finished = carried()
    ingress(spans, b"no json", [("traceparent", PARENT.encode())])
    divert(spans, text_message("m", properties={"traceparent": PARENT}), DivertSpec("wrong", "orders", "not a topic"))
    spans.committed()
    found = [(span.name, span.attributes["error.type"], span.status.is_ok) for span in finished() if span.attributes]
    assert found == [("process t", "BadRecord", False), ("send dead", "BadRecord", False)]


def test_records_without_trace_context_have_no_spans() -> None:
    spans, finished = carried()
    divert(spans, text_message("m"))
    ingress(spans, b"{}", [("tracestate", b"a=b"), ("traceparent", None)])
    spans.committed()
    assert not finished()
