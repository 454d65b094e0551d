"""Timestamps that Kafka takes: a record whose own timestamp its topic refuses is written with the time of its arrival.

A topic refuses what lies further from its broker's clock than ``message.timestamp.before.max.ms`` and ``message.timestamp.after.max.ms``
allow, by default what is more than an hour ahead. The sender's clock, not the message, is at fault.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Output
from bascule.jms.record_headers import TIMESTAMP_HEADER
from bascule.kafka.admin import Topics

_BEFORE: Final = "message.timestamp.before.max.ms"
_AFTER: Final = "message.timestamp.after.max.ms"
#: A message's JMSTimestamp, which diverted records have as a header in any case.
_JMS_TIMESTAMP: Final = "jms.JMSTimestamp"
#: A worker's clock may differ from that of the node that refuses.
_CLOCKS_DIFFER_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Limits:
    """How far before and after now a timestamp may lie."""

    before_ms: float
    after_ms: float


class Timestamps:
    """What is known of the timestamps that topics refuse: nothing, until one has refused a record."""

    def __init__(self, topics: Topics, now_s: Callable[[], float] = time.time) -> None:
        self._topics = topics
        self._now_s = now_s
        self._known: dict[str, _Limits] = {}

    def fitting(self, output: Output) -> Output:
        """Return the record as its topic takes it, as far as is known. Kafka has no time before 1970."""
        limits = self._known.get(output.topic)
        ahead_ms = output.timestamp_ms - self._now_s() * 1000
        if output.timestamp_ms < 0 or (limits is not None and output.timestamp_ms and not -limits.before_ms < ahead_ms < limits.after_ms):
            return on_arrival(output)
        return output

    def refused(self, output: Output) -> Output:
        """Learn from a topic's settings what it refuses, or from the record if they cannot be seen. Return the record as it is taken."""
        ahead_ms = output.timestamp_ms - self._now_s() * 1000
        limits = self._known.get(output.topic) or self._configured(output.topic)
        if -limits.before_ms < ahead_ms < limits.after_ms:
            edge_ms = max(0.0, abs(ahead_ms) - _CLOCKS_DIFFER_MS)
            limits = _Limits(limits.before_ms, edge_ms) if ahead_ms > 0 else _Limits(edge_ms, limits.after_ms)
        self._known[output.topic] = limits
        return on_arrival(output)

    def _configured(self, topic: str) -> _Limits:
        try:
            settings = self._topics.config(topic)
        except Unavailable:
            settings = {}
        return _Limits(*(float(settings.get(name, math.inf)) for name in (_BEFORE, _AFTER)))


def on_arrival(output: Output) -> Output:
    """Return a record that gets the time of its arrival; a header keeps its own."""
    if any(name == _JMS_TIMESTAMP for name, _ in output.headers):
        return output._replace(timestamp_ms=0)
    kept = (TIMESTAMP_HEADER, str(output.timestamp_ms).encode())
    return output._replace(timestamp_ms=0, headers=[*output.headers, kept])
