"""Counts the records of a Kafka topic while the demo runs: each flight by its row, and its time on the way."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping

from confluent_kafka import Consumer

#: The header that carries _AMQ_DUPL_ID, which Flights.java sets to "flight-ROW".
ROW_HEADER = "jms._AMQ_DUPL_ID"
TIMESTAMP_HEADER = "jms.JMSTimestamp"
READ_S = 0.2


class Tally(threading.Thread):
    """A ``read_committed`` reader of one topic, from its start."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(name=f"tally-{topic}", daemon=True)
        self.topic = topic
        self.rows: Counter[int] = Counter()
        self.latencies_ms: list[int] = []
        self.wrong_keys = 0
        self.carriers: Mapping[int, str] = {}  # expected keys, if they are checked
        self._ending = threading.Event()
        self._consumer = Consumer({
            "bootstrap.servers": bootstrap, "group.id": f"demo-{topic}", "isolation.level": "read_committed",
            "auto.offset.reset": "earliest", "enable.auto.commit": False,
            "topic.metadata.refresh.interval.ms": 1000, "log_level": 2,
        })  # fmt: skip

    def run(self) -> None:
        self._consumer.subscribe([self.topic])
        while not self._ending.is_set():
            for message in self._consumer.consume(1000, READ_S):
                if message.error() is None:
                    self._count(message.headers() or [], message.key())
        self._consumer.close()

    def _count(self, headers: list[tuple[str, bytes]], key: bytes | None) -> None:
        fields = dict(headers)
        row = int(fields[ROW_HEADER].rpartition(b"-")[2])
        self.rows[row] += 1
        self.latencies_ms.append(int(time.time() * 1000) - int(fields[TIMESTAMP_HEADER]))
        if self.carriers and (key or b"").decode() != self.carriers[row]:
            self.wrong_keys += 1

    @property
    def count(self) -> int:
        """Return the number of records read."""
        return self.rows.total()

    def stop(self) -> None:
        """End the thread."""
        self._ending.set()
        self.join()
