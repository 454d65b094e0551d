"""Kafka in memory, behind the product's own code: topics, transactions with fences, consumer groups, and faults on demand.

``KafkaInMemory(monkeypatch)`` takes the place of the functions of ``bascule.kafka.clients``, so that everything above librdkafka is the
code that ships. Values are librdkafka's own classes (``Message``, ``KafkaError``, ``TopicPartition``). What the real Kafka does beyond this
(replication, delays, brokers that move) is left to the scenarios and to the model of ``tests/sim``.
"""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AclOperation, ConfigEntry

from bascule.kafka import clients

At = tuple[str, int]
#: As Kafka has them where a topic says nothing else.
DEFAULTS = {
    "cleanup.policy": "delete",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "max.message.bytes": "1048588",
    "min.insync.replicas": "1",
    "unclean.leader.election.enable": "false",
}
SETTINGS = {"bootstrap.servers": "memory"}


def failure(code: int, **flags: Any) -> KafkaException:
    """What a call raises."""
    return KafkaException(KafkaError(code, **flags))


@dataclass
class Stored:
    """A record of a partition; ``marker`` for the end of a transaction."""

    key: bytes | None
    value: bytes | None
    headers: Any
    timestamp_ms: int
    transaction: object = None
    marker: bool = False


@dataclass
class Partition:
    """A log. A transaction is open from its first record to its marker."""

    first: int = 0
    end: int = 0
    records: dict[int, Stored] = field(default_factory=dict)
    open: dict[object, int] = field(default_factory=dict)
    aborted: set[object] = field(default_factory=set)

    @property
    def stable(self) -> int:
        return min(self.open.values(), default=self.end)

    def append(self, record: Stored) -> int:
        if record.transaction is not None and not record.marker:
            self.open.setdefault(record.transaction, self.end)
        self.records[self.end] = record
        self.end += 1
        return self.end - 1

    def mark(self, transaction: object, *, committed: bool) -> None:
        if self.open.pop(transaction, None) is not None:
            self.append(Stored(None, None, None, 0, transaction, marker=True))
            if not committed:
                self.aborted.add(transaction)

    def delete(self, end: int) -> None:
        self.first = max(self.first, end)
        self.records = {offset: record for offset, record in self.records.items() if offset >= self.first}

    def compact(self) -> None:
        """The newest record of each key is left, and no deletion."""
        newest = {record.key: offset for offset, record in self.records.items() if not record.marker}
        self.records = {
            at: each for at, each in self.records.items() if not each.marker and newest[each.key] == at and each.value is not None
        }


@dataclass
class Topic:
    """Partitions and settings; another topic of the same name has another id."""

    id: str
    partitions: list[Partition]
    config: dict[str, str]
    replicas: int = 1
    in_sync: int = 1


@dataclass
class Transactional:
    """What the coordinator knows of a transactional id."""

    producer_id: int
    epoch: int = -1
    open: object = None
    touched: set[At] = field(default_factory=set)


