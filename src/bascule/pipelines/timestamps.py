"""Timestamps that Kafka accepts: a record whose timestamp its topic refuses is written with the time of its arrival.

A topic refuses a timestamp that differs from its broker's clock by more than ``message.timestamp.before.max.ms`` or
``message.timestamp.after.max.ms``; by default, more than an hour ahead. The sender's clock is at fault, not the message.
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
#: The JMSTimestamp of a message, which diverted records always have as a header.
_JMS_TIMESTAMP: Final = "jms.JMSTimestamp"
#: Allowed difference, in milliseconds, between the clock of a worker and the clock of the node that refuses.
_CLOCKS_DIFFER_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Limits:
    """How far, in milliseconds, a timestamp may lie before and after the current time."""

    before_ms: float
    after_ms: float


class Timestamps:
    """The known limits on timestamps of topics. A topic has none until it has refused a record."""

    def __init__(self, topics: Topics, now_s: Callable[[], float] = time.time) -> None:
        self._topics = topics
        self._now_s = now_s
        self._known: dict[str, _Limits] = {}

    def fitting(self, output: Output) -> Output:
        """Return the record in a form that its topic accepts, as far as is known. Kafka has no time before 1970."""
        limits = self._known.get(output.topic)
        ahead_ms = output.timestamp_ms - self._now_s() * 1000
        if output.timestamp_ms < 0 or (limits is not None and output.timestamp_ms and not -limits.before_ms < ahead_ms < limits.after_ms):
            return on_arrival(output)
        return output

    def refused(self, output: Output) -> Output:
        """Learn from a topic's settings what it refuses, or from the record if the settings are not visible.

        Return an acceptable record.
        """
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
    """Return the record without its timestamp, so that it gets the time of its arrival. A header keeps the original timestamp."""
    if any(name == _JMS_TIMESTAMP for name, _ in output.headers):
        return output._replace(timestamp_ms=0)
    kept = (TIMESTAMP_HEADER, str(output.timestamp_ms).encode())
    return output._replace(timestamp_ms=0, headers=[*output.headers, kept])
