"""The figures of a soak's history: rates, latencies, and how long after each fault the service was back."""

from __future__ import annotations

import bisect
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tests.soak.plan import DIVERTS, EXPIRED, KINDS
from tests.soak.run import Result
from tests.support.operations import Operation

#: Number of points of a line.
BUCKETS = 240


class Timed(NamedTuple):
    """An operation with its start and end, in ms since the epoch."""

    begun_ms: float
    ended_ms: float


class Figures:
    """The figures of a result."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.length_s = result.ended_s - result.begun_s
        self.bucket_s = max(1.0, self.length_s / BUCKETS)
        operations = result.evidence.operations
        self._begun = {id: each.begun_ms for each in operations if each.target and each.begun_ms is not None for id in each.ids}
        self.sends = [
            Timed(each.begun_ms, each.ended_ms)
            for each in operations
            if each.op == "send" and each.outcome == "ok" and each.begun_ms is not None and each.ended_ms is not None
        ]
        records = [record for name in DIVERTS for record in result.records[name]]
        self.carried = [Timed(begun, record.stored_ms) for record in records if (begun := self._begun.get(record.id)) is not None]
        self.sent_ms = self._ends(operation for operation in operations if operation.op == "send")
        self.received_ms = self._ends(operation for operation in operations if operation.source is not None)
        self.diverted_ms = [record.stored_ms for record in records]

    @staticmethod
    def _ends(operations: Iterable[Operation]) -> list[float]:
        sure = (each for each in operations if each.outcome == "ok")
        return [each.ended_ms or 0.0 for each in sure for _ in each.ids]

    # -- over time ---------------------------------------------------------------------------------------------------------------------

    def _bucket(self, at_ms: float) -> int:
        return int((at_ms / 1000 - self.result.begun_s) / self.bucket_s)

    def _line(self, values: Mapping[int, float], otherwise: float | None) -> list[tuple[float, float | None]]:
        count = int(self.length_s / self.bucket_s)
        return [((bucket + 0.5) * self.bucket_s, values.get(bucket, otherwise)) for bucket in range(count)]

    def rate(self, moments_ms: Iterable[float]) -> list[tuple[float, float | None]]:
        """Return the number per second."""
        counts = Counter(map(self._bucket, moments_ms))
        return self._line({bucket: count / self.bucket_s for bucket, count in counts.items()}, 0.0)

    def latency(self, what: Iterable[Timed], share: float) -> list[tuple[float, float | None]]:
        """Return a quantile of the operations that ended at each time, in ms."""
        buckets: dict[int, list[float]] = {}
        for each in what:
            buckets.setdefault(self._bucket(each.ended_ms), []).append(each.ended_ms - each.begun_ms)
        return self._line({bucket: quantile(found, share) for bucket, found in buckets.items()}, None)

    def sampled(self, name: str) -> list[tuple[float, float | None]]:
        """Return the samples of a measure: "backlog", "journal", or the memory of a part."""
        begun_s = self.result.begun_s
        if name == "backlog":
            return [(sample.at_s - begun_s, sample.backlog) for sample in self.result.samples]
        if name == "journal":
            return [(sample.at_s - begun_s, sample.journal_mib) for sample in self.result.samples]
        return [(sample.at_s - begun_s, sample.rss_mib.get(name)) for sample in self.result.samples]

    def so_far(self, moments_s: Iterable[float]) -> list[tuple[float, float | None]]:
        """Return the count at each time, in steps; moments are s since the epoch."""
        times_s = sorted(moment_s - self.result.begun_s for moment_s in moments_s)
        steps = [(at_s, float(count)) for number, at_s in enumerate(times_s) for count in (number, number + 1)]
        return [(0.0, 0.0), *steps, (self.length_s, float(len(times_s)))]

    def anomalies_s(self) -> list[float]:
        """Return when the messages of the anomalies were last seen, in s since the epoch; the end for those that were never seen."""
        result = self.result
        seen = {id: each.ended_ms / 1000 for each in result.evidence.operations if each.ended_ms is not None for id in each.ids}
        seen |= {record.id: record.stored_ms / 1000 for name in DIVERTS for record in result.records[name]}
        return [min(seen.get(id, result.ended_s), result.ended_s) for each in result.tally.anomalies for id in each.ids]

    # -- after the faults --------------------------------------------------------------------------------------------------------------

    def back(self) -> list[tuple[float | None, float | None]]:
        """Return for each fault the s until a later send was answered, and until a message sent later was in the topic of a divert."""
        answered, carried = _FirstEnd(self.sends), _FirstEnd(self.carried)
        return [(answered.after(fault.at_s), carried.after(fault.at_s)) for fault in self.result.faults]

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Return for each kind of fault its number, and medians and maxima of ``back``."""
        found: dict[str, dict[str, float]] = {}
        for kind in KINDS:
            back = [times for fault, times in zip(self.result.faults, self.back(), strict=True) if fault.kind == kind]
            found[kind] = {"count": len(back)}
            for place, name in enumerate(("sends", "diverts")):
                if times := [seconds for each in back if (seconds := each[place]) is not None]:
                    found[kind] |= {f"{name}_median_s": round(statistics.median(times), 2), f"{name}_max_s": round(max(times), 2)}
        return found

    def totals(self) -> dict[str, float]:
        """Return the figures of the whole run."""
        sends = [each.ended_ms - each.begun_ms for each in self.sends]
        carried = [each.ended_ms - each.begun_ms for each in self.carried]
        tally = self.result.tally
        return {
            "seconds": round(self.length_s, 1),
            "faults": len(self.result.faults),
            "sent": tally.sent,
            "in_doubt": tally.maybe_sent,
            "in_doubt_arrived": tally.recovered,
            "taken": tally.taken,
            "expired": sum(len(each.ids) for each in self.result.evidence.operations if each.source == EXPIRED and each.outcome == "ok"),
            "diverted": len(self.diverted_ms),
            "ingested": sum(len(ids) for ids in self.result.evidence.ingested.values()),
            "sent_per_s": round(len(self.sent_ms) / self.length_s, 1),
            "send_p50_ms": round(quantile(sends, 0.5), 1),
            "send_p99_ms": round(quantile(sends, 0.99), 1),
            "to_kafka_p50_ms": round(quantile(carried, 0.5), 1),
            "to_kafka_p99_ms": round(quantile(carried, 0.99), 1),
            "backlog_max": max((sample.backlog or 0 for sample in self.result.samples), default=0),
            "journal_max_mib": round(max((sample.journal_mib for sample in self.result.samples), default=0.0), 1),
        }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


class _FirstEnd:
    """Return when the first operation that began after a moment ended."""

    def __init__(self, what: Sequence[Timed]) -> None:
        ordered = sorted(what)
        self._begins_ms = [each.begun_ms for each in ordered]
        self._ends_ms = list(accumulate((each.ended_ms for each in reversed(ordered)), min))[::-1]

    def after(self, at_s: float) -> float | None:
        """Return the seconds after the moment; None if there was none."""
        place = bisect.bisect_left(self._begins_ms, at_s * 1000)
        return self._ends_ms[place] / 1000 - at_s if place < len(self._ends_ms) else None
