"""The counts of one task: what it adds to a transaction, and how long its transactions take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from bascule.core.kafka_records import Output
from bascule.writer.carried import NOTHING_CARRIED, CarriedCounts, PipelineCount


class CarriedTally:
    """Counts the records of one transaction after the other. ``CarriedCounts`` says what the durations are."""

    def __init__(self, dead_letter_topic: str) -> None:
        self._dead_letter_topic = dead_letter_topic
        self._names: list[str] = []  # of the pipeline of each output of the transaction
        self._sent_ms: list[int] = []
        self._bytes: dict[str, int] = {}
        self._begun_s: float | None = None
        #: The durations of transactions that are committed and not stored yet.
        self._untold = NOTHING_CARRIED

    @property
    def untold(self) -> bool:
        """Return True if durations wait for the next transaction, which stores them."""
        return self._untold is not NOTHING_CARRIED

    def begin(self) -> None:
        """Forget a transaction that was not committed."""
        self._names, self._sent_ms, self._bytes, self._begun_s = [], [], {}, None

    def taken(self) -> None:
        """Note that a source record was taken."""
        if self._begun_s is None:
            self._begun_s = time.monotonic()

    def add(self, pipeline: str, size_bytes: int, sent_ms: int) -> None:
        """Count an output of a pipeline. ``sent_ms`` is the time when it was sent, since the epoch; 0 = not known."""
        self._names.append(pipeline)
        self._bytes[pipeline] = self._bytes.get(pipeline, 0) + size_bytes
        if sent_ms > 0:
            self._sent_ms.append(sent_ms)

    def counted(self, before: CarriedCounts, outputs: Sequence[Output]) -> CarriedCounts:
        """Return the counts after a transaction with these outputs."""
        letter_topic = self._dead_letter_topic
        letters = Counter(name for name, output in zip(self._names, outputs, strict=True) if output.topic == letter_topic)
        now = {name: PipelineCount(count, self._bytes[name], letters[name]) for name, count in Counter(self._names).items()}
        return (before if self._untold is NOTHING_CARRIED else before.plus(self._untold)).with_pipelines_of(CarriedCounts(now))

    def committed(self, transaction_s: float) -> None:
        """Note that the transaction was committed now, ``transaction_s`` after it was complete. The next one stores its durations."""
        begun_s, now_ms = self._begun_s, time.time() * 1000
        ages_s = [max(0.0, now_ms - sent_ms) / 1000 for sent_ms in self._sent_ms]
        self._untold = CarriedCounts(
            {},
            NOTHING_CARRIED.transactions.with_these((transaction_s,)),
            NOTHING_CARRIED.batches.with_these(() if begun_s is None else (time.monotonic() - begun_s,)),
            NOTHING_CARRIED.latencies.with_these(ages_s),
        )
        self.begin()

    def told(self) -> None:
        """Note that the durations were stored without a further transaction of records."""
        self._untold = NOTHING_CARRIED
