"""The writer of the journal on an event loop: the loop itself waits for Kafka's reports, if the installed client allows this."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from confluent_kafka import KafkaException

from bascule.broker.epoch import Outcome
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.journal.offsets import UNKNOWN_OFFSET
from bascule.kafka import clients
from bascule.kafka.errors import words
from bascule.kafka.event_producer import EventProducer
from bascule.kafka.log import GAPLESS_SETTINGS, JournalWriter

log = get_log(__name__)


class Appends(Protocol):
    """Appends to one partition, which are reported in their order."""

    def append(self, key: bytes, value: bytes) -> None:
        """Append a record. Raises Unavailable if the client accepts no more. May be called from any thread."""

    def stop(self) -> None:
        """Stop reporting outcomes. Must be called on the loop, before ``close``."""

    def close(self) -> None:
        """Release the client; blocks. The outcome of records in flight stays unknown."""


class LoopJournalWriter:
    """Appends to one partition. ``on_outcomes`` is called on the loop, with outcomes in the order of the appends.

    No other thread of Python takes part in a report, so a report needs one wake-up less and no change of the interpreter lock.
    """

    def __init__(
        self, producer: EventProducer, topic: str, partition: int, on_outcomes: Callable[[list[Outcome]], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        self._producer: EventProducer | None = producer
        self._descriptor = producer.descriptor
        self._topic = topic
        self._partition = partition
        self._on_outcomes = on_outcomes
        self._loop = loop
        loop.add_reader(self._descriptor, self._read)

    def append(self, key: bytes, value: bytes) -> None:
        """Append a record; ``on_outcomes`` receives its outcome. Raises Unavailable if the client accepts no more, or after ``close``."""
        refusal = self._refusal(key, value)
        if refusal is not None:
            raise Unavailable(f"journal {self._topic}: append of {len(value)} bytes refused: {refusal}")

    def _refusal(self, key: bytes, value: bytes) -> str | None:
        """Append a record. Return why the client refuses it, or None.

        The caller raises the error, without a cause: the frames of the error must not hold the client, whose end would then block the loop.
        """
        producer = self._producer
        if producer is None:
            return "the writer is closed"
        try:
            producer.produce(self._partition, key, value)
        except KafkaException as error:
            return words(error)
        return None

    def _read(self) -> None:
        producer = self._producer
        if producer is None:
            return
        outcomes: list[Outcome]
        try:
            outcomes = [
                (-1, words(error)) if error is not None else (UNKNOWN_OFFSET if offset < 0 else offset, None)
                for offset, error in producer.reports()
            ]
        except Exception as error:  # the outcomes of some records are lost
            log.exception("delivery report failed", topic=self._topic)
            outcomes = [(-1, f"the delivery report cannot be used: {error!r}")]
        if outcomes:
            self._on_outcomes(outcomes)

    def stop(self) -> None:
        """Stop reporting outcomes. Must be called on the loop, before ``close``."""
        if self._producer is not None:
            self._producer.stop()
            self._loop.remove_reader(self._descriptor)

    def close(self) -> None:
        """Release the client; blocks. The outcome of records in flight stays unknown."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()


def journal_writer(
    kafka: Mapping[str, Any], topic: str, partition: int, on_outcomes: Callable[[list[Outcome]], None], loop: asyncio.AbstractEventLoop
) -> Appends:
    """Return a writer that calls ``on_outcomes`` on the loop. Raises KafkaException for settings that librdkafka refuses.

    If the installed Kafka client does not report to a file descriptor, a thread takes the reports.
    """
    producer = clients.event_producer({**kafka, **GAPLESS_SETTINGS}, topic)
    if producer is None:

        def post(outcomes: list[Outcome]) -> None:
            loop.call_soon_threadsafe(on_outcomes, outcomes)

        return JournalWriter(kafka, topic, partition, post)
    return LoopJournalWriter(producer, topic, partition, on_outcomes, loop)
