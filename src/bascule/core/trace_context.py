"""The names under which a message carries a trace context (W3C Trace Context and W3C Baggage).

They are the same as JMS properties, as AMQP application properties and message annotations, and as headers of Kafka records.
"""

from __future__ import annotations

from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
TRACE_CONTEXT: Final = (TRACEPARENT, TRACESTATE, "baggage")
