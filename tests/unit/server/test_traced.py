"""Spans of the messages of clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from bascule.amqp.errors import INTERNAL_ERROR
from bascule.amqp.events import Transferred
from bascule.amqp.performatives import ACCEPTED, Error, Modified, Rejected, Source, Target
from bascule.amqp.types import Symbol
from bascule.broker.message import BrokerMessage
from bascule.config.audit import Audit as AuditSettings
from bascule.jms.sections import APPLICATION_PROPERTIES, MESSAGE_ANNOTATIONS, section_bytes
from bascule.server.audit import audit_of
from bascule.server.links import AuditedConsumerLink, ConsumerLink
from bascule.server.traced_links import TracedConsumerLink
from bascule.testing.broker import message_bytes
from bascule.tracing.spans import Tracing, trace_context_of
from tests.support.journal import text_message
from tests.unit.server.served import QUEUE, Client, Served, run_async

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


class Traced:
    """A broker in memory that records spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.served = Served()
        self.served.tracing = Tracing(provider)
        self.client = Client(self.served)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def send(self, address: str | None, body: bytes, **source: Any) -> None:
        link = self.client.session.attach_sender("producer", Source(), Target(address, capabilities=QUEUE))
        self.served.settle(self.client)
        link.send(body, **source)
        self.served.settle(self.client)

    def receive(self, address: str, outcome: Any = ACCEPTED, *, count: int = 1) -> None:
        link = self.client.consumer(address, credit=count)
        for event in self.client.events_of(Transferred):
            link.settle(event.delivery_id, outcome)
        self.served.settle(self.client)


def message(parent: str = PARENT, **properties: Any) -> bytes:
    return text_message("m", message_id="ID:1", correlation_id="c-1", properties={"traceparent": parent, **properties})


@run_async
async def test_message_has_a_span_for_its_arrival_and_one_for_its_delivery() -> None:
    traced = Traced()
    traced.send("orders", message(tracestate="vendor=1"))
    traced.receive("orders")
    send, receive = traced.spans
    assert (send.name, receive.name) == ("send orders", "receive orders")
    for span in (send, receive):
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
        assert span.parent.trace_state.get("vendor") == "1"
        assert span.kind is SpanKind.SERVER
        assert span.attributes is not None
        expected = {
            "messaging.system": "jms", "messaging.destination.name": "orders", "messaging.message.id": "ID:1",
            "messaging.message.conversation_id": "c-1", "messaging.client.id": "client", "messaging.operation.type": span.name.split()[0],
        }  # fmt: skip
        assert expected.items() <= span.attributes.items()
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.end_time >= span.start_time
    assert receive.attributes is not None
    assert receive.attributes["bascule.outcome"] == "accepted"


@run_async
async def test_message_without_trace_context_has_no_span() -> None:
    traced = Traced()
    traced.send("orders", text_message("m"))
    traced.receive("orders")
    assert not traced.spans


@run_async
async def test_message_that_its_parent_did_not_sample_has_no_span() -> None:
    traced = Traced()
    traced.send("orders", message(PARENT[:-1] + "0"))
    assert not traced.spans


@pytest.mark.parametrize("parent", ["", "00-zz", "x" * 100])
@run_async
async def test_invalid_trace_context_begins_a_trace_of_its_own(parent: str) -> None:
    traced = Traced()
    traced.send("orders", message(parent))
    (span,) = traced.spans
    assert span.parent is None


@run_async
async def test_refused_message_has_a_span_with_the_error() -> None:
    traced = Traced()
    traced.send(None, message())  # of an anonymous producer, without an address
    (span,) = traced.spans
    assert span.name == "send"
    assert not span.status.is_ok
    assert span.attributes is not None
    assert span.attributes["error.type"]


@run_async
async def test_each_delivery_of_a_message_has_a_span_with_its_outcome() -> None:
    traced = Traced()
    traced.send("orders", message())
    link = traced.client.consumer("orders", credit=2)
    for number, outcome in enumerate((Modified(delivery_failed=True), Rejected(Error(INTERNAL_ERROR, "no")))):
        event = traced.client.events_of(Transferred)[number]
        link.settle(event.delivery_id, outcome)
        traced.served.settle(traced.client)
    _, *deliveries = traced.spans
    found = [(span.attributes["bascule.outcome"], span.attributes["bascule.delivery_count"]) for span in deliveries if span.attributes]
    assert found == [("modified", 1), ("rejected", 2)]


def test_annotation_of_an_intermediary_is_the_parent() -> None:
    nearer = f"00-{TRACE_ID}-{'1' * 16}-01"
    body = section_bytes(MESSAGE_ANNOTATIONS, {Symbol("traceparent"): nearer})
    body += section_bytes(APPLICATION_PROPERTIES, {"traceparent": PARENT})
    assert trace_context_of(body) == {"traceparent": nearer}


def test_trace_context_of_unreadable_message_is_none() -> None:
    assert trace_context_of(b"\xff" * 10) is None
    assert trace_context_of(b"") is None


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", [TracedConsumerLink, AuditedConsumerLink])
def test_body_in_the_spill_files_is_read_once_for_a_delivery(kind: type[ConsumerLink]) -> None:
    client, body = MagicMock(full=False, given_bytes=0), message_bytes("x")
    client.engine.bodies.read.return_value = body
    link = kind(client, MagicMock(credit=1), settled=False)
    spilled = BrokerMessage(body)
    spilled.body = None
    link.deliver(spilled, 1)
    client.engine.bodies.read.assert_called_once_with(spilled)
    (parts, *_), _ = link.link.send.call_args
    assert bytes(parts[-1]) in body


@pytest.mark.parametrize("messages", [True, False])
@run_async
async def test_messages_with_spans_are_audited_if_the_settings_say_so(tmp_path: Path, *, messages: bool) -> None:
    file, traced = tmp_path / "audit", Traced()
    traced.served.audit = audit_of(AuditSettings(file=file, messages=messages), {})
    traced.client = Client(traced.served, "audited")
    traced.send("orders", message())
    traced.receive("orders")
    traced.served.audit.close()
    assert [span.name for span in traced.spans] == ["send orders", "receive orders"]
    actions = [json.loads(line)["action"] for line in file.read_text().splitlines()]
    assert [action for action in actions if action in ("send", "receive")] == ["send", "receive"] * messages
