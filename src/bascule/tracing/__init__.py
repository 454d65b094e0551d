"""Spans of OpenTelemetry for messages that carry a trace context. Needs the extra ``otel`` once it is switched on."""
