"""Records moved from a topic to others, each once: they and the position behind them are in one Kafka transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from bascule.core.errors import Unavailable
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import CLIENT_SETTINGS, Outgoing, hand_over
from bascule.kafka.consumer import Received, received_of
from bascule.kafka.history import TopicHistory, committed_offset

COORDINATOR_TIMEOUT_S = 30.0


class Mover:
    """The records of a topic that are not moved yet. The position is what ``group`` has committed there; nobody consumes in that group."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, group: str) -> None:
        self._kafka = {**CLIENT_SETTINGS, **kafka}
        self._topic = topic
        self._group = group

    def waiting(self) -> list[Received]:
        """Those records, by partition and offset. Raises Unavailable."""
        found: list[Received] = []
        for partition in range(Topics(self._kafka).partitions().get(self._topic, 0)):
            history = TopicHistory(self._kafka, self._topic, partition)
            start = max(history.earliest(), committed_offset(self._kafka, self._group, self._topic, partition))
            found += [received_of(message) for message in history.records(start, history.latest(), committed=True)]
        return found

    def move(self, make: Callable[[Received], Outgoing | None], count: int | None = None) -> int:
        """Writes what ``make`` gives for each (None: it is passed over), ``count`` at most; gives how many it has written.

        Another one that is at it is stopped by this one. Raises Unavailable: then all of it is done, or nothing.
        """
        producer = Producer({**self._kafka, "transactional.id": self._group, "partitioner": "murmur2_random"})
        consumer = Consumer({**self._kafka, "group.id": self._group, "enable.auto.commit": False})
        try:
            for _ in range(2):  # else the client waits for half a second before it asks for the coordinator again
                producer.list_topics(self._topic, timeout=COORDINATOR_TIMEOUT_S)
            producer.init_transactions(COORDINATOR_TIMEOUT_S)
            # What another one has committed is to be seen from here on, and it commits no more.
            records = self.waiting()[:count]
            if not records:
                return 0
            producer.begin_transaction()
            written = 0
            for outgoing in filter(None, map(make, records)):
                _produce(producer, outgoing)
                written += 1
            after = {record.partition: record.offset + 1 for record in records}
            offsets = [TopicPartition(self._topic, partition, offset) for partition, offset in after.items()]
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), COORDINATOR_TIMEOUT_S)
            producer.commit_transaction(COORDINATOR_TIMEOUT_S)
        except KafkaException as error:
            raise Unavailable(f"{self._topic}: not moved, or in doubt: {error.args[0].str()}; look again") from error
        finally:
            consumer.close()
        return written


def _produce(producer: Producer, outgoing: Outgoing) -> None:
    while True:
        try:
            hand_over(producer, outgoing, lambda *_: None)
            return
        except BufferError:
            producer.poll(0.1)
