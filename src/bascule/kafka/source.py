"""Reads the source partitions of a pipeline with librdkafka: records in order, and where a partition has no further records now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import KafkaRecord, Place, Taken
from bascule.kafka import clients
from bascule.kafka.consumer import received_of
from bascule.kafka.errors import passing, words
from bascule.kafka.history import PROMPT, READ_AHEAD, known_offset, taken_at_once

#: Maximum number of records that are taken from the client at once.
TAKEN_MAX: Final = 1_000
#: Interval, in seconds, at which a source without new records returns nothing, so that its reader can do other work.
PAUSE_S: Final = 1.0
#: With more records than this to come, a transaction is filled, and does not end because the client has no further record yet.
BACKLOG_RECORDS: Final = 1_000
#: How long the reader waits for records that Kafka has announced, in seconds. An open transaction of another producer may hold them up.
ANNOUNCED_S: Final = 0.05
#: Kafka answers a fetch as soon as there is a record. Without one it answers after this time: an idle source costs two requests a second.
_FETCH_WAIT_MS: Final = 500
_DEFAULTS: Final[Mapping[str, Any]] = {
    **READ_AHEAD,
    **PROMPT,
    "fetch.wait.max.ms": _FETCH_WAIT_MS,
    "socket.nagle.disable": True,
}
_SETTINGS: Final[Mapping[str, Any]] = {
    "group.id": "bascule.source.unused",
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "check.crcs": True,
}


class KafkaSource:
    """Source partitions, each read from an offset, as an endless iterator. Not thread-safe."""

    def __init__(self, kafka: Mapping[str, Any], start: Mapping[Place, int], *, committed: bool) -> None:
        """``start`` has the first offset to read by topic and partition. ``committed`` leaves out records of aborted transactions.

        Raises Unavailable if no client can be made.
        """
        isolation = "read_committed" if committed else "read_uncommitted"
        try:
            self._consumer: Consumer = clients.consumer({**_DEFAULTS, **kafka, **_SETTINGS, "isolation.level": isolation})
            clients.assign(self._consumer, [TopicPartition(*place, offset) for place, offset in start.items()])
            #: Partitions with records that were taken, and with more records to come.
            self._filling: set[Place] = set()
        except KafkaException as error:
            raise Unavailable(f"could not create a client to read sources: {words(error)}") from error

    def __iter__(self) -> Iterator[Taken]:
        """Yield the records that are there, and nothing after PAUSE_S without a record. Raises Unavailable, also for deleted records."""
        while True:
            messages = taken_at_once(self._consumer, TAKEN_MAX, ANNOUNCED_S if self._filling else PAUSE_S)
            if messages:
                yield self._taken(messages)
            else:
                tails, self._filling = self._filling, set()
                yield Taken([], tails)

    def close(self) -> None:
        """Free the client."""
        self._consumer.close()

    def _taken(self, messages: list[Message]) -> Taken:
        records: list[KafkaRecord] = []
        ends: dict[Place, int] = {}
        for message in messages:
            failure = message.error()
            place = (message.topic() or "", message.partition() or 0)
            if failure is None:
                records.append(received_of(message))
                ends.pop(place, None)
            elif failure.code() == KafkaError._PARTITION_EOF:
                ends[place] = known_offset(message)
            elif not passing(failure):
                raise Unavailable(f"{place[0]}-{place[1]} cannot be read: {failure.str()}")
        reached = {(record.topic, record.partition): record.offset + 1 for record in records}
        # A partition without a record this time has its announced records held up, or others come first: its transaction must not wait.
        tails = {at for at, end in reached.items() if self._near_end(at, end)} | (self._filling - reached.keys())
        self._filling = (self._filling | reached.keys()) - tails
        return Taken(records, tails, ends)

    def _near_end(self, place: Place, reached: int) -> bool:
        """Return whether few records are left, as the last answer of Kafka says."""
        known = self._consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
        return known is None or known[1] - reached < BACKLOG_RECORDS
