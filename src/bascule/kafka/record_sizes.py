"""The mean size of the records of partitions, from samples that a thread reads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaException, Message

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Place
from bascule.core.log import get_log
from bascule.kafka.errors import words
from bascule.kafka.history import TopicHistory, content_of, known_offset, readable_headers
from bascule.threads.background import in_background

log = get_log(__name__)

#: A sample ends with the first record that reaches this number of offsets, or this size in bytes.
SAMPLE_OFFSETS: Final = 100
SAMPLE_BYTES: Final = 1 << 20
#: Partitions that one look samples, and the time, in seconds, after which a partition is sampled again.
SAMPLED_AT_ONCE: Final = 4
SAMPLE_AGAIN_S: Final = 30.0
_TIMEOUT_S: Final = 10.0


class RecordSizes:
    """Estimates the size of records that wait. Use it from one thread."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._kafka = kafka
        self._means: dict[Place, float] = {}
        self._due_s: dict[Place, float] = {}
        self._sampling: Future[dict[Place, float]] | None = None

    def look(self, waiting: Mapping[Place, tuple[int, int]]) -> Mapping[Place, float]:
        """Return the mean size in bytes of an offset, for each partition with a sample. Does not wait.

        ``waiting`` has the first offset that waits, and the offset behind the last one. A partition without waiting records is not sampled.
        """
        if self._sampling is not None and self._sampling.done():
            sampled, self._sampling = self._sampling, None
            if (failure := sampled.exception()) is None:
                self._means |= sampled.result()
            else:
                log.warning("sampling the size of records failed, will retry", error=repr(failure))
        self._means = {place: mean for place, mean in self._means.items() if place in waiting}
        self._due_s = {place: due_s for place, due_s in self._due_s.items() if place in waiting}
        now_s = time.monotonic()
        due = [place for place, (start, end) in waiting.items() if end > start and now_s >= self._due_s.get(place, 0.0)]
        if due and self._sampling is None:
            chosen = sorted(due, key=lambda place: self._due_s.get(place, 0.0))[:SAMPLED_AT_ONCE]
            self._due_s |= dict.fromkeys(chosen, now_s + SAMPLE_AGAIN_S)
            ranges = {place: waiting[place] for place in chosen}
            self._sampling = in_background(lambda: self._sampled(ranges), "record-sizes")
        return self._means

    def _sampled(self, ranges: Mapping[Place, tuple[int, int]]) -> dict[Place, float]:
        """Return the mean size for each partition that can be read."""
        means = {}
        for place, (start, end) in ranges.items():
            try:
                means[place] = self._mean(place, start, end)
            except (Unavailable, KafkaException) as error:
                log.info("could not sample the size of records, will retry", topic=place[0], partition=place[1], error=words(error))
        return means

    def _mean(self, place: Place, start: int, end: int) -> float:
        """Return the mean size in bytes of an offset. Offsets without a record count; offsets that were deleted at the start do not."""
        history = TopicHistory(self._kafka, *place, timeout_s=_TIMEOUT_S)
        start = max(start, history.earliest())
        total, last = 0, max(start, end - 1)
        for message in history.records(start, end):
            total += size_of(message)
            if total >= SAMPLE_BYTES or known_offset(message) + 1 >= start + SAMPLE_OFFSETS:
                last = known_offset(message)
                break
        return total / (last + 1 - start)


def size_of(message: Message) -> int:
    """Return the size of a record in bytes: its key, value and headers. Headers that the client cannot read count as 0."""
    parts: list[bytes | None] = [*content_of(message)]
    for name, value in readable_headers(message) or ():
        parts += [name.encode(), value]
    return sum(len(part) for part in parts if part is not None)
