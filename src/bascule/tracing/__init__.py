"""Spans and metrics of OpenTelemetry, switched on by its environment variables. Needs the extra ``otel`` once they are on."""