class KafkaInMemory:
    """One cluster for all clients that the product makes from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turn = threading.Condition(threading.RLock())
        self.topics: dict[str, Topic] = {}
        self.transactional: dict[str, Transactional] = {}
        self.offsets: dict[str, dict[At, tuple[int, str]]] = defaultdict(dict)  # of groups
        self.members: dict[str, list[MemoryConsumer]] = defaultdict(list)
        self.brokers = 1
        #: By the name of a call: each error fails one of them. "delivery" and "fetch" are what a report, or a message, says.
        self.faults: dict[str, deque[KafkaException]] = defaultdict(deque)
        #: A call that has a place here waits before it is done, for as long as the event is not set.
        self.held: dict[str, threading.Event] = {}
        #: A topic with a name here may not be written.
        self.denied: set[str] = set()
        self.made: list[tuple[str, weakref.ref[Any]]] = []
        self._ids = iter(range(1, 1 << 30))
        monkeypatch.setattr(clients, "producer", self._producer)
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
        """Append a record as somebody outside would; of an open transaction if there is a name for it."""
        with self.turn:
            offset = self.partition(name, partition).append(
                Stored(key, value, list(headers.items()) or None, int(time.time() * 1000), transaction)
            )
            self.turn.notify_all()
            return offset

    def values(self, name: str, partition: int = 0) -> list[bytes | None]:
        """What a reader of committed records finds."""
        there = self.partition(name, partition)
        return [each.value for at, each in sorted(there.records.items()) if _readable(there, at, each, committed=True)]

    def fail(self, call: str, code: int, times: int = 1, **flags: Any) -> None:
        self.faults[call].extend(failure(code, **flags) for _ in range(times))

    def open_clients(self) -> list[str]:
        """The kinds of the clients that are neither closed nor freed."""
        gc.collect()
        return sorted(kind for kind, ref in self.made if (client := ref()) is not None and not getattr(client, "closed", False))

    # -- for the clients ---------------------------------------------------------------------------------------------

    def meet(self, call: str) -> None:
        """Wait where the call is held, and raise what it shall fail of."""
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

    def _consumer(self, settings: Mapping[str, Any]) -> MemoryConsumer:
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
        """Partitions stay where they are; those of nobody go to who has fewest."""
        members = self.members[group]
        names = {name for member in members for name in member.wanted_topics()}
        every = [(name, number) for name in sorted(names) for number in range(len(self.topics[name].partitions))]
        owned = {at for member in members for at in member.target}
        for at in every:
            takers = [member for member in members if at[0] in member.wanted_topics()]
            if at not in owned and takers:
                min(takers, key=lambda member: len(member.target)).target.add(at)
        self.turn.notify_all()


def _readable(partition: Partition, offset: int, record: Stored, *, committed: bool) -> bool:
    if record.marker:
        return False
    return not committed or (offset < partition.stable and record.transaction not in partition.aborted)


class _Client:
    def __init__(self, kafka: KafkaInMemory, settings: Mapping[str, Any]) -> None:
        self.kafka = kafka
        self.settings = dict(settings)
        self.knows_controller = kafka.brokers > 0

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self.kafka.meet("list_topics")
        with self.kafka.turn:
            self.knows_controller = self.kafka.brokers > 0
            listed = {
                name: SimpleNamespace(
                    error=None,
                    partitions={
                        number: SimpleNamespace(leader=1, replicas=[1] * each.replicas, isrs=[1] * each.in_sync)
                        for number in range(len(each.partitions))
                    },
                )
                for name, each in self.kafka.topics.items()
                if topic in (None, name)
            }
        return SimpleNamespace(topics=listed, brokers=dict.fromkeys(range(self.kafka.brokers)))


class MemoryProducer(_Client):
    """A producer; with a ``transactional.id`` its records are in transactions."""

    def __init__(self, kafka: KafkaInMemory, settings: Mapping[str, Any], logger: Any) -> None:
        super().__init__(kafka, settings)
        self._logger = logger
        self._id = self.settings.get("transactional.id")
        self._epoch = self._producer_id = -1
        self._transaction: object = None
        self._broken: KafkaError | None = None
        self._touched: set[At] = set()
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._reports: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._reports)

    def produce(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int = -1,
        on_delivery: Any = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        self.kafka.meet("produce")
        if self._broken is not None:
            raise failure(KafkaError._STATE)
        if len(value or b"") > int(self.settings.get("message.max.bytes", 1_000_000)):
            raise failure(KafkaError.MSG_SIZE_TOO_LARGE)
        if len(self) >= int(self.settings.get("queue.buffering.max.messages", 100_000)):
            raise BufferError("Local: Queue full")
        self._waiting.append((topic, value, key, partition, on_delivery, timestamp, headers, self._transaction))
        self._send()

    def _send(self) -> None:
        if (held := self.kafka.held.get("send")) is not None and not held.is_set():
            return
        with self.kafka.turn:
            while self._waiting:
                self._store(*self._waiting.popleft())
            self.kafka.turn.notify_all()

    def _store(
        self, topic: str, value: Any, key: Any, partition: int, told: Any, timestamp: int, headers: Any, transaction: object
    ) -> None:
        error = self._refusal(topic, value)
        offset: int | None = None
        count = len(self.kafka.topics[topic].partitions) if topic in self.kafka.topics else 1
        number = partition if partition >= 0 else zlib.crc32(key or b"") % count
        if error is None:
            record = Stored(key, value, headers or None, timestamp or int(time.time() * 1000), transaction)
            offset = self.kafka.topics[topic].partitions[number].append(record)
            if transaction is not None:
                self._touched.add((topic, number))
        elif transaction is not None:
            self._broken = error
        if told is not None:
            message = Message(topic=topic, partition=number, offset=OFFSET_INVALID if offset is None else offset, key=key, value=value)
            self._reports.append(lambda: told(error, message))

    def _refusal(self, topic: str, value: bytes | None) -> KafkaError | None:
        faults = self.kafka.faults["delivery"]
        if faults:
            error: KafkaError = faults.popleft().args[0]
            return error
        if topic not in self.kafka.topics:
            return KafkaError(KafkaError._UNKNOWN_TOPIC)
        if topic in self.kafka.denied:
            return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        if len(value or b"") > int(self.kafka.topics[topic].config["max.message.bytes"]):
            return KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
        if self._id is not None and self.kafka.transactional[self._id].epoch != self._epoch:
            return KafkaError(KafkaError._FENCED, fatal=True)
        return None

    def poll(self, timeout: float = -1) -> int:
        self.kafka.meet("poll")
        self._send()
        count = 0
        if not self._reports and timeout > 0:
            with self.kafka.turn:
                self.kafka.turn.wait_for(lambda: bool(self._reports or self._waiting), min(timeout, 0.05))
            self._send()
        while self._reports:
            count += 1
            self._reports.popleft()()
        return count

    def flush(self, timeout: float = -1) -> int:
        self.kafka.meet("flush")
        deadline_s = time.monotonic() + timeout
        self.poll(0)
        while len(self) and time.monotonic() < deadline_s:
            self.poll(0.01)
        return len(self)

    def purge(self) -> None:
        for _, _, _, _, told, *_ in self._waiting:
            if told is not None:
                message = Message(topic="", partition=0)
                self._reports.append(partial(told, KafkaError(KafkaError._PURGE_QUEUE), message))
        self._waiting.clear()

    # -- transactions ------------------------------------------------------------------------------------------------

    def init_transactions(self, timeout: float = -1) -> None:
        self.kafka.meet("init_transactions")
        with self.kafka.turn:
            known = self.kafka.transactional.setdefault(str(self._id), Transactional(self.kafka.new_producer_id()))
            if known.open is not None:
                self._end(known, committed=False)
                known.epoch += 1  # to fence who has it open
            known.epoch += 1
            self._producer_id, self._epoch = known.producer_id, known.epoch
        if self._logger is not None and "eos" in str(self.settings.get("debug", "")):
            self._logger.log(10, "%s", f"Acquired PID{{Id:{self._producer_id},Epoch:{self._epoch}}} (InitProducerId)")

    def begin_transaction(self) -> None:
        self.kafka.meet("begin_transaction")
        known = self._current()
        known.open = self._transaction = object()
        known.touched = self._touched = set()

    def commit_transaction(self, timeout: float = -1) -> None:
        self.poll(0)
        self.kafka.meet("commit_transaction")
        if self._broken is not None:
            raise KafkaException(KafkaError(self._broken.code(), self._broken.str(), fatal=self._broken.fatal(), txn_requires_abort=True))
        if len(self):
            raise failure(KafkaError._TIMED_OUT, retriable=True)
        self._over(committed=True)

    def abort_transaction(self, timeout: float = -1) -> None:
        self.kafka.meet("abort_transaction")
        self.purge()
        self._broken = None
        self._over(committed=False)

    def send_offsets_to_transaction(self, offsets: list[TopicPartition], group: str, timeout: float = -1) -> None:
        self.kafka.meet("send_offsets_to_transaction")
        self._current()
        self._group_offsets = group, {(each.topic, each.partition): (each.offset, "") for each in offsets}

    def _over(self, *, committed: bool) -> None:
        with self.kafka.turn:
            known = self._current()
            self._end(known, committed=committed)
            if committed and hasattr(self, "_group_offsets"):
                group, offsets = self._group_offsets
                self.kafka.offsets[group] |= offsets
            self._transaction = None
            self.kafka.turn.notify_all()
        self.kafka.meet("after_commit")

    def _end(self, known: Transactional, *, committed: bool) -> None:
        for topic, number in known.touched:
            partition = self.kafka.topics[topic].partitions[number]
            partition.mark(known.open, committed=committed)
        known.open, known.touched = None, set()

    def _current(self) -> Transactional:
        with self.kafka.turn:
            known = self.kafka.transactional[str(self._id)]
            if known.epoch != self._epoch:
                raise failure(KafkaError._FENCED, fatal=True)
            return known


class MemoryConsumer(_Client):
    """A consumer: of partitions that it is given, or as a member of a group."""

    def __init__(self, kafka: KafkaInMemory, settings: Mapping[str, Any]) -> None:
        super().__init__(kafka, settings)
        self.closed = False
        self.group = str(self.settings["group.id"])
        self.instance = self.settings.get("group.instance.id")
        self.target: set[At] = set()  # what the coordinator gives this member
        self._at: dict[At, int] = {}
        self._told_end: set[At] = set()
        self._paused: set[At] = set()
        self._patterns: list[str] = []
        self._callbacks: dict[str, Any] = {}
        self._says: deque[KafkaError] = deque()
        self._commits: deque[tuple[KafkaError | None, list[TopicPartition]]] = deque()

    # -- reading -----------------------------------------------------------------------------------------------------

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._at, self._told_end = {}, set()
        self.incremental_assign(partitions)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        with self.kafka.turn:
            for each in partitions:
                self._at[each.topic, each.partition] = self._start(each)

    def _start(self, at: TopicPartition) -> int:
        partition = self.kafka.there(at)
        if at.offset == OFFSET_BEGINNING:
            return partition.first
        if at.offset == OFFSET_END:
            return partition.end
        if at.offset >= 0:
            return at.offset
        committed = self.kafka.offsets[self.group].get((at.topic, at.partition))
        if committed is not None:
            return committed[0]
        return partition.end if self.settings.get("auto.offset.reset") == "latest" else partition.first

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        self.kafka.meet("incremental_unassign")
        for each in partitions:
            self._at.pop((each.topic, each.partition), None)

    def unassign(self) -> None:
        self._at = {}

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition(*at) for at in self._at]

    def pause(self, partitions: list[TopicPartition]) -> None:
        self._paused |= {(each.topic, each.partition) for each in partitions}

    def resume(self, partitions: list[TopicPartition]) -> None:
        self._paused -= {(each.topic, each.partition) for each in partitions}

    def seek(self, at: TopicPartition) -> None:
        self.kafka.meet("seek")
        self._at[at.topic, at.partition] = at.offset

    def poll(self, timeout: float = -1) -> Message | None:
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        self.kafka.meet("consume")
        self._serve()
        deadline_s = time.monotonic() + timeout
        found: list[Message] = []
        with self.kafka.turn:
            while True:
                found += self._fetched(num_messages - len(found))
                left_s = deadline_s - time.monotonic()
                if found or left_s <= 0 or self._to_serve():
                    return found
                self.kafka.turn.wait(min(left_s, 0.05))

    def _fetched(self, count: int) -> list[Message]:
        if self._says:
            return [Message(topic="", partition=0, offset=0, error=self._says.popleft())]
        found: list[Message] = []
        for at in [each for each in self._at if each not in self._paused]:
            if self.kafka.faults["fetch"]:
                found.append(Message(topic=at[0], partition=at[1], offset=0, error=self.kafka.faults["fetch"].popleft().args[0]))
            found += self._records(at, count - len(found))
        return found

    def _records(self, at: At, count: int) -> list[Message]:
        committed = self.settings.get("isolation.level", "read_committed") == "read_committed"
        topic = self.kafka.topics.get(at[0])
        if topic is None:
            return []
        partition, found = topic.partitions[at[1]], list[Message]()
        if not partition.first <= self._at[at] <= partition.end:
            if self.settings.get("auto.offset.reset") == "error":
                return [Message(topic=at[0], partition=at[1], offset=self._at[at], error=KafkaError(KafkaError._AUTO_OFFSET_RESET))]
            self._at[at] = partition.first
        end = partition.stable if committed else partition.end
        while self._at[at] < end and len(found) < count:
            offset = self._at[at]
            self._at[at] += 1
            record = partition.records.get(offset)
            if record is not None and _readable(partition, offset, record, committed=committed):
                self._told_end.discard(at)
                found.append(
                    Message(
                        topic=at[0], partition=at[1], offset=offset, key=record.key, value=record.value,
                        headers=record.headers, timestamp=(1, record.timestamp_ms),
                    )
                )  # fmt: skip
        if self._at[at] >= end and at not in self._told_end and len(found) < count and self.settings.get("enable.partition.eof"):
            self._told_end.add(at)
            found.append(Message(topic=at[0], partition=at[1], offset=self._at[at], error=KafkaError(KafkaError._PARTITION_EOF)))
        return found

    def get_watermark_offsets(self, at: TopicPartition, timeout: float = -1, cached: bool = False) -> tuple[int, int]:
        self.kafka.meet("get_watermark_offsets")
        with self.kafka.turn:
            partition = self.kafka.there(at)
            return partition.first, partition.end

    # -- groups ------------------------------------------------------------------------------------------------------

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        self._patterns = list(topics)
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        with self.kafka.turn:
            members = self.kafka.members[self.group]
            for other in [each for each in members if self.instance is not None and each.instance == self.instance]:
                members.remove(other)
                self.target, other.target = other.target, set()
                other.fence()
            members.append(self)
            self.kafka.balance(self.group)

    def fence(self) -> None:
        """Kafka has given the name of this member to another client; its partitions are gone without a call."""
        self._says.append(KafkaError(KafkaError.FENCED_INSTANCE_ID, "fenced", fatal=True))
        self._callbacks = {}

    def expire(self) -> None:
        """The session ends: others get what this one has, and it hears of that from its own client."""
        with self.kafka.turn:
            self.kafka.members[self.group].remove(self)
            self.target = set()
            self._callbacks["revoke"] = self._callbacks["lost"]
            self.kafka.balance(self.group)

    def wanted_topics(self) -> set[str]:
        return {
            name
            for name in self.kafka.topics
            for each in self._patterns
            if (re.match(each, name) if each.startswith("^") else each == name)
        }

    def unsubscribe(self) -> None:
        with self.kafka.turn:
            if self in self.kafka.members[self.group]:
                self.kafka.members[self.group].remove(self)
            self.target = set()
            self.kafka.balance(self.group)

    def _to_serve(self) -> bool:
        return bool(self._callbacks) and self.target != set(self._at)

    def _serve(self) -> None:
        while self._commits:
            self.settings["on_commit"](*self._commits.popleft())
        if not self._to_serve():
            return
        gone, new = set(self._at) - self.target, self.target - set(self._at)
        if gone:
            self._callbacks["revoke"](self, [TopicPartition(*each) for each in sorted(gone)])
        if new:
            self._callbacks["assign"](self, [TopicPartition(*each) for each in sorted(new)])

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        self.kafka.meet("committed")
        with self.kafka.turn:
            stored = self.kafka.offsets[self.group]
            return [TopicPartition(at.topic, at.partition, *stored.get((at.topic, at.partition), (OFFSET_INVALID,))) for at in partitions]

    def commit(self, offsets: list[TopicPartition], asynchronous: bool = True) -> list[TopicPartition] | None:
        error: KafkaError | None = None
        try:
            self.kafka.meet("commit")
            if self._patterns and self not in self.kafka.members[self.group]:
                raise failure(KafkaError.UNKNOWN_MEMBER_ID)
            with self.kafka.turn:
                for each in offsets:
                    self.kafka.offsets[self.group][each.topic, each.partition] = each.offset, each.metadata or ""
        except KafkaException as raised:
            error = raised.args[0]
            if not asynchronous:
                raise
        if asynchronous:
            self._commits.append((error, offsets))
            return None
        return offsets

    def consumer_group_metadata(self) -> str:
        return self.group

    def close(self) -> None:
        self.kafka.meet("close")
        self.closed = True
        if self.instance is None:
            self.unsubscribe()
        self._at = {}


class MemoryAdmin(_Client):
    """A client for questions."""

    def poll(self, timeout: float = -1) -> int:
        return 0

    def _answer_of_controller(self, call: str, answer: Callable[[], Any]) -> Future[Any]:
        """A client that knows no controller waits in vain: it does not ask for a newer list of nodes meanwhile."""
        if self.knows_controller:
            return self._answer(call, answer)
        future: Future[Any] = Future()
        future.set_exception(failure(KafkaError._TIMED_OUT, reason="Failed while waiting for controller: Local: Timed out"))
        return future

    def _answer(self, call: str, answer: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            self.kafka.meet(call)
            with self.kafka.turn:
                future.set_result(answer())
        except KafkaException as error:
            future.set_exception(error)
        return future

    def list_offsets(self, asked: Mapping[TopicPartition, Any], isolation_level: Any = None, request_timeout: float = 0) -> dict[Any, Any]:
        stable = isolation_level is IsolationLevel.READ_COMMITTED
        return {at: self._answer("list_offsets", partial(self._offset, at, spec._value, stable)) for at, spec in asked.items()}

    def _offset(self, at: TopicPartition, wanted: int, stable: bool) -> Any:
        partition = self.kafka.there(at)
        if wanted == -2:
            return SimpleNamespace(offset=partition.first)
        if wanted == -1:
            return SimpleNamespace(offset=partition.stable if stable else partition.end)
        later = [offset for offset, record in sorted(partition.records.items()) if record.timestamp_ms >= wanted]
        return SimpleNamespace(offset=later[0] if later else -1)

    def create_topics(self, topics: list[Any], **_: Any) -> dict[str, Future[None]]:
        return {each.topic: self._answer_of_controller("create_topics", partial(self._create, each)) for each in topics}

    def _create(self, new: Any) -> None:
        if new.topic in self.kafka.topics:
            raise failure(KafkaError.TOPIC_ALREADY_EXISTS)
        self.kafka.create(new.topic, new.num_partitions, **new.config)

    def _topic(self, name: str) -> Topic:
        if name not in self.kafka.topics:
            raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART)
        return self.kafka.topics[name]

    def describe_configs(self, resources: list[Any], **_: Any) -> dict[Any, Future[Any]]:
        def entries(name: str) -> dict[str, ConfigEntry]:
            return {key: ConfigEntry(key, value) for key, value in self._topic(name).config.items()}

        return {each: self._answer_of_controller("describe_configs", partial(entries, each.name)) for each in resources}

    def describe_topics(self, asked: Any, include_authorized_operations: bool = False, **_: Any) -> dict[str, Future[Any]]:
        def described(name: str) -> Any:
            topic = self._topic(name)
            replicas = SimpleNamespace(replicas=[1] * topic.replicas, isr=[1] * topic.in_sync)
            allowed = [AclOperation.READ] if name in self.kafka.denied else [AclOperation.READ, AclOperation.WRITE]
            return SimpleNamespace(topic_id=topic.id, partitions=[replicas] * len(topic.partitions), authorized_operations=allowed)

        return {name: self._answer_of_controller("describe_topics", partial(described, name)) for name in asked.topic_names}

    def delete_records(self, ends: list[TopicPartition], **_: Any) -> dict[Any, Future[Any]]:
        return {at: self._answer("delete_records", partial(self._delete, at)) for at in ends}

    def _delete(self, at: TopicPartition) -> None:
        self.kafka.there(at).delete(at.offset)
