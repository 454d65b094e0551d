"""Spans of the records that a pipeline carries. They are used only if tracing is on.

A span lasts from the conversion of a record to the commit of its transaction. It is dropped with a transaction that fails, because its
records are carried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.trace import SpanKind

from bascule.core.kafka_records import KafkaRecord, Output
from bascule.core.trace_context import TRACE_CONTEXT, TRACEPARENT
from bascule.jms.record_headers import ERRORS
from bascule.pipelines.spec import DivertSpec, IngressSpec
from bascule.tracing.spans import Attributes, TraceContext, Tracing, attributes_of, now_ns, trace_context_of

if TYPE_CHECKING:
    from bascule.pipelines.divert import WantedMessage

_KEY_SHOWN_MAX = 200  # characters of a record's key in an attribute


class _Begun(NamedTuple):
    operation: str
    destination: str
    kind: SpanKind
    parent: TraceContext
    attributes: Attributes
    begun_ns: int
    error_type: str


class CarriedSpans:
    """The spans of one transaction after the other."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._begun: list[_Begun] = []  # of the current transaction, whose size is limited

    def sent(self, divert: DivertSpec, taken: WantedMessage, output: Output) -> None:
        """Begin the span ``send TOPIC`` of a message that a divert converted."""
        parent = trace_context_of(taken.send.body)
        if parent is not None:
            found = attributes_of(taken.send.body)
            attributes = _kafka(output.key, len(output.value or b""))
            attributes |= {"bascule.divert": divert.name, "bascule.id": taken.identity, "bascule.address": taken.send.address}
            if "messaging.message.id" in found:
                attributes["messaging.message.id"] = found["messaging.message.id"]
            self._begun.append(_Begun("send", output.topic, SpanKind.PRODUCER, parent, attributes, now_ns(), _error_type(output)))

    def received(self, ingress: IngressSpec, record: KafkaRecord, output: Output) -> None:
        """Begin the span ``process TOPIC`` of a record that an ingress converted."""
        parent = {name: value.decode(errors="replace") for name, value in record.headers if name in TRACE_CONTEXT and value is not None}
        if TRACEPARENT in parent:
            attributes = _kafka(record.key, len(record.value or b""))
            attributes |= {
                "bascule.ingress": ingress.name, "messaging.destination.partition.id": str(record.partition),
                "messaging.kafka.offset": record.offset,
            }  # fmt: skip
            if record.value is None:
                attributes["messaging.kafka.message.tombstone"] = True
            self._begun.append(_Begun("process", record.topic, SpanKind.CONSUMER, parent, attributes, now_ns(), _error_type(output)))

    def committed(self) -> None:
        """Record the spans of a transaction that is committed."""
        for operation, destination, kind, parent, attributes, begun_ns, error_type in self._begun:
            self._tracing.record(operation, destination, kind, parent, attributes, begun_ns, error_type=error_type)
        self._begun.clear()

    def dropped(self) -> None:
        """Drop the spans of a transaction that failed."""
        self._begun.clear()


def _kafka(key: bytes | None, size_bytes: int) -> Attributes:
    attributes: Attributes = {"messaging.system": "kafka", "messaging.message.body.size": size_bytes}
    if key is not None:
        attributes["messaging.kafka.message.key"] = key.decode(errors="replace")[:_KEY_SHOWN_MAX]
    return attributes


def _error_type(output: Output) -> str:
    """Return the class of the error of a dead letter; "" for any other record."""
    value = next((value for name, value in output.headers if name == f"{ERRORS}exception.class.name"), None)
    return value.decode() if isinstance(value, bytes) else value or ""
