"""The result of a load: throughput, latency, and lost and doubled messages."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bascule.cli.load_plan import LoadMark, LoadPlan

#: The percentiles of the report, and their names.
PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
_PRODUCER_SHIFT = 48


class LoadEvents:
    """Messages that were confirmed or received, each with the time when it was due and the time of the event.

    One thread adds events; other threads may read the number of events meanwhile.
    """

    def __init__(self) -> None:
        self._keys, self._due_s, self._at_s = array("Q"), array("d"), array("d")

    def add(self, mark: LoadMark, at_s: float) -> None:
        """Add an event."""
        self._due_s.append(mark.due_s)
        self._at_s.append(at_s)
        self._keys.append(mark.producer << _PRODUCER_SHIFT | mark.number)

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self._keys)

    @property
    def keys(self) -> Sequence[int]:
        """Return a number for each message, in the order of the events."""
        return self._keys

    def latencies_ms(self, begin_s: float) -> list[float]:
        """Return the time from due to event of each message that was due at ``begin_s`` or later."""
        return [(at_s - due_s) * 1000 for due_s, at_s in zip(self._due_s, self._at_s, strict=True) if due_s >= begin_s]

    def count_between(self, begin_s: float, end_s: float) -> int:
        """Return the number of events in a span of time."""
        return sum(begin_s <= at_s < end_s for at_s in self._at_s)


@dataclass
class LoadCounts:
    """Everything that a run has observed."""

    plan: LoadPlan
    #: Start of the measurement, in seconds of the monotonic clock.
    measured_from_s: float = 0.0
    #: Messages that were given to the client, of each producer.
    sent: list[int] = field(default_factory=list)
    #: Messages that were due and were not sent, because the producers were behind for too long.
    unsent: int = 0
    confirmed: list[LoadEvents] = field(default_factory=list)
    #: The messages of each consumer that arrived without JMSRedelivered, and with it. A queue has a last consumer, which empties the queue.
    received: list[LoadEvents] = field(default_factory=list)
    redelivered: list[LoadEvents] = field(default_factory=list)
    #: Messages of consumers whose acknowledgement is in doubt: they were received, and may be redelivered.
    doubtful: LoadEvents = field(default_factory=LoadEvents)
    #: Errors by their type, and the text of one error of each type.
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    client_cpu_s: float = 0.0

    def flaws(self) -> tuple[int, int]:
        """Return how many confirmed messages did not arrive, and how many messages arrived again without JMSRedelivered."""
        confirmed = {key for events in self.confirmed for key in events.keys}
        lost = doubled = 0
        for consumers in self._subscriptions():
            arrived = Counter(key for consumer in consumers for key in self.received[consumer].keys)
            again = {key for consumer in consumers for key in self.redelivered[consumer].keys}
            doubled += arrived.total() - len(arrived)
            lost += len(confirmed - arrived.keys() - again - set(self.doubtful.keys))
        return lost, doubled

    def _subscriptions(self) -> list[list[int]]:
        """Return the consumers that share the messages of each subscription: the consumers of a queue share its messages."""
        numbers = [*range(len(self.received))]
        return [[number] for number in numbers] if self.plan.topic else [numbers]

    @property
    def negative(self) -> bool:
        """Return whether the run has lost or doubled messages, errors, or messages that could not be sent in time."""
        return any(self.flaws()) or bool(self.errors) or self.unsent > 0

    def summary(self) -> dict[str, Any]:
        """Return the report as data: rates in messages a second, times in milliseconds."""
        lost, doubled = self.flaws()
        begin_s, end_s = self.measured_from_s, self.measured_from_s + self.plan.seconds
        found: dict[str, Any] = {"sent": sum(self.sent), "unsent": self.unsent}
        consumers = self.received[: self.plan.consumers]
        for name, each in (("confirmed", self.confirmed), ("received", consumers)):
            rate = sum(events.count_between(begin_s, end_s) for events in each) / self.plan.seconds
            latencies = sorted(value for events in each for value in events.latencies_ms(begin_s))
            found[name] = {"messages": sum(map(len, each)), "per_s": round(rate, 1), **percentiles(latencies)}
        return found | {
            "redelivered": sum(map(len, self.redelivered)), "left": sum(map(len, self.received[self.plan.consumers :])),
            "lost": lost, "doubled": doubled,
            "errors": {name: {"count": count, "example": self.examples[name]} for name, count in self.errors.items()},
            "client_cpu_s": round(self.client_cpu_s, 2),
        }  # fmt: skip


def percentiles(ordered: Sequence[float]) -> dict[str, float | None]:
    """Return the percentiles of an ordered sequence by the nearest rank; None for those of no values."""
    if not ordered:
        return dict.fromkeys(PERCENTILES)
    return {name: round(ordered[max(0, math.ceil(len(ordered) * share) - 1)], 3) for name, share in PERCENTILES.items()}
