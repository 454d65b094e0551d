"""A Kafka topic that gets lines of text, such as those of the audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaException

from bascule.kafka import clients
from bascule.kafka.errors import words

#: A record that Kafka has not stored after this time is a failure.
DELIVERY_TIMEOUT_MS: Final = 10_000
#: Longest wait for Kafka at the end of the process.
CLOSE_S: Final = 5.0


class LineTopic:
    """A Kafka topic for lines. ``done`` is called for each line, with the reason why Kafka has not stored it, or None."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, lines_max: int, done: Callable[[str, str | None], None]) -> None:
        self.name = topic
        self._done = done
        self._producer = clients.producer(
            {
                **kafka, "enable.idempotence": True, "delivery.timeout.ms": DELIVERY_TIMEOUT_MS,
                "queue.buffering.max.messages": lines_max,
            }
        )  # fmt: skip

    def write(self, line: str) -> None:
        """Pass a line to the client of Kafka, which keeps at most ``lines_max`` lines. Raises OSError, BufferError."""
        try:
            self._producer.produce(self.name, line.encode(), on_delivery=partial(self._delivered, line))
        except KafkaException as error:
            raise OSError(words(error)) from error

    def _delivered(self, line: str, error: Any, _message: Any) -> None:
        self._done(line, None if error is None else words(error))

    def poll(self) -> None:
        """Handle the reports of Kafka."""
        self._producer.poll(0)

    def close(self) -> None:
        """Wait until Kafka has stored the lines."""
        self._producer.flush(CLOSE_S)
