"""Spans by the conventions of OpenTelemetry for messaging, recorded at their end, and the trace context of a message."""

from __future__ import annotations

from bascule.core.extras import require

require("otel")

import time
from collections.abc import Mapping
from typing import Final

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bascule import __version__
from bascule.core.trace_context import TRACEPARENT, TRACESTATE
from bascule.jms.errors import MalformedMessage
from bascule.jms.ids import correlation_id_text, message_id_text
from bascule.jms.sections import application_property, message_annotation, property_fields_of

Attributes = dict[str, str | int | bool]
#: The trace context of a message, as its propagator reads it.
TraceContext = dict[str, str]

_propagator: Final = TraceContextTextMapPropagator()
_MESSAGE_ID, _TO, _CORRELATION_ID = 0, 2, 5  # fields of the properties section


def now_ns() -> int:
    """Return the time in ns since 1970, as spans have it."""
    return time.time_ns()


def trace_context_of(body: bytes) -> TraceContext | None:
    """Return the trace context of an AMQP message; None if it has none, or cannot be read. An annotation precedes a property."""
    context: TraceContext = {}
    try:
        for name in (TRACEPARENT, TRACESTATE):
            value = message_annotation(body, name)
            value = value if isinstance(value, str) else application_property(body, name)
            if isinstance(value, str):
                context[name] = str(value)
            elif name == TRACEPARENT:
                return None
    except MalformedMessage:
        return None
    return context


def attributes_of(body: bytes) -> Attributes:
    """Return the attributes that describe an AMQP message."""
    attributes: Attributes = {"messaging.system": "jms", "messaging.message.envelope.size": len(body)}
    try:
        fields = property_fields_of(body)
    except MalformedMessage:
        return attributes
    if fields[_MESSAGE_ID] is not None:
        attributes["messaging.message.id"] = message_id_text(fields[_MESSAGE_ID])
    correlation = fields[_CORRELATION_ID]
    if correlation is not None and not isinstance(correlation, bytes):
        attributes["messaging.message.conversation_id"] = correlation_id_text(correlation)
    return attributes


def address_of(body: bytes) -> str:
    """Return the address in a message of an anonymous producer; "" if it has none."""
    try:
        return property_fields_of(body)[_TO] or ""
    except MalformedMessage:
        return ""


class Tracing:
    """Records spans as children of the spans in which their messages were sent."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("bascule", __version__)
        self.service = str(provider.resource.attributes["service.name"])

    def record(
        self, operation: str, destination: str, kind: SpanKind, parent: Mapping[str, str], attributes: Attributes, begun_ns: int,
        *, error_type: str = "", error: str = "",
    ) -> None:  # fmt: skip
        """Record the span of an ``operation`` (``send``, ``receive``, ``process``) that began at ``begun_ns`` and ends now.

        Whether the span is exported depends on the sampler of the environment, which follows the parent by default.
        """
        span = self._tracer.start_span(
            f"{operation} {destination}".rstrip(), context=_propagator.extract(parent), kind=kind, start_time=begun_ns,
            attributes={
                "messaging.operation.name": operation, "messaging.operation.type": operation,
                "messaging.destination.name": destination, **attributes, **({"error.type": error_type} if error_type else {}),
            },
        )  # fmt: skip
        if error_type:
            span.set_status(Status(StatusCode.ERROR, error or None))
        span.end(max(begun_ns, now_ns()))
