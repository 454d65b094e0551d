"""The cluster of the Kafka in memory: its state, the clients that it makes, and faults on demand."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from bascule.kafka import clients
from tests.support.kafka_in_memory.admin import MemoryAdmin
from tests.support.kafka_in_memory.consumer import MemoryConsumer
from tests.support.kafka_in_memory.producer import MemoryProducer
from tests.support.kafka_in_memory.state import DEFAULTS, At, Partition, Stored, Topic, Transactional, failure, readable

SETTINGS = {"bootstrap.servers": "memory"}


class KafkaInMemory:
    """One cluster for all clients that the product makes from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turn = threading.Condition(threading.RLock())
        self.topics: dict[str, Topic] = {}
        self.transactional: dict[str, Transactional] = {}
        self.offsets: dict[str, dict[At, tuple[int, str]]] = defaultdict(dict)  # of groups
        self.members: dict[str, list[MemoryConsumer]] = defaultdict(list)
        self.brokers = 1
        #: Errors by the name of a call: each error fails one such call. "delivery" and "fetch" are errors of a report, or of a message.
        self.faults: dict[str, deque[KafkaException]] = defaultdict(deque)
        #: Events by the name of a call: the call waits until the event is set.
        self.held: dict[str, threading.Event] = {}
        #: The end of a partition as a former leader reports it, which is cut off; each answer is used once.
        self.former: dict[At, deque[dict[str, int]]] = defaultdict(deque)
        #: Names of topics that may not be written.
        self.denied: set[str] = set()
        self.made: list[tuple[str, weakref.ref[Any]]] = []
        self._ids = iter(range(1, 1 << 30))
        monkeypatch.setattr(clients, "producer", self._producer)
        monkeypatch.setattr(clients, "event_producer", lambda *_: None)  # the product uses the other kind of producer then
        monkeypatch.setattr(clients, "consumer", self._consumer)
        monkeypatch.setattr(clients, "admin", self._admin)

    # -- what tests ask and do ---------------------------------------------------------------------------------------

    def create(self, name: str, partitions: int = 1, **config: str) -> Topic:
        with self.turn:
            settings = {**DEFAULTS, **{key.replace("_", "."): value for key, value in config.items()}}
            topic = self.topics[name] = Topic(f"id-{next(self._ids)}", [Partition() for _ in range(partitions)], settings)
            self.turn.notify_all()
            return topic

    def partition(self, name: str, number: int = 0) -> Partition:
        return self.topics[name].partitions[number]

    def put(
        self, name: str, value: bytes | None, key: bytes | None = None, *, partition: int = 0, transaction: object = None, **headers: bytes
    ) -> int:
        """Append a record as a program outside would; as part of an open transaction if one is given."""
        with self.turn:
            offset = self.partition(name, partition).append(
                Stored(key, value, list(headers.items()) or None, int(time.time() * 1000), transaction)
            )
            self.turn.notify_all()
            return offset

    def values(self, name: str, partition: int = 0) -> list[bytes | None]:
        """Return the values that a reader of committed records finds."""
        there = self.partition(name, partition)
        return [each.value for at, each in sorted(there.records.items()) if readable(there, at, each, committed=True)]

    def fail(self, call: str, code: int, times: int = 1, **flags: Any) -> None:
        self.faults[call].extend(failure(code, **flags) for _ in range(times))

    def open_clients(self) -> list[str]:
        """Return the kinds of the clients that are neither closed nor freed."""
        gc.collect()
        return sorted(kind for kind, ref in self.made if (client := ref()) is not None and not getattr(client, "closed", False))

    # -- for the clients ---------------------------------------------------------------------------------------------

    def meet(self, call: str) -> None:
        """Wait while the call is held, and raise its next error."""
        if (held := self.held.get(call)) is not None:
            held.wait(30)
        with self.turn:
            if self.faults[call]:
                raise self.faults[call].popleft()

    def there(self, at: TopicPartition) -> Partition:
        topic = self.topics.get(at.topic)
        if topic is None or at.partition >= len(topic.partitions):
            raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART)
        return topic.partitions[at.partition]

    def _made(self, kind: str, client: Any) -> Any:
        self.made.append((kind, weakref.ref(client)))
        return client

    def _producer(self, settings: Mapping[str, Any], logger: Any = None) -> MemoryProducer:
        self.meet("producer")
        made: MemoryProducer = self._made("producer", MemoryProducer(self, settings, logger))
        return made

    def _consumer(self, settings: Mapping[str, Any], logger: Any = None) -> MemoryConsumer:
        del logger  # it has no lines
        self.meet("consumer")
        made: MemoryConsumer = self._made("consumer", MemoryConsumer(self, settings))
        return made

    def _admin(self, settings: Mapping[str, Any]) -> MemoryAdmin:
        self.meet("admin")
        made: MemoryAdmin = self._made("admin", MemoryAdmin(self, settings))
        return made

    def new_producer_id(self) -> int:
        return next(self._ids)

    def balance(self, group: str) -> None:
        """Assign partitions to members: they stay where they are, and unassigned ones go to the member with the fewest."""
        members = self.members[group]
        names = {name for member in members for name in member.wanted_topics()}
        every = [(name, number) for name in sorted(names) for number in range(len(self.topics[name].partitions))]
        owned = {at for member in members for at in member.target}
        for at in every:
            takers = [member for member in members if at[0] in member.wanted_topics()]
            if at not in owned and takers:
                min(takers, key=lambda member: len(member.target)).target.add(at)
        self.turn.notify_all()
